import subprocess
import sys
import time

import psutil

from qwen35_trainer.runtime.memory import MemoryWatch

HOLD = "held = bytearray(200 * 2**20); print('ready', flush=True); import sys; sys.stdin.read()"


def test_the_peak_includes_what_a_child_held_even_after_it_is_gone():
    own = psutil.Process().memory_info().rss / 2**20
    watch = MemoryWatch(every_seconds=0.02, search_every=1)
    with subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        time.sleep(0.5)
        child.stdin.close()
    assert watch.stop() > own + 150

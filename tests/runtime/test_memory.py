import subprocess
import sys
import time

import psutil

from qwen35_trainer.runtime.process import MemoryWatch
from tests.patience import PATIENCE

HOLD = "held = bytearray(200 * 2**20); print('ready', flush=True); import sys; sys.stdin.read()"


def test_the_peak_includes_what_a_child_held_even_after_it_is_gone():
    own = psutil.Process().memory_info().rss / 2**20
    watch = MemoryWatch(every_seconds=0.02, search_every=1)
    with subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        until = time.monotonic() + PATIENCE
        while watch.peak < own + 150:
            assert time.monotonic() < until, "the child was never seen"
            time.sleep(0.02)
        child.stdin.close()
    assert watch.stop() > own + 150

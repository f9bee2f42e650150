"""The environment of a run: no variable is added once another thread can read one, which would crash the process."""

import os
import subprocess

from tests.forks.start import start
from tests.patience import PATIENCE

from .conftest import ENVIRONMENT

WATCHED = """
import os, sys
from pathlib import Path

from qwen35_trainer.cli import main

reading = []

def note(event, arguments):
    if event == "_thread.start_new_thread":
        reading.append(True)
    if event == "os.putenv" and reading:
        name = os.fsdecode(arguments[0])
        with Path("set").open("a") as file:
            print("old" if name in os.environ else "new", name, file=file)

sys.addaudithook(note)
main()
"""


def test_no_variable_is_added_while_the_data_are_read_beside_rays_start(write, tmp_path):
    """With TOKENIZERS_PARALLELISM and others added there, tokenizers has crashed in getenv."""
    (tmp_path / "watched.py").write_text(WATCHED)
    with (tmp_path / "log").open("wb") as log:
        running = start(
            [str(tmp_path / "watched.py"), "run", str(write(tmp_path, {"train.updates": 1})), "--output", "out"],
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            cwd=tmp_path,
            env=os.environ | ENVIRONMENT,
            start_new_session=True,
        )
    assert running.wait(PATIENCE) == 0, (tmp_path / "log").read_text()
    seen = (tmp_path / "set").read_text().splitlines()
    assert "old RAY_USAGE_STATS_ENABLED" in seen, "Ray sets it in ray.init, beside which the data are read"
    assert [line for line in seen if line.startswith("new ")] == []

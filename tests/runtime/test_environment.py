"""The environment of a run. To add a variable while another thread reads one can crash the process."""

from tests.patience import PATIENCE

from .conftest import start_python

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
    """When TOKENIZERS_PARALLELISM and others were added at that time, tokenizers crashed in getenv."""
    (tmp_path / "watched.py").write_text(WATCHED)
    with (tmp_path / "log").open("wb") as log:
        run = ["run", str(write(tmp_path, {"train.updates": 1})), "--output", "out"]
        running = start_python([str(tmp_path / "watched.py"), *run], cwd=tmp_path, stdout=log, stderr=log)
    assert running.wait(PATIENCE) == 0, (tmp_path / "log").read_text()
    seen = (tmp_path / "set").read_text().splitlines()
    assert "old RAY_USAGE_STATS_ENABLED" in seen, (
        "the hook did not see ray.init set its variable while the data were read"
    )
    assert [line for line in seen if line.startswith("new ")] == []

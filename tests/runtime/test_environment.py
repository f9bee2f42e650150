"""The environment of a run. To add a variable while another thread reads one can crash the process."""

import json

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
WATCHING_LOSS = """
import json, os, sys
from pathlib import Path

had, added = sorted(os.environ), []
record = Path(__file__).with_name("worker.json")

def note(event, arguments):
    if event == "os.putenv" and os.fsdecode(arguments[0]) not in os.environ:
        added.append(os.fsdecode(arguments[0]))

sys.addaudithook(note)

def loss(inputs):
    record.write_text(json.dumps({"had": had, "added": added}))
    return -inputs.advantages * inputs.log_probs
"""
OF_TORCHS_COMPILER = "TORCHINDUCTOR_CACHE_DIR"


def test_no_variable_is_added_while_the_data_are_read_or_by_a_worker(write, tmp_path, monkeypatch):
    """When TOKENIZERS_PARALLELISM and others were added at that time, tokenizers crashed in getenv.

    A worker of the tests is a fork that has imported torch's compiler, so that this cannot add its variable again: the worker
    has to have it from its start.
    """
    monkeypatch.delenv(OF_TORCHS_COMPILER, raising=False)
    monkeypatch.delenv("RAY_CLIENT_MODE", raising=False)  # the tests have imported Ray
    (tmp_path / "watched.py").write_text(WATCHED)
    (tmp_path / "watching.py").write_text(WATCHING_LOSS)
    changes = {"train.updates": 2, "algorithm.loss": {"type": "Function", "function": "watching:loss"}}
    with (tmp_path / "log").open("wb") as log:
        run = ["run", str(write(tmp_path, changes)), "--output", "out"]
        running = start_python([str(tmp_path / "watched.py"), *run], cwd=tmp_path, stdout=log, stderr=log)
    assert running.wait(PATIENCE) == 0, (tmp_path / "log").read_text()
    seen = (tmp_path / "set").read_text().splitlines()
    assert "old RAY_USAGE_STATS_ENABLED" in seen, (
        "the hook did not see ray.init set its variable while the data were read"
    )
    assert [line for line in seen if line.startswith("new ")] == []
    worker = json.loads((tmp_path / "worker.json").read_text())
    assert OF_TORCHS_COMPILER in worker["had"]
    assert worker["added"] == []

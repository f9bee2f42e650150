"""What a run prints is lost with its reader; the run is not."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from qwen35_trainer.progress.metrics_file import read_records
from qwen35_trainer.progress.records import CheckpointRecord, UpdateRecord
from tests.patience import PATIENCE

from .conftest import start_python

PRINTING = """
import sys
from pathlib import Path

from rich.console import Console

from qwen35_trainer.cli import survive_readers

survive_readers()
for _ in range(2):
    print("to nobody", flush=True)
    print("to nobody", file=sys.stderr, flush=True)
    Console().print("to nobody")
Path("through").touch()
"""


def printing(folder: Path, **streams: object) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-c", PRINTING], cwd=folder, timeout=PATIENCE, check=False, **streams)


def test_a_pipe_that_nobody_reads_any_more_takes_everything(tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    assert printing(tmp_path, stdout=writing, stderr=writing).returncode == 0
    os.close(writing)
    assert (tmp_path / "through").exists()


def test_what_is_read_arrives(tmp_path):
    done = printing(tmp_path, capture_output=True)
    assert (done.stdout, done.stderr) == (b"to nobody\n" * 4, b"to nobody\n" * 2)


def test_output_that_was_closed_from_the_start_is_not_an_error(tmp_path):
    command = [sys.executable, "-c", PRINTING]
    done = subprocess.run(["sh", "-c", '"$@" >&- 2>&-', "sh", *command], cwd=tmp_path, timeout=PATIENCE, check=False)
    assert done.returncode == 0
    assert (tmp_path / "through").exists()


def test_a_full_disk_under_the_output_is_still_an_error(tmp_path):
    with Path("/dev/full").open("wb") as full:
        assert printing(tmp_path, stdout=full, stderr=subprocess.DEVNULL).returncode != 0
    assert not (tmp_path / "through").exists()


def test_a_run_whose_reader_ends_with_the_same_ctrl_c_saves(write, tmp_path):
    """As `qwen35 run … 2>&1 | tee log`."""
    file = write(tmp_path, {"train.updates": 500}, prompts=2100)
    reading, writing = os.pipe()
    run = ["-m", "qwen35_trainer.cli", "run", str(file), "--output", str(tmp_path / "out")]
    running = start_python(run, cwd=tmp_path, stdout=writing, stderr=writing)
    os.close(writing)
    with os.fdopen(reading) as lines:
        assert any("update=1/" in line for line in lines)
    os.kill(running.pid, signal.SIGINT)
    assert running.wait(PATIENCE) == 0
    records = read_records(tmp_path / "out" / "metrics.jsonl")
    updates = [record.update for record in records if isinstance(record, UpdateRecord)]
    assert [record.update for record in records if isinstance(record, CheckpointRecord)][-1] == updates[-1]
    assert (tmp_path / "out" / "summary.json").exists()

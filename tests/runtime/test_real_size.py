"""Qwen3.5-0.8B in its real shape learns and leaves, on a machine with 20 GB: `QWEN35_TESTS=soak pytest -s` prints the figures."""

import contextlib
import json
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import psutil
import pytest

from qwen35_trainer.progress.records import ExportRecord, SpanRecord, UpdateRecord

LIMIT = 20e9
"""Bytes that a run may take."""
PROCESSES = ("TrainWorker", "RolloutWorker", "Driver", "qwen35_trainer.cli export")


class Memory:
    """The maximum memory of each process of a run and of all together, in bytes. Memory that processes share, the object store
    above all, counts once in the sum and not at all in a single process.
    """

    def __init__(self, running) -> None:
        self._running, self._over = running, threading.Event()
        self.peaks: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.5):
            together = 0
            for process in self._running.processes():
                with contextlib.suppress(psutil.Error):
                    title, memory = " ".join(process.cmdline()), process.memory_full_info()
                    name = next((name for name in PROCESSES if name in title), "others, each")
                    self._peak(name, memory.uss)
                    together += memory.pss
            self._peak("together", together)

    def _peak(self, name: str, size: int) -> None:
        self.peaks[name] = max(self.peaks[name], size)


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["text", "published"])
def test_a_published_model_trains_and_leaves_within_20_gb(command, write, tmp_path, kind: str) -> None:
    folder = tmp_path / "model"
    subprocess.run([sys.executable, "-m", "tests.models.real_size", str(folder), kind], check=True, cwd=Path.cwd())
    changes = {
        "model": {"name": "qwen", "precision": "BF16", "source": {"path": str(folder)}},
        "data.maxPromptTokens": 64,
        "data.maxResponseTokens": 32,
        "rollout.maxSequencesPerReplica": 8,
        "train.batch": {"promptsPerUpdate": 2, "microBatchSequences": 8},
        "train.activationCheckpointing": True,
        "checkpoint": {"everyUpdates": 100, "keep": 1, "export": "AtEnd"},
    }
    running = command.start("run", write(tmp_path, changes), output=tmp_path / "out", forked=False)
    with Memory(running) as memory:
        ended = running.end(seconds=1800)
    assert ended.code == 0, ended.err
    updates = ended.of(UpdateRecord)
    assert [update.samples for update in updates] == [8, 8, 8]
    [export] = ended.of(ExportRecord)
    assert export.problem == ""
    assert {file.name for file in folder.glob("*.safetensors")} == {
        file.name for file in Path(export.path).glob("*.safetensors")
    }
    seconds: Counter[str] = Counter()
    for span in ended.of(SpanRecord):
        seconds[span.kind] += span.end - span.start
    seconds["export"] = export.seconds
    figures = {
        "peak GB": {name: round(size / 1e9, 2) for name, size in memory.peaks.items()},
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
    }
    print(json.dumps({kind: figures}, indent=2))
    assert memory.peaks["together"] <= LIMIT, figures

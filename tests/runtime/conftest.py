"""Small manifests, and runs of the real command in processes of their own."""

import copy
import gc
import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil
import pytest
import yaml

from qwen35_trainer.progress.metrics_file import read_records
from qwen35_trainer.progress.records import RunRecord, SpanRecord
from qwen35_trainer.runtime import exporting
from tests.forks.start import Process, python, start
from tests.patience import PATIENCE
from tests.profiles import FORKED

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
REMOVED = object()
LOST = "other replicas take over its sequences"
"""Part of the driver's warning about each lost replica."""
SMALL: dict[str, Any] = {
    "mode": "FullyAsync",
    "accelerator": {"profile": "CPU", "devicesPerNode": 1},
    "model": {
        "name": "tiny",
        "precision": "FP32",
        "source": {
            "random": {"hiddenSize": 32, "intermediateSize": 32, "fullAttentionInterval": 2, "layers": 2}
            | {"characters": "0123456789>="}
        },
    },
    "data": {
        "train": [{"name": "train", "files": {"paths": ["train.jsonl"]}}],
        "maxPromptTokens": 8,
        "maxResponseTokens": 3,
    },
    "rewards": [{"name": "digit", "type": "ExactMatch"}],
    "algorithm": {"groupSize": 4},
    "rollout": {"engine": "Torch", "maxSequencesPerReplica": 64},
    "train": {"updates": 3, "batch": {"promptsPerUpdate": 4, "microBatchSequences": 16}},
    "async": {"stalenessThreshold": 1.0, "maxVersionLag": 2, "stallSeconds": PATIENCE},
    "tracking": {"tensorboard": False},
}

type Changes = Mapping[str, object]
type Write = Callable[..., Path]


@dataclass(frozen=True)
class Ended:
    """A command that is over, and the records as they were then."""

    code: int
    out: str
    err: str
    folder: Path
    records: list[RunRecord]

    def of[R: RunRecord](self, kind: type[R]) -> list[R]:
        return [record for record in self.records if isinstance(record, kind)]

    @property
    def overlaps(self) -> list[tuple[SpanRecord, SpanRecord]]:
        """Work of a replica and of a rank at the same time."""
        spans = self.of(SpanRecord)
        generating, training = ([span for span in spans if span.kind == kind] for kind in ("generate", "train"))
        assert generating
        assert training
        return [(g, t) for g in generating for t in training if g.start < t.end and t.start < g.end]

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    def progress(self, update: int) -> dict[str, Any]:
        return json.loads((self.folder / "checkpoints" / f"update-{update:06d}" / "progress.json").read_text())


@dataclass
class Running:
    """A command under way, the first of a process group of its own, as a shell starts it."""

    folder: Path
    home: Path
    """The folder that it was started in, and all its processes with it."""
    process: Process = field(init=False)

    @property
    def out(self) -> Path:
        return self.home / "out"

    @property
    def err(self) -> Path:
        return self.home / "err"

    @property
    def losses(self) -> int:
        """How many replicas the driver has lost so far."""
        log = self.folder / "logs" / "driver.log"
        return log.read_text().count(LOST) if log.exists() else 0

    @property
    def updates(self) -> int:
        """The number of the last update that the command printed."""
        with self.out.open("rb") as out:
            out.seek(max(0, out.seek(0, os.SEEK_END) - 4096))
            printed = re.findall(rb"update=(\d+)/", out.read())
        return int(printed[-1]) if printed else 0

    def wait_for(self, text: str) -> None:
        """Until the command printed `text`."""
        self.wait_until(lambda: text in self.out.read_text(), text)

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            output = f"{self.out.read_text()}\n{self.err.read_text()}"
            assert self.process.poll() is None, f"ended before {what}:\n{output}"
            assert time.monotonic() < deadline, f"no {what}:\n{output}"
            time.sleep(0.02)

    def signal(self, number: int, *, group: bool = False) -> None:
        """`group`: to all its processes too, as a terminal does for Ctrl-C."""
        (os.killpg if group else os.kill)(self.process.pid, number)

    def processes(self, title: str = "") -> list[psutil.Process]:
        """What the command started and still runs, wherever it hangs in the tree; by a part of its title."""
        processes = []
        for process in psutil.process_iter():
            try:
                # By folder, not by environment: Ray's workers write their titles over theirs.
                ours = process.status() != psutil.STATUS_ZOMBIE and process.cwd() == str(self.home)
                if ours and title in " ".join(process.cmdline()):
                    processes.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return processes

    def end(self, seconds: float = PATIENCE) -> Ended:
        """Wait until it is over, and see that it left no process behind."""
        code = self.process.wait(seconds)
        metrics = self.folder / "metrics.jsonl"
        records = list(read_records(metrics)) if metrics.is_file() else []
        ended = Ended(code, self.out.read_text(), self.err.read_text(), self.folder, records)
        deadline = time.monotonic() + PATIENCE
        while running := self.processes():
            assert time.monotonic() < deadline, f"left behind: {[process.cmdline() for process in running]}"
            time.sleep(0.1)
        return ended

    def kill(self) -> None:
        for process in self.processes():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait(PATIENCE)


def start_python(
    arguments: Sequence[str], *, cwd: Path, stdout: IO[bytes] | int, stderr: IO[bytes] | int, forked: bool = FORKED
) -> Process:
    """`python ARGUMENTS` in a session of its own, in the environment of the tests' runs."""
    return start(
        arguments,
        stdout=stdout,
        stderr=stderr,
        stdin=subprocess.DEVNULL,
        cwd=cwd,
        env=os.environ | ENVIRONMENT,
        start_new_session=True,
        forked=forked,
    )


@dataclass
class Command:
    """Starts `qwen35 …`; without a fork server (tests/forks) where a test is about the start itself."""

    room: Path
    started: list[Running] = field(default_factory=list)

    def start(self, *arguments: object, output: Path, forked: bool = FORKED) -> Running:
        running = Running(home=self.room / str(len(self.started)), folder=output)
        running.home.mkdir()
        command = ["-m", "qwen35_trainer.cli", *map(str, arguments), "--output", str(output)]
        with running.out.open("wb") as out, running.err.open("wb") as err:
            running.process = start_python(command, cwd=running.home, stdout=out, stderr=err, forked=forked)
        self.started.append(running)
        return running

    def run(self, file: Path, *arguments: object, output: Path | None = None) -> Ended:
        """`qwen35 run FILE …` to its end; the output is a folder next to the manifest unless given."""
        return self.start("run", file, *arguments, output=output or file.parent / "out").end()


@pytest.fixture(scope="session")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    built = Command(tmp_path_factory.mktemp("commands"))
    yield built
    for running in built.started:
        running.kill()


@pytest.fixture(autouse=True)
def _no_run_outlives_its_test(command: Command) -> Iterator[None]:
    """A run whose test has failed would take processor time from all later tests."""
    before = len(command.started)
    yield
    for running in command.started[before:]:
        if running.process.poll() is None:
            running.kill()


@pytest.fixture(scope="session")
def _local_room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from .local import Local  # imports torch

    gc.collect()
    gc.freeze()  # the end of each run collects garbage, which takes a third of a second with all that is imported by now
    yield Local(tmp_path_factory.mktemp("local"))
    gc.unfreeze()


@pytest.fixture(scope="module")
def local(_local_room: Any) -> Iterator[Any]:
    """Starts runs as `command` does, but in this process and with Ray played by threads: 0.5 core-seconds in place of ten."""
    yield _local_room
    _local_room.end()


@pytest.fixture
def forked_export(monkeypatch: pytest.MonkeyPatch) -> None:
    """`qwen35 export` is a process in these tests too, but does not import torch again."""
    _, *arguments = exporting.EXPORT_COMMAND
    monkeypatch.setattr(exporting, "EXPORT_COMMAND", (python(), *arguments))


@pytest.fixture(scope="session")
def write() -> Write:
    """write(folder, {"train.updates": 5}, prompts=20) is a small manifest in `folder`, with its data."""

    def manifest(
        folder: Path,
        changes: Changes | None = None,
        *,
        prompts: int = 64,
        reward: str | None = None,
        name: str = "tiny",
    ) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        spec = copy.deepcopy(SMALL)
        if reward is not None:
            (folder / "judge.py").write_text(reward)
            spec["rewards"] = [{"name": "judge", "type": "Function", "function": "judge:score"}]
        for path, value in (changes or {}).items():
            _set(spec, path, value)
        document = {"apiVersion": "rl.qwen35.io/v1alpha1", "kind": "Qwen35Training", "metadata": {"name": name}}
        file = folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(document | {"spec": spec}))
        for part, first in (("train", 0), ("validation", 100_000)):
            lines = (
                json.dumps({"prompt": f"{first + number}=", "answer": str(number % 10)}) for number in range(prompts)
            )
            (folder / f"{part}.jsonl").write_text("\n".join(lines) + "\n")
        return file

    return manifest


@pytest.fixture(scope="session")
def removed() -> object:
    """The value that takes a field out."""
    return REMOVED


def _set(spec: dict[str, Any], path: str, value: object) -> None:
    *parents, last = path.split(".")
    here: Any = spec
    for key in parents:
        here = here[int(key)] if key.isdigit() else here.setdefault(key, {})
    if value is REMOVED:
        del here[last]
    else:
        here[int(last) if last.isdigit() else last] = value

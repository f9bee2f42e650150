"""What breaks while a run is under way: it ends with a message and exit code 1, and loses nothing that was saved."""

import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from qwen35_trainer.epoch import Owner, read_owner, take
from qwen35_trainer.progress.records import CheckpointRecord, FinishRecord, UpdateRecord, surviving_updates
from qwen35_trainer.rollout.torch import TorchEngine
from qwen35_trainer.runtime import rollout_pool, rollout_worker
from qwen35_trainer.runtime.checkpoint_store import CheckpointStore
from qwen35_trainer.runtime.rollout_pool import MAX_STEP_SECONDS
from qwen35_trainer.runtime.worker_connection import unpack
from tests.patience import PATIENCE

from .conftest import Ended
from .local import LocalRunning
from .threads import STEP_SECONDS, Fault

BROKEN = """
def score(prompt, response, answer, metadata):
    if prompt == "5=":
        raise ValueError("the judge is ill")
    return float(len(response))
"""
STUCK = """
import time
from pathlib import Path

calls = 0

def score(prompt, response, answer, metadata):
    global calls
    calls += 1
    if calls > 100:
        Path(__file__).with_name("stuck").touch()
        time.sleep(3600)
    return float(len(response))
"""
SLOW = """
import time

def score(prompt, response, answer, metadata):
    time.sleep(0.05)
    return float(len(response))
"""
NOTED = """
from pathlib import Path

def score(prompt, response, answer, metadata):
    with Path(__file__).with_name("scored").open("a") as scored:
        scored.write(prompt + "\\n")
    return float(len(response))
"""
ENDLESS = {
    "seed": 1,
    "model.source.random": {"hiddenSize": 16, "intermediateSize": 32, "layers": 2, "fullAttentionInterval": 2}
    | {"characters": "0123456789>="},
    "data.shuffle": False,
    "rollout": {"engine": "Torch", "maxSequencesPerReplica": 2, "topK": 1},
}
"""With these weights the likeliest tokens go round in a circle of three: a response ends at its limit."""
TOKENS = 750
"""Tokens of a response that takes several times as long as a report of its progress."""
UPDATES, PROMPTS = 8, 32
"""Of the runs that lose a replica. The loss comes in the first half."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """disk("64k") is the folder of an empty file system of that size."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount a small file system")
    mounted: list[Path] = []

    def mount(size: str) -> Path:
        folder = tmp_path / f"disk-{size}"
        folder.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True, text=True, check=False
        )
        if done.returncode:
            pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", folder], check=True)


def test_data_that_cannot_be_used_are_refused_together_and_write_nothing(local, write, tmp_path):
    sources = [{"name": name, "files": {"paths": [f"{name}.jsonl"]}} for name in ("broken", "empty")]
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "broken.jsonl").write_text("not JSON\n")
    ended = local.run(write(tmp_path, {"data.train": sources}))
    assert ended.code == 2
    assert "2 problems in the data" in ended.err
    assert "broken.jsonl" in ended.err
    assert "empty.jsonl: no rows. Add at least one, or remove the source." in ended.err
    assert not ended.folder.exists()


def test_a_data_file_that_does_not_exist_is_refused_with_what_its_folder_holds(local, write, tmp_path):
    sources = [{"name": "gone", "files": {"paths": ["gone.jsonl"]}}]
    ended = local.run(write(tmp_path, {"data.train": sources}))
    assert ended.code == 2
    assert "spec.data.train[0].files: " in ended.err
    assert "gone.jsonl does not exist" in ended.err
    assert "train.jsonl, validation.jsonl" in ended.err
    assert not ended.folder.exists()


def test_a_reward_that_may_not_fail_ends_the_run_with_its_name_and_the_prompt(command, write, tmp_path):
    file = write(tmp_path, {"data.shuffle": False}, reward=BROKEN)
    ended = command.run(file, "--set", "rewards[0].onError=Fail")
    assert ended.code == 1
    assert "reward judge, onError Fail, prompt train/5: ValueError: the judge is ill" in ended.err
    assert f"Logs: {ended.folder / 'logs'}" in ended.err
    assert ended.summary["outcome"] == "Failed"
    assert "the judge is ill" in (ended.folder / "report.html").read_text()
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("on_error", ["Zero", "Skip"])
def test_a_reward_that_always_fails_ends_the_run_in_its_first_batch(local, write, tmp_path, on_error):
    broken = BROKEN.replace('if prompt == "5=":', "if True:")
    ended = local.run(write(tmp_path, {"train.updates": 50}, reward=broken), "--set", f"rewards[0].onError={on_error}")
    assert ended.code == 1
    assert "every reward of the first 16 responses failed" in ended.err
    assert ": ValueError: the judge is ill" in ended.err
    assert len(ended.of(UpdateRecord)) <= 1
    finish = ended.of(FinishRecord)[-1]
    assert finish.traceback.startswith("Traceback (most recent call last)"), "not one of a group of tasks"
    assert ".RewardFailed: every reward of the first 16 responses failed" in finish.traceback
    page = (ended.folder / "report.html").read_text()
    assert '<p class="message Failed">every reward of the first 16 responses failed' in page
    assert "<pre>Traceback (most recent call last)" in page
    assert f"started {datetime.fromtimestamp(finish.wall_time - finish.time, UTC):%Y-%m-%d %H:%M} UTC" in page


def test_a_function_that_can_no_longer_be_imported_ends_the_run_before_it_trains(local, write, tmp_path):
    """It is imported once before Ray starts, and then by the driver."""
    once = "from pathlib import Path\nPath(__file__).with_name('there').unlink()\ndef score(*_): return 1.0\n"
    (tmp_path / "there").touch()
    ended = local.run(write(tmp_path, reward=once))
    assert ended.code == 1
    assert "reward judge: judge:score: importing judge failed: FileNotFoundError: " in ended.err
    assert ended.summary["updates"] == 0


def test_a_full_disk_loses_the_new_checkpoint_and_keeps_the_one_before(local, write, tmp_path, disk):
    storage = disk("1400k")
    changes = {"train.updates": 50, "checkpoint": {"everyUpdates": 1, "keep": 9, "storage": {"path": str(storage)}}}
    ended = local.run(write(tmp_path, changes))
    assert ended.code == 1
    saved = ended.of(CheckpointRecord)
    assert saved
    lost = re.search(rf"checkpoint {storage}/update-(\d{{6}}) was not saved: ", ended.err)
    assert lost is not None, ended.err
    assert int(lost[1]) > saved[-1].update  # the next one, or a later one: updates train during a save
    assert "No space left on device" in ended.err
    assert "earlier checkpoints are untouched. Free space, then continue with --resume auto; or" in ended.err
    assert len(ended.err.splitlines()) == 2
    whole = CheckpointStore(storage, 9).latest()
    assert whole is not None
    assert whole.progress.update == saved[-1].update
    assert not list(storage.glob(".*"))
    assert ended.of(FinishRecord)[-1].outcome == "Failed"


def test_a_full_disk_under_the_run_folder_ends_the_run_and_tears_no_line(local, write, tmp_path, disk):
    folder = disk("64k")
    changes = {"train.updates": 200, "checkpoint": {"everyUpdates": 1000, "storage": {"path": str(tmp_path / "ckpt")}}}
    ended = local.run(write(tmp_path, changes, prompts=900), output=folder / "out")
    assert ended.code == 1
    metrics = folder / "out" / "metrics.jsonl"
    # The journal lies there too: now one needs the last page, now the other.
    full = "No space left on device. Free space or choose another run folder, then resume"
    full_journal = "No space left on device. Free space, or make the folder writable, then continue with --resume auto"
    assert (
        f"{metrics}: cannot write to the metrics file: {full}" in ended.err
        or f"journal {folder / 'out' / 'journal'} was not written: {full_journal}" in ended.err
    )
    assert "Traceback" not in ended.err
    assert metrics.read_bytes().endswith(b"\n")
    assert ended.records


def _ended_by_name(ended: Ended, message: str) -> None:
    assert ended.code == 1
    assert message in ended.err
    assert "Traceback" not in ended.err
    assert "--resume auto" in ended.err
    assert ended.of(FinishRecord)[-1].outcome == "Failed"
    assert CheckpointStore(ended.folder / "checkpoints", 3).latest() is not None


def test_a_driver_that_is_killed_ends_the_run_by_name(command, write, tmp_path):
    """In the middle of a reward that hangs, which must not outlive the run either."""
    file = write(tmp_path, {"train.updates": 500, "checkpoint.everyUpdates": 2}, prompts=2100, reward=STUCK)
    running = command.start("run", file, "--set", "rewards[0].timeoutSeconds=3600", output=tmp_path / "out")
    running.wait_until((tmp_path / "stuck").exists, "call that hangs")
    running.wait_until(lambda: any(running.folder.glob("checkpoints/update-*")), "checkpoint")
    (victim,) = running.processes("ray::Driver")
    victim.kill()
    _ended_by_name(running.end(), "the driver was lost")


def test_a_train_worker_that_is_killed_ends_the_run_by_name(command, write, tmp_path):
    file = write(tmp_path, {"train.updates": 500, "checkpoint.everyUpdates": 2}, prompts=2100)
    running = command.start("run", file, output=tmp_path / "out")
    running.wait_until(lambda: any(running.folder.glob("checkpoints/update-*")), "checkpoint")
    (victim,) = running.processes("ray::TrainWorker")
    victim.kill()
    _ended_by_name(running.end(), "the train pool was lost during")


def test_a_rollout_replica_that_is_killed_is_replaced_and_every_prompt_trains_once(command, write, tmp_path):
    file = write(tmp_path, {"train.updates": UPDATES}, reward=SLOW)
    running = command.start("run", file, output=tmp_path / "out")
    running.wait_for("update=3/")
    running.processes("ray::RolloutWorker")[0].kill()
    _trained_once_each(running.end())


def test_one_of_two_replicas_that_is_lost_is_replaced_and_every_prompt_trains_once(local, write, tmp_path):
    file = write(tmp_path, {"rollout.nodes": 2, "train.updates": UPDATES}, reward=SLOW)
    running = local.start("run", file, output=tmp_path / "out")
    running.wait_for("update=3/")
    running.lose("rollout-0")
    _trained_once_each(running.end())


def test_what_takes_the_place_of_the_only_replica_may_join_while_a_version_is_published(local, write, tmp_path):
    """Nobody is there to load version 1, whose weights take long to copy. The new replica has joined with version 0 by then."""
    lost = Fault.lose("RolloutWorker", "exchange", after=("TrainWorker", "train", 1))
    copies, loaded, joined = itertools.count(), threading.Event(), threading.Event()

    def look(kind: str, method: str, value: Any) -> None:
        if (kind, method) == ("RolloutWorker", "exchange") and lost.fired.is_set():  # of the new one
            if loaded.is_set():
                joined.set()
            if any(report.loaded == 0 for report in unpack(value)):
                loaded.set()
        if (kind, method) == ("TrainWorker", "publication") and next(copies) == 1:
            assert joined.wait(PATIENCE)

    file = write(tmp_path, {"train.updates": UPDATES})
    ended = local.start("run", file, output=tmp_path / "out", faults=(lost,), look=look).end()
    assert joined.is_set()
    _trained_once_each(ended)


CAUSES = {
    "nan": "NotFiniteLogProbs: token",
    "memory": "OutOfMemoryError: no memory on the device",
    "killed": "its process ended",
    "hangs": r"its engine has sequences and made no step|rollout-0 did not load version \d+ within",
}
"""What an engine does → the cause in the driver's warning, a regular expression."""
FAILURES = [("step", "nan"), *itertools.product(("step", "receive", "commit"), ("memory", "killed", "hangs"))]
"""A method of the engine, and how it fails."""
LOST = "other replicas take over its sequences"


@dataclass
class Failing:
    """Lets engines of a run fail, one call at a time. Only an armed failure happens."""

    method: str = ""
    act: str = ""
    calls: int = 0
    """Calls of the method until it fails."""
    running: LocalRunning | None = None
    failed: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)
    """Lets a thread that hangs continue, in a process that was killed meanwhile."""
    _losses_before: int = 0
    _damaged: set[TorchEngine] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def arm(self, method: str, act: str, calls: int) -> None:
        """Let an engine fail at the `calls`-th call of the method from now on."""
        self.failed, self.released = threading.Event(), threading.Event()
        self._losses_before = self.losses
        with self._lock:
            self.method, self.act, self.calls = method, act, calls

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        for method in ("step", "receive", "commit"):
            patch.setattr(TorchEngine, method, self._failing(method, getattr(TorchEngine, method)))

    def _failing(self, method: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(engine: TorchEngine, *arguments: Any) -> Any:
            act = self._due(method)
            if act == "memory":
                self.failed.set()
                raise type("OutOfMemoryError", (RuntimeError,), {})("no memory on the device")
            if act == "killed":
                assert self.running is not None
                self.running.lose("rollout-0")
                self.failed.set()
            if act == "hangs":
                released = self.released
                self.failed.set()
                assert released.wait(PATIENCE)
            if act == "nan":
                self._damaged.add(engine)
                self.failed.set()
            result = real(engine, *arguments)
            if engine in self._damaged:
                engine._logits.fill_(math.nan)
            return result

        return call

    def _due(self, method: str) -> str:
        with self._lock:
            self.calls -= method == self.method
            if method != self.method or self.calls != 0:
                return ""
            self.method = ""
            return self.act

    def let_it_be_noticed(self) -> None:
        """Wait until the engine has failed, and until the replica is lost, after the deadline of an engine that hangs."""
        assert self.running is not None
        self.running.wait_until(self.failed.is_set, "failure of the engine")
        deadline = time.monotonic() + PATIENCE
        while (
            self.act == "hangs" and self.losses == self._losses_before
        ):  # the deadline grows with the usual duration of a step
            assert time.monotonic() < deadline, "the engine hangs, and nobody notices"
            self.running.let_pass(STEP_SECONDS)
        self.released.set()
        self.running.wait_until(lambda: self.losses > self._losses_before, "loss of the replica")

    @property
    def losses(self) -> int:
        """Number of replicas that the driver has lost."""
        if self.running is None:
            return 0
        log = self.running.folder / "logs" / "driver.log"
        return log.read_text().count(LOST) if log.exists() else 0


@pytest.mark.parametrize(("method", "act"), FAILURES)
def test_an_engine_that_fails_in_any_act_is_replaced_and_every_prompt_trains_once(
    local, write, tmp_path, monkeypatch, method, act
):
    """Its replacement rejoins with the newest version: all updates train, and no token is too old."""
    failing = Failing()
    failing.patch(monkeypatch)
    failing.arm(method, act, 16 if method == "step" else 3)
    file = write(tmp_path, {"train.updates": UPDATES, "publication.timeoutSeconds": MAX_STEP_SECONDS}, reward=SLOW)
    failing.running = local.start("run", file, output=tmp_path / "out")
    failing.let_it_be_noticed()
    ended = failing.running.end()
    _trained_once_each(ended)
    [loss] = [line for line in (ended.folder / "logs" / "driver.log").read_text().splitlines() if LOST in line]
    assert re.search(CAUSES[act], loss)


@pytest.mark.soak
@pytest.mark.timeout(5 * PATIENCE)
def test_twenty_engines_that_fail_one_after_the_other_lose_no_prompt(local, write, tmp_path, monkeypatch):
    """In each act and in each way, twice."""
    monkeypatch.setattr(rollout_pool, "MAX_REPLACEMENT_DELAY_SECONDS", 0.1)
    failing = Failing()
    failing.patch(monkeypatch)
    changes = {"train.updates": 1_000_000, "publication.timeoutSeconds": MAX_STEP_SECONDS}
    running = failing.running = local.start("run", write(tmp_path, changes, prompts=900), output=tmp_path / "out")
    log, metrics = running.folder / "logs" / "driver.log", running.folder / "metrics.jsonl"

    def updates() -> int:
        return metrics.read_text().count('"update":') if metrics.exists() else 0

    for number, (method, act) in enumerate([*FAILURES, *FAILURES], 1):
        before = updates()
        running.wait_until(lambda before=before: updates() > before + 1, "updates")
        failing.arm(method, act, 2)
        failing.let_it_be_noticed()
        assert failing.losses == number
    before = updates()
    running.wait_until(lambda: updates() > before + 3, "updates with the last replacement")
    running.signal(signal.SIGTERM)
    ended = running.end()
    trained = surviving_updates(ended.records)
    assert [record.update for record in trained] == list(range(1, len(trained) + 1))
    assert max(record.lag_max for record in trained) <= 2
    progress = ended.progress(len(trained))
    assert progress["position"] - len(progress["pending"]) == sum(record.prompts for record in trained)
    causes = [line for line in log.read_text().splitlines() if LOST in line]
    for line, (_, act) in zip(causes, [*FAILURES, *FAILURES], strict=True):
        assert re.search(CAUSES[act], line)


def _trained_once_each(ended: Ended) -> None:
    assert ended.code == 0, ended.err
    assert LOST in (ended.folder / "logs" / "driver.log").read_text()
    updates = ended.of(UpdateRecord)
    assert [record.update for record in updates] == list(range(1, UPDATES + 1))
    assert max(record.lag_max for record in updates) <= 2
    progress = ended.progress(UPDATES)
    assert (sum(record.prompts for record in updates), progress["position"], progress["pending"]) == (
        PROMPTS,
        PROMPTS,
        [],
    )


def test_tokens_outlive_the_replica_that_generated_them(local, write, tmp_path, monkeypatch):
    """Two groups, one after the other on one replica, which is lost within the second, after version 1 has come.

    What takes its place knows version 1 only: tokens of version 0 in the second update are those of the dead.
    """
    changes = {
        "data.maxResponseTokens": TOKENS,
        "algorithm.groupSize": 2,
        "train": {"updates": 2, "batch": {"promptsPerUpdate": 1, "microBatchSequences": 2}},
        "async": {"stalenessThreshold": 1.0, "maxVersionLag": 1},
        "rollout.maxSequencesPerReplica": 1,  # one after the other: the second group is under way for long
    }
    monkeypatch.setattr(rollout_worker, "PROGRESS_SECONDS", 0.1)
    metrics, published, reported = tmp_path / "out" / "metrics.jsonl", threading.Event(), threading.Event()

    def look(kind: str, method: str, value: Any) -> None:
        is_report = (kind, method) == ("RolloutWorker", "exchange") and published.is_set()
        if is_report and any(report.progress for report in unpack(value)):
            reported.set()

    file = write(tmp_path, ENDLESS | changes, reward=NOTED)
    running = local.start("run", file, output=tmp_path / "out", look=look)
    running.wait_until(lambda: metrics.exists() and '"version 1"' in metrics.read_text(), "publication")
    published.set()
    running.wait_until(reported.is_set, "report of tokens")
    running.lose("rollout-0")
    scored = (tmp_path / "scored").read_text().split()
    ended = running.end()
    assert len(scored) == 2, "the second group was not under way any more"
    assert ended.code == 0, ended.err
    first, second = ended.of(UpdateRecord)
    assert (first.lag_histogram, second.response_tokens_mean) == ({0: 2 * TOKENS}, TOKENS)
    assert second.lag_histogram.keys() == {0, 1}
    assert sum(second.lag_histogram.values()) == 2 * TOKENS


@pytest.mark.parametrize("taken", ["", "checkpoints"], ids=["the output folder", "the checkpoints"])
def test_a_run_whose_folder_another_attempt_takes_ends_with_a_code_of_its_own_and_leaves_the_folder(
    local, write, tmp_path, taken
):
    file = write(tmp_path, {"train.updates": 5000, "checkpoint": {"everyUpdates": 1}})
    running = local.start("run", file, output=tmp_path / "out")
    running.wait_until(lambda: any((running.folder / "checkpoints").glob("update-*")), "checkpoint")
    folder = running.folder / taken
    other = take(folder, Owner("another", "other", "node-2", "elsewhere"), read_owner(folder))
    # As an attempt does it: an earlier one that is between its check and its write then writes into a file without a name.
    new = tmp_path / "journal"
    new.write_text("of the other attempt")
    new.replace(folder / "journal")
    before = sorted(path.name for path in folder.iterdir())
    ended = running.end()
    assert ended.code == 4, ended.err
    assert "taken over by another" in ended.err
    # The records are in the output folder. It still belongs to the run if only the checkpoints were taken.
    assert [record.reason for record in ended.of(FinishRecord)] == (["Superseded"] if taken else [])
    assert sorted(path.name for path in folder.iterdir()) == before
    assert (folder / "journal").read_text() == "of the other attempt"
    assert not (ended.folder / "summary.json").exists()
    other.check()


@pytest.fixture(scope="module")
def finished(local, write, tmp_path_factory):
    """A run of two updates. It was started with --resume, and there was nothing: it started from scratch."""
    file = write(tmp_path_factory.mktemp("finished"), {"train.updates": 2})
    return local.run(file, "--resume", "auto")


def test_resuming_a_finished_run_has_nothing_left_to_do(local, finished):
    again = local.run(finished.folder.parent / "tiny.yaml", "--resume", "auto")
    assert (finished.code, again.code) == (0, 0)
    assert finished.summary["updates"] == 2
    assert len(again.of(UpdateRecord)) == 2
    assert again.summary["outcome"] == "Succeeded"


def test_a_checkpoint_of_another_model_is_refused_with_the_tensor_that_differs(local, write, tmp_path, finished):
    """It has no manifest, as those of earlier releases; with one it is refused before Ray starts (test_resuming.py)."""
    ours = Path(finished.of(CheckpointRecord)[-1].path)
    old = shutil.copytree(ours, tmp_path / "old" / ours.name, ignore=shutil.ignore_patterns("manifest.yaml"))
    contents = json.loads((old / "contents.json").read_text())
    del contents["manifest.yaml"]
    (old / "contents.json").write_text(json.dumps(contents))
    file = write(tmp_path, {"train.updates": 4, "model.source.random.hiddenSize": 48})
    ended = local.run(file, "--resume", old)
    assert ended.code == 1
    assert f"checkpoint {old} does not fit this model" in ended.err
    assert "torch.Size([15, 32])" in ended.err
    assert len(ended.err.splitlines()) < 8

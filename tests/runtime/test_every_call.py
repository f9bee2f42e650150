"""Each call that the driver, and the command, make to another process: what happens when that process dies of it, or hangs.

A rollout replica that is lost or hangs is replaced, and the run continues. A train worker or driver that is lost, or hangs, ends the
run by name, and the run can continue: every prompt is still trained exactly once. All calls of replicas, on a virtual clock and
with more numbers: test_loop.py.
"""

import itertools
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from qwen35_trainer.exits import INTERRUPTED
from qwen35_trainer.progress.records import CheckpointRecord, FinishRecord, surviving_updates
from qwen35_trainer.runtime import run_command
from qwen35_trainer.runtime.checkpoint_store import CheckpointStore
from qwen35_trainer.runtime.driver import START_SECONDS
from qwen35_trainer.runtime.replica_channel import ANSWER_SECONDS, MAX_REPORT_SECONDS
from qwen35_trainer.runtime.signals import SECOND_SIGNAL
from tests.patience import PATIENCE

from .conftest import Ended
from .threads import Fault

UPDATES, PER_UPDATE = 2, 4
CHANGES = {
    "train.updates": UPDATES,
    "checkpoint": {"everyUpdates": 1},
    "data.shuffle": False,
    "async.stalenessThreshold": 0.5,  # the second batch is dispatched in two parts
}
TRAIN = {"location": 1, "listen": 1, "join": 1, "publication": 3, "train": 2, "save": 2, "saved": 2}
"""How often a run calls each method of the train worker."""
ROLLOUT = {"address": 1, "open": 1}
"""How often it calls those of a replica."""
REPEATED: dict[tuple[str, str], tuple[str, str, int] | None] = {
    ("RolloutWorker", "exchange"): ("TrainWorker", "train", 1),
    ("RolloutWorker", "obey"): None,  # later commands may travel with `exchange`
    ("Driver", "follow"): ("TrainWorker", "train", 1),
    ("TrainWorker", "log_probs"): None,  # the first version has a probe, and a later one if there is time for it
}
"""Methods whose number of calls depends on time. Tests use the first call, and the first after the call given here."""
LIMITS = dict.fromkeys(("location", "listen", "join"), START_SECONDS)
"""Deadlines in seconds; of all others it is `stallSeconds`."""


type Call = tuple[str, int, tuple[str, str, int] | None]
"""A method, the number of the call (from 1), and the call after which counting starts; None: the start of the run."""


def _each(kind: str, once: dict[str, int]) -> list[Call]:
    calls: list[Call] = [(method, at, None) for method, count in once.items() for at in range(1, count + 1)]
    return calls + [
        (method, 1, after)
        for (of, method), later in REPEATED.items()
        if of == kind
        for after in dict.fromkeys((None, later))
    ]


@pytest.fixture(scope="module")
def calm(local, write, tmp_path_factory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("calm")
    running = local.start("run", write(folder, CHANGES), output=folder / "out")
    return SimpleNamespace(ended=running.end(), counts=running.threads.counts)


def test_the_calls_below_are_all_that_a_run_makes(calm):
    assert calm.ended.code == 0, calm.ended.err
    once = {("Driver", "run"): 1}
    once |= {("TrainWorker", method): count for method, count in TRAIN.items()}
    once |= {("RolloutWorker", method): count for method, count in ROLLOUT.items()}
    assert {call: count for call, count in calm.counts.items() if call not in REPEATED} == once
    assert all(calm.counts[call] > 0 for call in REPEATED)


def _complete(ended: Ended) -> None:
    assert ended.code == 0, ended.err
    updates = surviving_updates(ended.records)
    assert [record.update for record in updates] == list(range(1, UPDATES + 1))
    assert max(record.lag_max for record in updates) <= 2
    progress = ended.progress(UPDATES)
    assert (progress["position"], progress["pending"]) == (UPDATES * PER_UPDATE, [])


def _failed(ended: Ended, reason: str) -> None:
    """It says so, and what it has saved is whole."""
    assert ended.code == 1
    assert "Traceback" not in ended.err
    finish = ended.of(FinishRecord)[-1]
    assert (finish.outcome, finish.reason) == ("Failed", reason)
    saved = CheckpointStore(ended.folder / "checkpoints", 3).latest()
    assert (saved.progress.update if saved else 0) >= max((r.update for r in ended.of(CheckpointRecord)), default=0)


def _goes_on(local, file: Path) -> None:
    _complete(local.run(file, "--resume", "auto"))


def _losing(local, file: Path, fault: Fault) -> Ended:
    """A run in which an actor is lost, to its end."""
    updates = itertools.count(1)

    def hold(kind: str, method: str, _: object) -> None:
        """The last update waits for a fault of `follow`: all events of a run may fit into one answer."""
        if (kind, method) == ("TrainWorker", "train") and next(updates) == UPDATES and fault.method == "follow":
            assert fault.fired.wait(PATIENCE)

    ended = local.start("run", file, output=file.parent / "out", faults=(fault,), look=hold).end()
    assert fault.fired.is_set()
    return ended


def _hanging(local, file: Path, fault: Fault, seconds: float) -> Ended:
    """A run in which a call hangs until `seconds` have passed, to its end."""
    running = local.start("run", file, output=file.parent / "out", faults=(fault,))
    running.wait_until(fault.fired.is_set, "call that hangs")
    running.let_pass(seconds + 1)
    return running.end()


@pytest.mark.parametrize(("method", "at", "after"), _each("TrainWorker", TRAIN))
def test_a_train_worker_that_is_lost_ends_the_run_by_name_and_it_can_continue(
    local, write, tmp_path, method, at, after
):
    file = write(tmp_path, CHANGES)
    ended = _losing(local, file, Fault.lose("TrainWorker", method, at, after))
    who = "train-0" if method == "listen" else "the train pool"
    assert ended.err.startswith(f"{who} was lost during ")
    _failed(ended, "WorkerLost")
    _goes_on(local, file)


@pytest.mark.parametrize(("method", "at", "after"), _each("TrainWorker", TRAIN))
def test_a_train_worker_that_hangs_ends_the_run_with_its_name(local, write, tmp_path, method, at, after):
    seconds = LIMITS.get(method, PATIENCE)
    ended = _hanging(local, write(tmp_path, CHANGES), Fault.hang("TrainWorker", method, at, after), seconds)
    who = {"listen": "train-0", "location": "the train pool (train-worker-0)"}.get(method, "the train pool (train-0)")
    assert ended.err.startswith(f"{who} did not finish ")
    assert f"within {seconds:g} s" in ended.err
    _failed(ended, "Stalled")


@pytest.mark.parametrize(("method", "at", "after"), _each("Driver", {"run": 1}))
def test_a_driver_that_is_lost_ends_the_run_by_name_and_it_can_continue(local, write, tmp_path, method, at, after):
    file = write(tmp_path, CHANGES)
    ended = _losing(local, file, Fault.lose("Driver", method, at, after))
    assert ended.err.startswith("the driver was lost: ")
    _failed(ended, "DriverLost")
    _goes_on(local, file)


@pytest.mark.parametrize("after", [None, REPEATED["Driver", "follow"]])
def test_a_driver_that_hangs_ends_the_run_by_name_and_it_can_continue(local, write, tmp_path, monkeypatch, after):
    file = write(tmp_path, CHANGES)
    with monkeypatch.context() as patch:
        patch.setattr(run_command, "DRIVER_ANSWER_SECONDS", 5.0)
        ended = _losing(local, file, Fault.hang("Driver", "follow", after=after))
    assert ended.err.startswith("the driver did not answer within 5 s; ")
    _failed(ended, "Stalled")
    _goes_on(local, file)


def test_a_second_signal_ends_a_run_whose_driver_hangs_and_it_can_continue(local, write, tmp_path):
    file = write(tmp_path, CHANGES)
    fault = Fault.hang("Driver", "follow", after=REPEATED["Driver", "follow"])
    updates = itertools.count(1)

    def hold(kind: str, method: str, _: object) -> None:
        """The last update waits for the end of the driver, which would finish the run otherwise."""
        if (kind, method) == ("TrainWorker", "train") and next(updates) == UPDATES:
            (driver,) = [actor for actor in running.threads.actors if actor.kind == "Driver"]
            assert driver.gone.wait(PATIENCE)

    running = local.start("run", file, output=file.parent / "out", faults=(fault,), look=hold)
    running.wait_until(fault.fired.is_set, "call that hangs")
    for _ in range(2):
        running.signal(signal.SIGINT)
    ended = running.end()
    assert (ended.code, ended.err) == (INTERRUPTED, f"{SECOND_SIGNAL}\n")
    assert not ended.of(FinishRecord), "nobody writes after the end"
    saved = CheckpointStore(ended.folder / "checkpoints", 3).latest()
    assert (saved.progress.update if saved else 0) >= max((r.update for r in ended.of(CheckpointRecord)), default=0)
    _goes_on(local, file)


@pytest.mark.parametrize(("method", "at", "after"), _each("RolloutWorker", ROLLOUT))
def test_a_replica_that_is_lost_is_replaced(local, write, tmp_path, method, at, after):
    ended = _losing(local, write(tmp_path, CHANGES), Fault.lose("RolloutWorker", method, at, after))
    assert "other replicas take over its sequences" in (ended.folder / "logs" / "driver.log").read_text()
    _complete(ended)


@pytest.mark.parametrize(
    ("method", "seconds"),
    [("open", START_SECONDS), ("exchange", MAX_REPORT_SECONDS + ANSWER_SECONDS), ("obey", ANSWER_SECONDS)],
)
def test_a_replica_that_hangs_is_replaced(local, write, tmp_path, method, seconds):
    ended = _hanging(local, write(tmp_path, CHANGES), Fault.hang("RolloutWorker", method), seconds)
    log = (ended.folder / "logs" / "driver.log").read_text()
    assert re.search(
        rf"rollout-0 did not finish .* within {seconds:g} s.*; other replicas take over its sequences", log
    )
    _complete(ended)


def test_a_replica_that_never_starts_ends_the_run_if_no_other_works(local, write, tmp_path):
    seconds = START_SECONDS + PATIENCE
    ended = _hanging(local, write(tmp_path, CHANGES), Fault.hang("RolloutWorker", "address"), seconds)
    assert ended.err.startswith(
        f"0 of 1 replicas worked for {seconds:g} s, and the run needs 1 (spec.rollout.minNodes). rollout-0 is pending"
    )
    _failed(ended, "WorkerLost")

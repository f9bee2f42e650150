"""Whole runs with a folder in place of the operator: what they report to it, and which orders they follow."""

import json
import os
import shutil
import signal
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from qwen35_trainer.atomic_files import write_atomically
from qwen35_trainer.commands import app
from qwen35_trainer.contract import Control, LiveSettings, StopOrder, parse_progress
from qwen35_trainer.progress.metrics_file import read_records
from qwen35_trainer.progress.packed_history import unpack
from qwen35_trainer.progress.records import (
    CheckpointRecord,
    FinishRecord,
    UpdateRecord,
    surviving_updates,
)
from qwen35_trainer.progress.sample_file import read_samples
from qwen35_trainer.runtime import run_command
from qwen35_trainer.runtime.rollout_worker import RolloutWorker, WorkerAddress
from tests.patience import PATIENCE
from tests.runtime.threads import Fault

PROMPTS, PER_UPDATE, GROUP = 400, 4, 4
UPDATES = PROMPTS // PER_UPDATE
SLOW = """
import time

def score(prompt, response, answer, metadata):
    time.sleep(0.05)  # long enough to be interrupted, and for a save during three updates
    return float(response[:1] == answer)
"""
LIVE = LiveSettings(checkpointEveryUpdates=3, checkpointKeep=2, evaluationEveryUpdates=0)
STOP = StopOrder(id="1-Suspend", reason="Suspend", time=1.0)


def _reported(folder):
    return parse_progress((folder / "progress.json").read_text())


def _ask(folder, **fields) -> None:
    folder.mkdir(exist_ok=True)
    write_atomically(folder / "control.json", Control(**({"attempt": 1} | fields)).text())


@pytest.fixture(scope="module")
def suspended(local, write, tmp_path_factory) -> SimpleNamespace:
    """A run whose checkpoints are made more frequent and which is then stopped, and the attempt after it."""
    folder = tmp_path_factory.mktemp("suspended")
    link = folder / "link"
    file = write(folder, {"train.updates": UPDATES, "checkpoint.everyUpdates": 1000}, prompts=PROMPTS, reward=SLOW)
    running = local.start("run", file, "--link", link, output=folder / "out")
    running.wait_for("update=2/")
    running.wait_until(lambda: _reported(link).updates is not None, "report of an update")
    during = _reported(link)
    _ask(link, live=LIVE)
    reports = []

    def reports_a_checkpoint() -> bool:
        reports.append(_reported(link))
        return reports[-1].checkpoint is not None

    running.wait_until(reports_a_checkpoint, "checkpoint in the report")
    saved = reports[-1]
    _ask(link, live=LIVE, stop=STOP)
    running.wait_until(lambda: _reported(link).stopAcknowledged is not None, "acknowledgement")
    acknowledged = _reported(link)
    stopped = running.end()
    after = _reported(link)
    shutil.copytree(stopped.folder / "checkpoints", folder / "kept")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QWEN35_ATTEMPT", "2")
        again = local.start("run", file, "--link", link, "--resume", "auto", output=folder / "out")
        again.wait_for(f"update={after.update + 1}/")
        again.wait_until(
            lambda: _reported(link).attempt == 2 and _reported(link).update > after.update, "a report of attempt 2"
        )
        _ask(link, attempt=2, stop=StopOrder(id="2-Suspend", reason="Suspend", time=2.0))
        again.end()
    return SimpleNamespace(
        folder=folder, during=during, saved=saved, acknowledged=acknowledged, stopped=stopped, after=after,
        second=_reported(link),
    )  # fmt: skip


def test_progress_appears_while_the_run_continues(suspended):
    during = suspended.during
    assert (during.state, during.attempt, during.updates) == ("Running", 1, UPDATES)


def test_a_live_change_of_the_checkpoint_interval_takes_effect(suspended):
    saves = [record.update for record in suspended.stopped.of(CheckpointRecord)]
    assert suspended.saved.checkpoint.update == saves[0]
    assert all(later - earlier <= 3 for earlier, later in pairwise(saves[1:]))
    assert len(list((suspended.folder / "kept").glob("update-*"))) <= LIVE.checkpointKeep


def test_an_order_to_stop_is_acknowledged_and_then_carried_out(suspended):
    assert suspended.acknowledged.stopAcknowledged == STOP.id
    assert suspended.stopped.code == 0, suspended.stopped.err
    assert suspended.stopped.of(FinishRecord)[-1].outcome == "Stopped"
    after = suspended.after
    assert (after.state, after.stopAcknowledged, after.reason) == ("Stopped", STOP.id, None)


def test_the_last_report_names_the_checkpoint_of_the_last_update(suspended):
    last = suspended.stopped.of(UpdateRecord)[-1].update
    assert (suspended.after.update, suspended.after.checkpoint.update) == (last, last)
    newest = sorted(path.name for path in (suspended.folder / "kept").iterdir())[-1]
    assert suspended.after.checkpoint.uri == (suspended.folder / "out" / "checkpoints" / newest).as_uri()


def test_totals_are_those_of_the_records(suspended):
    updates = suspended.stopped.of(UpdateRecord)
    after = suspended.after
    assert after.prompts == sum(record.prompts for record in updates) == after.update * PER_UPDATE
    assert after.samples == after.prompts * GROUP
    assert after.tokens == sum(record.tokens for record in updates)
    assert 0 < after.version <= after.update
    assert after.versionSeconds > 0
    assert [len(replica.pods) for replica in after.replicas] == [1]


def test_the_history_is_of_all_attempts_and_makes_the_report_of_the_run(suspended):
    folder = suspended.folder
    history = unpack((folder / "link" / "history.json.gz").read_bytes())
    records = read_records(folder / "out" / "metrics.jsonl")
    kept = [record.update for record in history.records if isinstance(record, UpdateRecord)]
    assert (
        kept == [record.update for record in surviving_updates(records)] == list(range(1, suspended.second.update + 1))
    )
    assert history.manifest == (folder / "out" / "run.yaml").read_text()
    whole = json.loads((folder / "out" / "summary.json").read_text())
    assert history.summary == whole | {"peakRssMiB": None}, "memory is measured by who runs the run"
    assert list(history.samples) == [read_samples(folder / "out" / "samples.jsonl")[-1]]
    assert history.samples[0].update == suspended.second.update


def test_the_next_attempt_ignores_the_old_order_and_counts_on(suspended):
    second = suspended.second
    assert (second.attempt, second.state, second.stopAcknowledged) == (2, "Stopped", "2-Suspend")
    assert second.update > suspended.after.update
    assert second.prompts == second.update * PER_UPDATE


def test_a_run_that_reaches_its_end_says_so(local, write, tmp_path):
    ended = local.run(write(tmp_path), "--link", tmp_path / "link")
    last = _reported(tmp_path / "link")
    assert ended.code == 0, ended.err
    assert (last.state, last.update, last.updates, last.checkpoint.update) == ("Succeeded", 3, 3, 3)


def test_a_failure_is_reported_with_its_errors_class(local, write, tmp_path):
    file = write(tmp_path, reward="def score(prompt, response, answer, metadata):\n    raise ValueError('ill')\n")
    ended = local.run(file, "--set", "rewards[0].onError=Fail", "--link", tmp_path / "link")
    last = _reported(tmp_path / "link")
    assert ended.code == 1
    assert (last.state, last.reason) == ("Failed", "RewardFailed")
    assert "ill" in last.message


def test_an_order_before_the_driver_is_there_stops_the_run_and_writes_nothing(local, write, tmp_path, monkeypatch):
    train = run_command._train

    def train_when_ordered(prepared, claimed, follower, *others):
        end = time.monotonic() + PATIENCE
        while not follower.reporter.stop_ordered and time.monotonic() < end:
            time.sleep(0.01)
        return train(prepared, claimed, follower, *others)

    monkeypatch.setattr(run_command, "_train", train_when_ordered)  # on a busy machine the order is read late
    _ask(tmp_path / "link", stop=STOP)
    ended = local.run(write(tmp_path), "--link", tmp_path / "link")
    last = _reported(tmp_path / "link")
    assert ended.code == 130
    assert ended.err == "stopped by the operator before the training began; nothing was written\n"
    assert not ended.folder.exists()
    assert (last.state, last.stopAcknowledged, last.checkpoint) == ("Stopped", STOP.id, None)


def test_an_order_while_the_model_loads_stops_without_a_checkpoint_and_the_run_can_continue(local, write, tmp_path):
    """The stop order arrives while the driver is waiting for a worker."""
    link, file = tmp_path / "link", write(tmp_path)
    running = local.start(
        "run", file, "--link", link, output=tmp_path / "out", faults=(Fault.hang("TrainWorker", "join"),)
    )
    running.wait_for("phase=loading the model")
    _ask(link, stop=STOP)
    ended = running.end()
    last = _reported(link)
    assert ended.code == 0, ended.err
    assert (last.state, last.stopAcknowledged) == ("Stopped", STOP.id)
    assert ended.of(UpdateRecord) == []
    (link / "control.json").unlink()
    again = local.run(file, "--link", link, "--resume", "auto", output=tmp_path / "out")
    assert again.code == 0, again.err
    assert _reported(link).state == "Succeeded"


def test_a_signal_without_an_order_is_a_stop_that_nobody_ordered(command, write, tmp_path):
    link, file = tmp_path / "link", write(tmp_path, {"train.updates": UPDATES}, prompts=PROMPTS, reward=SLOW)
    running = command.start("run", file, "--link", link, output=tmp_path / "out")
    running.wait_for("update=1/")
    os.kill(running.process.pid, signal.SIGTERM)
    assert running.end().code == 0
    last = _reported(link)
    assert (last.state, last.stopAcknowledged) == ("Stopped", None)
    assert last.checkpoint.update == last.update


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [(["--set", "train.nodes=3"], "ManifestError"), (["--resume", "nowhere"], "CheckpointUnusable")],
)
def test_a_refusal_is_reported_with_all_problems(write, tmp_path, arguments, reason):
    file = write(tmp_path)
    command = ["run", str(file), "--output", str(tmp_path / "out"), "--link", str(tmp_path / "link"), *arguments]
    result = CliRunner().invoke(app, command)
    last = _reported(tmp_path / "link")
    assert result.exit_code == 2
    assert (last.state, last.reason) == ("Failed", reason)
    assert last.message == result.stderr.strip()


def test_a_link_that_cannot_be_opened_is_refused_before_anything_else(write, tmp_path, monkeypatch):
    monkeypatch.delenv("QWEN35_TRAINING", raising=False)
    command = ["run", str(write(tmp_path)), "--output", str(tmp_path / "out"), "--link", "cluster"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert result.stderr.startswith("--link cluster: QWEN35_TRAINING")
    assert not (tmp_path / "out").exists()


def test_a_replica_in_a_pod_that_leaves_drains_and_is_reported_as_drained(local, write, tmp_path, monkeypatch):
    async def address(worker: RolloutWorker) -> WorkerAddress:
        return WorkerAddress(f"pod-of-{worker.name}", os.getpid())

    monkeypatch.setattr(RolloutWorker, "address", address)
    link = tmp_path / "link"
    changes = {"train.updates": 1000, "rollout.nodes": 2}
    file = write(tmp_path, changes, prompts=PROMPTS, reward=SLOW)
    running = local.start("run", file, "--link", link, output=tmp_path / "out")
    running.wait_for("update=1/")

    def drained() -> dict[str, bool | None]:
        return {replica.pods[0]: replica.drained for replica in _reported(link).replicas}

    running.wait_until(lambda: drained() == {"pod-of-rollout-0": False, "pod-of-rollout-1": False}, "both replicas")
    _ask(link, rolloutNodes=1, leaving=("pod-of-rollout-0",), leavingSince=1.0)
    running.wait_until(lambda: drained() == {"pod-of-rollout-0": True, "pod-of-rollout-1": False}, "the drained one")
    _ask(link, rolloutNodes=2)
    running.wait_until(lambda: not any(drained().values()), "work for both")
    _ask(link, rolloutNodes=2, stop=STOP)
    assert running.end().code == 0

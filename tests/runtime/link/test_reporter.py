"""Reporting during a run: what is reported when, what an outage costs, and how the end is reported."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from qwen35_trainer.atomic_files import write_atomically
from qwen35_trainer.contract import Control, LiveSettings, StopOrder, parse_progress
from qwen35_trainer.data.data_errors import DataError
from qwen35_trainer.epoch import Superseded
from qwen35_trainer.exits import Interrupted
from qwen35_trainer.manifest import Manifest, load_manifest
from qwen35_trainer.progress.packed_history import PackedHistory, unpack
from qwen35_trainer.progress.records import (
    CheckpointRecord,
    EvaluationRecord,
    FinishRecord,
    SpanRecord,
    UpdateRecord,
    to_line,
)
from qwen35_trainer.progress.run_fold import MAX_POINTS, RunFold
from qwen35_trainer.runtime.checkpoint_store import CheckpointMeta, SavedCheckpoint
from qwen35_trainer.runtime.link.courier import REPORT_INTERVAL_SECONDS
from qwen35_trainer.runtime.link.operator_link import FolderLink
from qwen35_trainer.runtime.link.reporter import OutcomeUndelivered, Reporter, RunHistory, earlier_records, reporting
from tests.patience import PATIENCE

CHECKPOINT = CheckpointRecord(update=1, version=1, time=1.0, path="/run/update-000001", seconds=0.1)
STOP = StopOrder(id="1-Suspend", reason="Suspend", time=5.0)


def update(number: int) -> UpdateRecord:
    return UpdateRecord(
        update=number, updates_total=9, version=number, time=float(number), seconds=1.0, prompts=4, samples=16,
        tokens=100, loss=0.0, gradient_norm=1.0, learning_rate=1e-3,
    )  # fmt: skip


def finish(outcome, **fields) -> FinishRecord:
    return FinishRecord(outcome=outcome, message="so it ended", time=9.0, **fields)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    return load_manifest(Path(__file__).parents[3] / "examples" / "tiny-grpo.yaml")


class Watched(FolderLink):
    """A folder that plays the operator. `taken` holds the orders that the reporter has handled."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.taken: list[Control] = []

    async def orders(self) -> AsyncIterator[Control]:
        async for order in super().orders():
            yield order
            self.taken.append(order)


@pytest.fixture
def reporter_setup(tmp_path) -> SimpleNamespace:
    """A reporter with a folder as its operator."""
    link = Watched(tmp_path)
    reporter = Reporter(link, attempt=1)

    def last():
        return parse_progress((tmp_path / "progress.json").read_text())

    def ask(**fields) -> None:
        write_atomically(tmp_path / "control.json", Control(**({"attempt": 1} | fields)).text())

    def conclude(error: BaseException | None = None):
        reporter.conclude(error)
        return last()

    reporter.start()
    until((tmp_path / "progress.json").is_file)
    return SimpleNamespace(reporter=reporter, last=last, ask=ask, conclude=conclude, taken=link.taken)


def test_the_first_report_comes_before_anything_happened(reporter_setup):
    assert (reporter_setup.last().state, reporter_setup.last().phase) == ("Running", "starting")
    reporter_setup.conclude()


def test_updates_wait_for_their_turn_and_a_checkpoint_does_not(reporter_setup):
    started = time.monotonic()
    reporter_setup.reporter.write(update(1))
    reporter_setup.reporter.write(CHECKPOINT)
    until(lambda: reporter_setup.last().checkpoint)
    reporter_setup.reporter.write(update(2))
    until(lambda: reporter_setup.last().update == 2)
    assert time.monotonic() - started >= REPORT_INTERVAL_SECONDS * 0.9
    reporter_setup.conclude()


def test_an_order_to_stop_is_acknowledged_on_arrival(reporter_setup):
    reporter_setup.ask(stop=STOP)
    until(lambda: reporter_setup.last().stopAcknowledged == "1-Suspend")
    assert reporter_setup.reporter.stop_ordered
    reporter_setup.conclude()


@pytest.mark.parametrize("by_later_attempt", [False, True])
def test_an_attempt_that_a_later_one_has_replaced_does_not_report_over_it(reporter_setup, by_later_attempt):
    """If the operator may still count on the attempt, it gets the reason."""
    superseded = Superseded("the folder was taken over", by_later_attempt=by_later_attempt)
    last = reporter_setup.conclude(superseded)
    if by_later_attempt:
        assert (last.state, last.reason) == ("Running", None)
    else:
        assert (last.state, last.reason, last.message) == ("Failed", "Superseded", "the folder was taken over")


def test_an_order_for_another_attempt_is_not_ours(reporter_setup):
    reporter_setup.ask(attempt=2, stop=STOP)
    until(lambda: reporter_setup.taken)
    assert reporter_setup.reporter.control is None
    assert not reporter_setup.reporter.stop_ordered
    live = LiveSettings(checkpointEveryUpdates=5, checkpointKeep=2, evaluationEveryUpdates=0)
    reporter_setup.ask(live=live)
    until(lambda: reporter_setup.reporter.control is not None and reporter_setup.reporter.control.live == live)
    assert reporter_setup.conclude().stopAcknowledged is None


@pytest.mark.parametrize("outcome", ["Succeeded", "Stopped"])
def test_the_finish_record_is_the_final_state(reporter_setup, outcome):
    reporter_setup.reporter.write(CHECKPOINT)
    reporter_setup.reporter.write(finish(outcome))
    last = reporter_setup.conclude()
    assert (last.state, last.reason, last.message) == (outcome, None, "so it ended")
    assert last.checkpoint.update == 1


def test_nothing_is_final_before_the_run_is_over(reporter_setup):
    reporter_setup.reporter.write(finish("Succeeded"))
    reporter_setup.reporter.write(CHECKPOINT)
    until(lambda: reporter_setup.last().checkpoint)
    assert reporter_setup.last().state == "Running"
    reporter_setup.conclude()


def test_a_failure_carries_its_errors_class(reporter_setup):
    reporter_setup.reporter.write(finish("Failed", reason="RewardError"))
    last = reporter_setup.conclude()
    assert (last.state, last.reason, last.message) == ("Failed", "RewardError", "so it ended")


def test_a_refusal_before_the_driver_starts_is_a_failure(reporter_setup):
    last = reporter_setup.conclude(DataError(["source train: no rows"]))
    assert (last.state, last.reason) == ("Failed", "DataError")
    assert "source train: no rows" in last.message


def test_a_second_signal_that_leaves_no_checkpoint_is_a_failure(reporter_setup):
    reporter_setup.reporter.training(9)
    reporter_setup.reporter.write(CHECKPOINT)
    reporter_setup.reporter.stopping()
    last = reporter_setup.conclude(Interrupted("ended by a second signal"))
    assert (last.state, last.reason) == ("Failed", "Interrupted")


def test_a_second_signal_after_the_checkpoint_is_a_stop(reporter_setup):
    reporter_setup.reporter.training(9)
    reporter_setup.reporter.stopping()
    reporter_setup.reporter.write(CHECKPOINT)
    assert reporter_setup.conclude(Interrupted("ended by a second signal")).state == "Stopped"


def test_an_order_to_stop_before_the_driver_starts_is_a_stop_without_a_checkpoint(reporter_setup):
    reporter_setup.ask(stop=STOP)
    until(lambda: reporter_setup.reporter.stop_ordered)
    last = reporter_setup.conclude(Interrupted("stopped before the training began"))
    assert (last.state, last.stopAcknowledged, last.checkpoint) == ("Stopped", "1-Suspend", None)


def test_a_signal_before_the_driver_starts_is_a_failure(reporter_setup):
    assert reporter_setup.conclude(Interrupted("ended by a signal")).reason == "Interrupted"


def test_an_end_without_a_report_is_not_a_success(reporter_setup):
    last = reporter_setup.conclude()
    assert (last.state, last.reason) == ("Failed", "NoFinalState")


def test_a_report_that_was_not_written_does_not_undo_a_success(reporter_setup):
    reporter_setup.reporter.write(finish("Succeeded"))
    last = reporter_setup.conclude(RuntimeError("Succeeded\nThe report was not written: disk full"))
    assert last.state == "Succeeded"
    assert "disk full" in last.message


def test_an_operator_that_stays_away_until_the_deadline_is_named_with_how_the_run_ended(tmp_path):
    reporter = Reporter(FolderLink(tmp_path / "link"), attempt=1, final_seconds=1.0)
    reporter.start()
    until((tmp_path / "link" / "progress.json").is_file)
    (tmp_path / "link" / "progress.json").unlink()
    (tmp_path / "link").rmdir()
    reporter.write(finish("Succeeded"))
    with pytest.raises(OutcomeUndelivered) as caught:
        reporter.conclude()
    assert str(caught.value).startswith(
        "Succeeded: so it ended\nThis could not be reported to the operator within 1 s: "
    )
    assert "progress.json was not written" in str(caught.value)


async def test_a_server_that_is_away_slows_nothing_down_and_learns_the_newest_when_it_is_back(pod):
    pod.server.broken = 10**6
    reporter = Reporter(pod.link(), attempt=1)
    reporter.start()
    for number in range(1, 2001):
        reporter.write(update(number))
    await pod.server.until(lambda server: server.calls)
    assert pod.server.patches == []
    pod.server.broken = 0
    reporter.write(finish("Succeeded"))
    await asyncio.to_thread(reporter.conclude)
    final = pod.server.reports()[-1]
    assert (final["state"], final["update"], final["prompts"]) == ("Succeeded", 2000, 8000)


async def test_the_final_state_is_tried_until_it_is_delivered(pod):
    reporter = Reporter(pod.link(), attempt=1)
    reporter.start()
    await pod.server.until(lambda server: server.patches and server.watching)
    pod.server.broken = 4
    reporter.write(finish("Succeeded"))
    await asyncio.to_thread(reporter.conclude)
    assert [patch["state"] for patch in pod.server.reports()][-1] == "Succeeded"
    assert pod.server.broken == 0


def test_without_a_link_nothing_is_reported_and_nothing_read():
    with reporting(None) as reporter:
        reporter.write(update(1))
    assert reporter.control is None
    assert not reporter.stop_ordered


def test_an_attempt_that_resumes_counts_what_the_checkpoint_contains(reporter_setup, manifest, tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    span = SpanRecord(lane="train-0", kind="train", start=0.0, end=1.0)
    good = EvaluationRecord(update=2, version=2, time=2.5, samples=8, accuracy=0.75)
    bad = EvaluationRecord(update=4, version=4, time=4.5, samples=8, accuracy=0.25)
    # 3 again: resumed from update 2 once
    records = [update(1), span, update(2), good, update(3), update(4), bad, update(3)]
    metrics.write_text("\n".join(map(to_line, records)) + '\n{"record":"update","up')
    folder = tmp_path / "update-000002"
    folder.mkdir()
    checkpoint = SavedCheckpoint(folder, CheckpointMeta(update=2, batch=2, position=8, pending=(), elapsed=2.0))
    reporter_setup.reporter.begin(manifest=manifest, metrics=metrics, checkpoint=checkpoint, started=100.0)
    until(lambda: reporter_setup.last().checkpoint)
    last = reporter_setup.last()
    assert (last.update, last.prompts, last.version, last.accuracy) == (2, 8, 2, 0.75)
    assert last.checkpoint.uri == folder.as_uri()
    earlier = earlier_records(metrics, until=3)
    assert (earlier.updates.values, earlier.evaluations.values) == ([update(1), update(2), update(3)], [good])
    reporter_setup.conclude()


def test_a_run_without_earlier_records_has_none(tmp_path):
    assert earlier_records(Path(tmp_path / "nowhere.jsonl"), until=9).records == []


def left(folder: Path) -> PackedHistory:
    return unpack((folder / "history.json.gz").read_bytes())


def test_the_history_is_left_at_an_evaluation_and_before_the_last_word(reporter_setup, manifest, tmp_path):
    reporter_setup.reporter.begin(manifest=manifest, metrics=tmp_path / "none.jsonl", checkpoint=None, started=100.0)
    first = EvaluationRecord(update=0, version=0, time=0.5, samples=8, accuracy=0.25)
    reporter_setup.reporter.write(first)
    until((tmp_path / "history.json.gz").is_file)
    assert left(tmp_path).records == (first,)
    reporter_setup.reporter.write(update(1))
    reporter_setup.reporter.write(SpanRecord(lane="train-0", kind="train", start=0.0, end=1.0))
    reporter_setup.reporter.write(finish("Succeeded"))
    assert reporter_setup.conclude().state == "Succeeded"
    history = left(tmp_path)
    assert [type(record) for record in history.records] == [EvaluationRecord, UpdateRecord, SpanRecord, FinishRecord]
    assert (history.summary["outcome"], history.summary["updates"]) == ("Succeeded", 1)
    assert yaml.safe_load(history.manifest)["metadata"]["name"] == "tiny-grpo"


def test_a_history_continues_from_what_led_to_the_checkpoint(reporter_setup, manifest, tmp_path):
    metrics, folder = tmp_path / "metrics.jsonl", tmp_path / "update-000002"
    metrics.write_text("".join(f"{to_line(update(number))}\n" for number in (1, 2, 3)))
    folder.mkdir()
    checkpoint = SavedCheckpoint(folder, CheckpointMeta(update=2, batch=2, position=8, pending=(), elapsed=2.0))
    reporter_setup.reporter.begin(manifest=manifest, metrics=metrics, checkpoint=checkpoint, started=100.0)
    reporter_setup.reporter.write(finish("Failed", reason="WorkerLost"))
    reporter_setup.conclude()
    assert [record.update for record in left(tmp_path).records if isinstance(record, UpdateRecord)] == [1, 2]


def test_the_history_of_a_long_run_keeps_a_bounded_number_of_updates_and_counts_all(tmp_path):
    history = RunHistory("", None, tmp_path / "samples.jsonl", RunFold())
    for number in range(1, 5001):
        history.add(update(number))
    unpacked = unpack(history.packed())
    kept = [record.update for record in unpacked.records if isinstance(record, UpdateRecord)]
    assert kept == [*range(1, 5001, 4), 5000]
    assert (unpacked.summary["updates"], unpacked.left_out) == (5000, 5000 - len(kept))
    assert len(history._run.records) <= MAX_POINTS + 1


def test_a_history_that_cannot_be_left_is_a_warning_and_no_failure(reporter_setup, manifest, tmp_path, caplog):
    (tmp_path / "history.json.gz").mkdir()
    reporter_setup.reporter.begin(manifest=manifest, metrics=tmp_path / "none.jsonl", checkpoint=None, started=100.0)
    reporter_setup.reporter.write(finish("Succeeded"))
    assert reporter_setup.conclude().state == "Succeeded"
    assert "history.json.gz was not written" in caplog.text


def test_a_run_that_was_refused_leaves_no_history(reporter_setup, tmp_path):
    reporter_setup.conclude(DataError(["source train: no rows"]))
    assert not (tmp_path / "history.json.gz").exists()

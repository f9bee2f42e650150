"""What a status says in words, and when it says nothing."""

from dataclasses import replace
from datetime import timedelta

import pytest

from qwen35_operator.console.status_text import (
    FRESH_SECONDS,
    ago,
    brief,
    explanation,
    remaining_seconds,
    unmet_conditions,
)
from qwen35_operator.console.training_view import StatusUnreadable, TrainingView, latest_warnings
from tests.operator.console.example_trainings import EXAMPLES, example, queued, running, starting, training
from tests.operator.reconcile.world import START, UID


def with_progress(seen: TrainingView, **fields: object) -> TrainingView:
    assert seen.status.progress is not None
    progress = seen.status.progress.model_copy(update=fields)
    return replace(seen, status=seen.status.model_copy(update={"progress": progress}))


def test_the_rest_is_the_updates_that_are_missing_at_the_latest_pace():
    shown = example(training())
    assert remaining_seconds(shown.view, shown.now) == (1000 - 412) * 12.5
    assert remaining_seconds(shown.view, shown.now + timedelta(seconds=30)) == (1000 - 412) * 12.5 - 30


def test_the_rest_is_not_guessed():
    shown = example(training())
    seen, now = shown.view, shown.now
    assert remaining_seconds(seen, now + timedelta(seconds=FRESH_SECONDS + 1)) is None, "a report is overdue"
    assert remaining_seconds(with_progress(seen, secondsPerUpdate=100.0), now + timedelta(seconds=290)) is not None
    assert remaining_seconds(with_progress(seen, secondsPerUpdate=None), now) is None
    assert remaining_seconds(with_progress(seen, totalUpdates=None), now) is None
    for name in ("suspending", "restarting", "resumed", "failed", "succeeded", "unseen"):
        other = EXAMPLES[name]()
        assert remaining_seconds(other.view, other.now) is None, name


def test_the_rest_is_unknown_if_a_trainer_reports_numbers_whose_product_is_infinite():
    shown = example(training())
    endless = with_progress(shown.view, totalUpdates=2**63 - 1, secondsPerUpdate=1e308)
    assert remaining_seconds(endless, shown.now) is None


def test_what_waits_for_the_queue_does_not_wait_for_nodes():
    assert [kind for kind, _ in unmet_conditions(queued().view)] == ["QuotaReserved"]
    assert [kind for kind, _ in unmet_conditions(starting().view)] == ["ClusterReady", "RolloutReady", "TrainReady"]


@pytest.mark.parametrize("name", ["running", "suspended", "failed", "succeeded"])
def test_a_state_that_is_reached_waits_for_nothing(name):
    assert unmet_conditions(EXAMPLES[name]().view) == []


def test_a_training_that_no_operator_has_seen_says_so():
    assert "no operator has handled it" in explanation(EXAMPLES["unseen"]().view)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s ago"),
        (59.6, "1 min 00 s ago"),
        (-1.5, "0 s ago"),
        (-30, "30 s ahead of the API server's clock"),
        (7200, "2 h 00 min ago"),
    ],
)
def test_ages_are_by_the_api_servers_clock(seconds, text):
    assert ago(START, START + timedelta(seconds=seconds)) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(-5, "0 s"), (59, "59 s"), (3599, "59 min"), (7200, "2 h"), (2e5, "2 d")]
)
def test_a_list_has_room_for_one_unit(seconds, text):
    assert brief(seconds) == text


def test_a_status_of_another_version_is_named():
    raw = {**running().raw, "status": {"state": "Dreaming", "unheard": 1}}
    with pytest.raises(StatusUnreadable, match=r"this version cannot read the status of demo: .*state"):
        TrainingView.of(raw)


def test_warnings_are_the_newest_of_this_very_training():
    def event(second: int, uid: str = UID, **fields: object) -> dict:
        created = {"metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"}, "involvedObject": {"uid": uid}}
        return created | {"reason": f"R{second}", "lastTimestamp": f"2026-01-01T00:00:{second:02d}Z", **fields}

    events = [event(3), event(1), event(9, uid="an earlier one"), event(7, lastTimestamp=None), event(5)]
    assert [warning.reason for warning in latest_warnings(events, UID, count=3)] == ["R5", "R3", "R1"]
    assert [warning.reason for warning in latest_warnings(events, UID, count=9)][-1] == "R7", (
        "its creation is all there is"
    )

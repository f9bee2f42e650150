"""What a status says in words, and when it says nothing."""

from dataclasses import replace
from datetime import timedelta

import pytest

from qwen35_operator.console.seen import Seen, StatusUnreadable, warned
from qwen35_operator.console.words import ago, brief, left, waits, why
from tests.operator.console.scenes import SCENES, queued, running, scene, starting, training
from tests.operator.reconcile.world import START, UID


def with_progress(seen: Seen, **fields: object) -> Seen:
    assert seen.status.progress is not None
    progress = seen.status.progress.model_copy(update=fields)
    return replace(seen, status=seen.status.model_copy(update={"progress": progress}))


def test_the_rest_is_the_updates_that_are_missing_at_the_latest_pace():
    shown = scene(training())
    assert left(shown.seen, shown.now) == (1000 - 412) * 12.5
    assert left(shown.seen, shown.now + timedelta(seconds=30)) == (1000 - 412) * 12.5 - 30


def test_the_rest_is_not_guessed():
    shown = scene(training())
    seen, now = shown.seen, shown.now
    assert left(seen, now + timedelta(seconds=61)) is None, "a report is overdue"
    assert left(with_progress(seen, secondsPerUpdate=100.0), now + timedelta(seconds=290)) is not None
    assert left(with_progress(seen, secondsPerUpdate=None), now) is None
    assert left(with_progress(seen, updates=None), now) is None
    for name in ("suspending", "restarting", "resumed", "failed", "succeeded", "unseen"):
        other = SCENES[name]()
        assert left(other.seen, other.now) is None, name


def test_what_waits_for_the_queue_does_not_wait_for_nodes():
    assert [kind for kind, _ in waits(queued().seen)] == ["QuotaReserved"]
    assert [kind for kind, _ in waits(starting().seen)] == ["ClusterReady", "RolloutReady", "TrainReady"]


@pytest.mark.parametrize("name", ["running", "suspended", "failed", "succeeded"])
def test_what_is_as_it_should_be_waits_for_nothing(name):
    assert waits(SCENES[name]().seen) == []


def test_a_training_that_no_operator_has_seen_says_so():
    assert "no operator has looked at it" in why(SCENES["unseen"]().seen)


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
    with pytest.raises(StatusUnreadable, match=r"the status of demo is not one that this version knows: .*state"):
        Seen.of(raw)


def test_warnings_are_the_newest_of_this_very_training():
    def event(second: int, uid: str = UID, **fields: object) -> dict:
        created = {"metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"}, "involvedObject": {"uid": uid}}
        return created | {"reason": f"R{second}", "lastTimestamp": f"2026-01-01T00:00:{second:02d}Z", **fields}

    events = [event(3), event(1), event(9, uid="an earlier one"), event(7, lastTimestamp=None), event(5)]
    assert [one.reason for one in warned(events, UID, most=3)] == ["R5", "R3", "R1"]
    assert [one.reason for one in warned(events, UID, most=9)][-1] == "R7", "its creation is all there is"

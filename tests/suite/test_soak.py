"""What `make soak` runs."""

import itertools
import sys
from pathlib import Path

import pytest

from tests import soak

TESTS = Path(soak.__file__).parent


def test_every_folder_of_tests_is_in_some_kind() -> None:
    folders = {file.relative_to(TESTS).parts[0] for file in TESTS.rglob("test_*.py")}
    assert folders == {place.split("/")[0] for kind in soak.kinds() for place in kind.tests}


def test_what_is_deselected_exists_and_is_a_kind_of_its_own() -> None:
    left_out = [word for kind in soak.kinds() for word in kind.arguments if word.startswith("--deselect=")]
    assert len(left_out) == 2
    for word in left_out:
        file, name = word.removeprefix("--deselect=tests/").split("::")
        assert f"def {name}(" in (TESTS / file).read_text()
        assert (file,) in [kind.tests for kind in soak.kinds()]


def test_each_kind_gives_pytest_places_that_exist_and_its_seed() -> None:
    for kind in soak.kinds():
        assert all((TESTS / place).exists() for place in kind.tests), kind.name
        assert "--hypothesis-seed=7" in kind.command(7)


def test_only_the_kinds_that_run_alone_have_tests_with_limits_in_seconds() -> None:
    timed = set(soak.with_limits_in_seconds())
    alone = [kind for kind in soak.kinds() if kind.lane is soak.Lane.ALONE]
    assert timed <= {place for kind in alone for place in kind.tests}
    for kind in soak.kinds():
        if kind not in alone and any(file.startswith(place) for place in kind.tests for file in timed):
            assert kind.arguments[:2] in [("-m", "not quiet"), ("-m", "soak")], kind.name


def kind_of(lane: soak.Lane, name: str) -> soak.Kind:
    return soak.Kind(name, lane, ("suite",))


def test_each_kind_runs_once_and_a_lane_that_is_done_takes_what_the_other_has_left() -> None:
    waiting = [kind_of(soak.Lane.WAITING, name) for name in "ab"]
    computing = [kind_of(soak.Lane.COMPUTING, name) for name in "cdef"]
    turns = soak.Turns([waiting, computing], until=0.0)
    short, long = turns.of(0), turns.of(1)
    assert next(long).name == "c"  # which takes as long as all that follows
    assert [kind.name for kind in short] == ["a", "b", "f", "e", "d"]
    assert [kind.name for kind in long] == []


def test_until_the_minutes_are_over_a_lane_runs_its_own_kinds_again() -> None:
    waiting, computing = [kind_of(soak.Lane.WAITING, name) for name in "ab"], [kind_of(soak.Lane.COMPUTING, "c")]
    names = (kind.name for kind in soak.Turns([waiting, computing], until=float("inf")).of(0))
    assert list(itertools.islice(names, 6)) == ["a", "b", "c", "a", "b", "a"]


def test_a_lane_without_kinds_ends() -> None:
    assert list(soak.Turns([[], []], until=float("inf")).of(0)) == []


def test_a_failed_run_or_a_kind_without_a_run_makes_the_soak_fail(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = kind_of(soak.Lane.WAITING, "first"), kind_of(soak.Lane.ALONE, "second")
    both = [soak.Ended(first, 1, passed=True, minutes=1.0), soak.Ended(second, 2, passed=True, minutes=1.0)]
    assert soak.report((first, second), both) == 0
    assert soak.report((first, second), both[:1]) == 1
    assert soak.report((first, second), [*both, soak.Ended(first, 3, passed=False, minutes=1.0)]) == 1
    printed = capsys.readouterr().out
    assert "1 of 2 passed in 2 min: first" in printed
    assert "failed: first, seed 3" in printed


def test_a_run_that_fails_is_reported_as_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for code, passed in ((0, True), (3, False)):
        command = [sys.executable, "-c", f"print('its output'); raise SystemExit({code})"]
        monkeypatch.setattr(soak.Kind, "command", lambda *_, command=command: command)
        assert soak.run(kind_of(soak.Lane.ALONE, "one"), 1) is passed
        assert "alone │ its output" in capsys.readouterr().out

"""What `make soak` runs."""

import itertools
import os
import subprocess
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
        assert soak.run(kind_of(soak.Lane.ALONE, "one"), 1, 60) is passed
        assert "alone │ its output" in capsys.readouterr().out


TESTS_OF_A_FILE = """
import pytest
from hypothesis import given, strategies

@pytest.mark.soak
def test_marked(): pass

@given(strategies.none())
def test_random(_): pass

def test_plain(): pass
"""


def collected(folder: Path, **settings: str) -> set[str]:
    """`file::test` of all tests that a session with these settings runs."""
    names = {
        "share": "QWEN35_TESTS_SHARE",
        "of_marked": "QWEN35_TESTS_SOAK_SHARE",
        "seed": "QWEN35_TESTS_ORDER",
        "profile": "QWEN35_TESTS",
    }
    environment = {name: value for name, value in os.environ.items() if name not in names.values()}
    environment |= {names[name]: value for name, value in settings.items()}
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "-p", "tests.conftest"]
    arguments = ["-c", str(soak.REPOSITORY / "pyproject.toml"), "--rootdir", str(folder), str(folder)]
    printed = subprocess.run(
        command + arguments, env=environment, cwd=soak.REPOSITORY, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    return {line for line in printed.splitlines() if "::" in line}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    for number in range(60):
        (folder / f"test_{number}.py").write_text(TESTS_OF_A_FILE)
    return folder


def test_a_share_draws_files_by_the_seed_and_keeps_marked_and_random_tests_of_all(files: Path) -> None:
    everything = collected(files, profile="soak", seed="1")
    third = collected(files, profile="soak", seed="1", share="0.33")
    always = {test for test in everything if not test.endswith("::test_plain")}
    assert (len(everything), len(always)) == (180, 120)
    assert always < third < everything
    assert third != collected(files, profile="soak", seed="2", share="0.33")
    assert 10 <= len(third - always) <= 30
    assert third < collected(files, profile="soak", seed="1", share="0.66"), (
        "a longer soak adds files to those of a shorter one"
    )


def test_a_share_of_the_marked_tests_is_drawn_by_the_seed_and_random_tests_stay(files: Path) -> None:
    everything = collected(files, profile="soak", seed="1", share="0")
    marked = {test for test in everything if test.endswith("::test_marked")}
    half = collected(files, profile="soak", seed="1", share="0", of_marked="0.5")
    assert len(marked) == 60
    assert everything - half <= marked
    assert 20 <= len(everything - half) <= 40
    assert half != collected(files, profile="soak", seed="2", share="0", of_marked="0.5")
    assert half < collected(files, profile="soak", seed="1", share="0", of_marked="0.75"), "a longer soak adds tests"


def test_make_test_leaves_out_what_is_marked_soak(files: Path) -> None:
    tests = collected(files, profile="test", seed="1")
    assert len(tests) == 120
    assert not {test for test in tests if test.endswith("::test_marked")}


def test_only_kinds_that_repeat_tests_of_make_test_get_a_share(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = "import os; print([os.environ.get(f'QWEN35_TESTS_{name}SHARE') for name in ('', 'SOAK_')])"
    monkeypatch.setattr(soak.Kind, "command", lambda *_: [sys.executable, "-c", program])
    for drawn, minutes, printed in (
        (True, 60, "['0.17', '0.50']"),
        (True, 150, "['0.42', '1.00']"),
        (False, 60, "[None, None]"),
    ):
        assert soak.run(soak.Kind("one", soak.Lane.ALONE, ("suite",), drawn=drawn), 1, minutes)
        assert printed in capsys.readouterr().out
    assert {kind.name.split(",")[0] for kind in soak.kinds() if kind.drawn} == {
        "random examples",
        "runs",
        "all others",
        "the oldest vLLM",
        "every write of every story",
    }
    (stories,) = (kind for kind in soak.kinds() if kind.name == "every write of every story")
    assert soak._settings(stories, 1, 60)["QWEN35_TESTS_SOAK_SHARE"] == "1", "each write of each of them"

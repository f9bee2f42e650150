"""The runner itself: where it makes a mistake, and what it makes of how pytest ended."""

import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.mutants.__main__ import Judge, chosen
from tests.mutants.copied_tree import CopiedTree, Ran, copy_of
from tests.mutants.every import MUTANTS
from tests.mutants.mutant import DoesNotApply, Mutant

WRONG = Mutant("One is two.", "trainer/qwen35_trainer/counting/one.py", "1", "2", "tests/test_one.py::test_one", ())


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with one product file, and one file that git ignores."""
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    (tmp_path / WRONG.file).parent.mkdir(parents=True)
    (tmp_path / WRONG.file).write_text("ONE = 1\n")
    (tmp_path / ".gitignore").write_text("cache/\n")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "large").write_text("")
    return tmp_path


def test_the_mistake_is_in_a_copy_and_only_meanwhile(checkout):
    with copy_of(checkout) as tree:
        copied, times = tree.folder / WRONG.file, []
        assert not (tree.folder / "cache").exists()
        for _ in range(2):
            with tree.with_mutant(WRONG):
                assert copied.read_text() == "ONE = 2\n"
                assert (checkout / WRONG.file).read_text() == "ONE = 1\n"
                times.append(int(copied.stat().st_mtime))
            assert copied.read_text() == "ONE = 1\n"
            times.append(int(copied.stat().st_mtime))
        assert len(set(times)) == 4, "Python would take the bytecode of one text for the other's"
    assert not tree.folder.exists()


def test_a_file_that_is_not_in_the_copy_does_not_apply(tmp_path):
    tree = CopiedTree(tmp_path)
    with pytest.raises(DoesNotApply, match="contains the text to replace 0 times"), tree.with_mutant(WRONG):
        pass


class Scripted:
    """A tree whose runs of pytest end as given, with the mutant and without."""

    def __init__(self, mutated: Ran, sound: Ran) -> None:
        self.mutated, self.sound = mutated, sound
        self.mistaken = False

    @contextmanager
    def with_mutant(self, mutant: Mutant):
        self.mistaken = True
        yield
        self.mistaken = False

    def pytest(self, targets, *, stop_at_first=False):
        return self.mutated if self.mistaken else self.sound


def ran(code: int, *failed: str, missing: tuple[str, ...] = ()) -> Ran:
    return Ran(code, failed, missing, "the output of pytest", 0.5)


PASSED, FAILED = ran(0), ran(1, f"{WRONG.killer}[2-1]")


@pytest.mark.parametrize(
    ("mutated", "sound", "target", "outcome", "test"),
    [
        (FAILED, PASSED, WRONG.killer, "killed", f"{WRONG.killer}[2-1]"),
        (PASSED, PASSED, WRONG.killer, "survived", WRONG.killer),
        (ran(5), PASSED, "tests/counting", "survived", WRONG.killer),
        (ran(5), PASSED, WRONG.killer, "no such test", WRONG.killer),
        (ran(4, missing=(WRONG.killer,)), PASSED, WRONG.killer, "no such test", WRONG.killer),
        (FAILED, FAILED, WRONG.killer, "broken", f"{WRONG.killer}[2-1] fails without the mutant too"),
        (ran(2), PASSED, "tests/counting", "broken", "pytest ended with 2: the output of pytest"),
    ],
)
def test_a_mutant_is_killed_by_a_test_that_fails_with_it_and_passes_without_it(mutated, sound, target, outcome, test):
    verdict = Judge(Scripted(mutated, sound)).judge(WRONG, [target])
    assert (verdict.outcome, verdict.test) == (outcome, test)


def test_what_is_tried_out_together_is_not_run_again():
    judge = Judge(Scripted(FAILED, PASSED))
    judge.try_out([WRONG.killer])
    judge._tree.sound = FAILED
    assert judge.judge(WRONG, [WRONG.killer]).outcome == "killed"


def test_folders_are_run_up_to_the_first_failure():
    tree = Scripted(PASSED, PASSED)
    verdict = Judge(tree).judge(WRONG, ["tests/a", "tests/b"])
    assert (verdict.outcome, verdict.core_seconds) == ("survived", 1.0)


def test_mutants_are_chosen_by_package_or_by_words_of_their_sentence():
    assert chosen([]) == list(MUTANTS)
    assert {mutant.package for mutant in chosen(["weights", "engines"])} == {"weights", "engines"}
    assert [mutant.package for mutant in chosen(["one restart more"])] == ["reconcile"]
    with pytest.raises(SystemExit, match="no mutant is called nonsense"):
        chosen(["nonsense"])

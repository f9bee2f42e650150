"""Which mistakes do the tests notice? Forty, made by hand, each in a temporary copy of the tree.

    python -m tests.mutants                       run the test that is named for each mutant
    python -m tests.mutants pipeline "one restart"   of a package, or of mutants whose sentence has these words
    python -m tests.mutants --folders             run all folders that import the package, cheapest first, up to the first failure
    python -m tests.mutants --tree ../old         the same mistakes in another checkout, with the tests of that one
    python -m tests.mutants --json                print one JSON object in place of the table

A mutant is killed by a test that fails with it and passes without it: each test that fails is run again in the untouched copy.
Ends with 1 unless every mutant is killed. `--folders` may start what these folders start; do not run it together with `make test`.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.mutants.copied_tree import CopiedTree, Ran, copy_of
from tests.mutants.every import MUTANTS
from tests.mutants.mutant import DoesNotApply, Mutant

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Found:
    """What became of one mutant."""

    package: str
    name: str
    outcome: str
    """killed, survived, does not apply, no such test, or broken (pytest did not get as far as to run a test)."""
    test: str
    """Node id of the test that killed it; else of the test that should have, or the reason."""
    core_seconds: float
    seconds: float


class Judge:
    """Runs tests on mutants, and makes sure that what fails passes without them."""

    def __init__(self, tree: CopiedTree) -> None:
        self._tree = tree
        self._sound: dict[str, bool] = {}  # by node id: whether it passes in the untouched copy

    def try_out(self, tests: Iterable[str]) -> None:
        """Run all of these in the untouched copy, together: one start instead of one for each."""
        named = dict.fromkeys(tests)
        ran = self._tree.pytest([*named])
        while ran.missing and (remaining := [test for test in named if not test.endswith(ran.missing)]):
            named = dict.fromkeys(remaining)
            ran = self._tree.pytest(remaining)
        if ran.code in (0, 1):
            self._sound |= {test: not any(_is_of(failed, test) for failed in ran.failed) for test in named}

    def judge(self, mutant: Mutant, runs: Sequence[str]) -> Found:
        """Run each of `runs`, node ids or folders, until one of its tests kills the mutant."""
        began, spent = time.monotonic(), 0.0
        outcome, test = "survived", mutant.killer
        try:
            for target in runs:
                with self._tree.with_mutant(mutant):
                    ran = self._tree.pytest([target], stop_at_first=True)
                spent += ran.core_seconds
                outcome, test = self._outcome(ran, target, test)
                if outcome != "survived":
                    break
        except DoesNotApply as problem:
            outcome, test = "does not apply", str(problem)
        return Found(mutant.package, mutant.name, outcome, test, round(spent, 1), round(time.monotonic() - began, 1))

    def _outcome(self, ran: Ran, target: str, test: str) -> tuple[str, str]:
        if ran.code == 0 or (ran.code == 5 and "::" not in target):
            return "survived", test
        if ran.missing or ran.code in (4, 5):
            return "no such test", target
        if not ran.failed:
            return "broken", f"pytest ended with {ran.code}: {ran.output.strip()[-2000:]}"
        test = ran.failed[0]
        if not self._passes(test):
            return "broken", f"{test} fails without the mutant too"
        return "killed", test

    def _passes(self, test: str) -> bool:
        passes = next((sound for target, sound in self._sound.items() if _is_of(test, target)), None)
        if passes is None:
            passes = self._sound[test] = self._tree.pytest([test]).code == 0
        return passes


def _is_of(test: str, named: str) -> bool:
    """Whether `test` is the one that is named, or one of its parameters."""
    return test == named or test.startswith(f"{named}[")


def chosen(words: Sequence[str]) -> list[Mutant]:
    """The mutants of these packages, and those whose sentence contains one of these; all without words."""
    packages = {mutant.package for mutant in MUTANTS}
    parts = [word.lower() for word in words if word not in packages]
    selected = [
        mutant
        for mutant in MUTANTS
        if not words or mutant.package in words or any(part in mutant.name.lower() for part in parts)
    ]
    if not selected:
        sys.exit(f"no mutant is called {', '.join(words)}")
    return selected


def main() -> None:
    description = __doc__ or ""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="a package, or words of a mutant's sentence; default: all"
    )
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout to copy; default: this one")
    parser.add_argument("--folders", action="store_true", help="run every folder that imports the mutant's package")
    parser.add_argument(
        "--skip", action="append", default=[], metavar="FOLDER", help="leave a folder out; may be repeated"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    verdicts = []
    with copy_of(options.tree) as tree:
        judge, mutants = Judge(tree), chosen(options.names)
        if not options.folders:
            judge.try_out(mutant.killer for mutant in mutants)
        for mutant in mutants:
            folders = [
                folder for folder in mutant.folders if folder not in options.skip and (tree.folder / folder).is_dir()
            ]
            verdicts.append(judge.judge(mutant, folders if options.folders else [mutant.killer]))
            if not options.json:
                print(_row(verdicts[-1]), flush=True)
    killed = sum(verdict.outcome == "killed" for verdict in verdicts)
    if options.json:
        print(
            json.dumps(
                {"tree": str(options.tree), "killed": killed, "mutants": [asdict(verdict) for verdict in verdicts]},
                indent=2,
            )
        )
    else:
        spent = sum(verdict.core_seconds for verdict in verdicts)
        print(f"\n{killed} of {len(verdicts)} mutants killed, in {spent:.0f} core-seconds")
    sys.exit(0 if killed == len(verdicts) else 1)


def _row(verdict: Found) -> str:
    arrow = "←" if verdict.outcome == "killed" else "·"
    return f"{verdict.outcome:14} {verdict.seconds:6.1f} s  {verdict.package:10} {verdict.name}\n{'':24}{arrow} {verdict.test}"


if __name__ == "__main__":
    main()

"""The command of the lint: `python -m tools.language [--all] [--record] [PATH …]`.

Without options it prints the violations of every file that has more than the baseline allows, and ends with exit code 1 if
there are any. --all prints every violation, in the named files and folders only if there are any. --record lowers the baseline.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.language import baseline
from tools.language.first_sentence import fragments_in
from tools.language.names import adjectives_in, collisions, pronouns_in
from tools.language.phrases import phrases_in
from tools.language.texts import texts_of

ROOT = Path(__file__).parents[2]
SUFFIXES = frozenset({".md", ".py", ".sh", ".toml", ".yaml", ".yml"})
# The source of generated files is checked instead. The lint and its tests quote what they reject. The license is not ours.
EXCLUDED = (
    "crds/",
    "docs/reference/",
    "helm/qwen35-operator/files/crd.yaml",
    "requirements/",
    "tools/language/",
    "LICENSE",
)
EXCLUDED_TESTS = ("tests/suite/test_language.py",)


@dataclass(frozen=True, order=True)
class Violation:
    """A place that breaks a rule, and what to write instead."""

    path: str
    line: int
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.message}"


def main() -> int:
    """Check the tree, print what the options call for, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.language", description=__doc__)
    parser.add_argument("--all", action="store_true", help="print every violation, those of the baseline included")
    parser.add_argument("--record", action="store_true", help="lower the baseline to the present counts")
    parser.add_argument("paths", nargs="*", help="with --all: the files and folders to print")
    options = parser.parse_args()
    current = sorted(violations(_tracked_files()))
    if options.record:
        return record(_counts(current))
    if options.all:
        prefixes = tuple(options.paths) or ("",)
        print(*(violation for violation in current if violation.path.startswith(prefixes)), sep="\n")
        return 0
    return compare(current)


def violations(paths: list[Path]) -> Iterator[Violation]:
    """Yield every violation in the files at `paths`, which are relative to the repository's root."""
    sources = {path: (ROOT / path).read_text(encoding="utf-8") for path in paths}
    trees = {path: ast.parse(source) for path, source in sources.items() if path.suffix == ".py"}
    for path, source in sources.items():
        for text in texts_of(source, path.suffix, trees.get(path)):
            yield from (Violation(str(path), line, "phrase", message) for line, message in phrases_in(text))
    for path, tree in trees.items():
        yield from (Violation(str(path), line, "variable", message) for line, message in pronouns_in(tree))
        yield from (Violation(str(path), line, "constant", message) for line, message in adjectives_in(tree))
        if path.parts[0] != "tests":
            yield from (Violation(str(path), line, "docstring", message) for line, message in fragments_in(tree))
    product = {path: tree for path, tree in trees.items() if path.parts[0] in {"trainer", "operator"}}
    yield from (Violation(str(path), line, "class", message) for path, line, message in collisions(product))


def _tracked_files() -> list[Path]:
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [Path(name) for name in listing.splitlines() if not name.startswith(EXCLUDED + EXCLUDED_TESTS)]
    return [path for path in paths if (path.suffix in SUFFIXES or path.name == "Makefile") and (ROOT / path).exists()]


def _counts(current: list[Violation]) -> baseline.Counts:
    return Counter((violation.path, violation.rule) for violation in current)


def record(counts: baseline.Counts) -> int:
    """Lower the baseline to `counts`, and return the exit code."""
    allowed, totals = baseline.totals(baseline.load()), baseline.totals(counts)
    grown = [f"{rule}: {totals[rule]} instead of {allowed[rule]}" for rule in totals if totals[rule] > allowed[rule]]
    if grown and baseline.PATH.exists():
        print("The baseline may only shrink:", *grown, sep="\n    ")
        return 1
    baseline.save(counts)
    print(_summary(counts))
    return 0


def compare(current: list[Violation]) -> int:
    """Print what exceeds the baseline, and return the exit code."""
    allowed, counts = baseline.load(), _counts(current)
    exceeded = {key for key, count in counts.items() if count > allowed[key]}
    for violation in current:
        if (violation.path, violation.rule) in exceeded:
            print(violation)
    for path, rule in sorted(exceeded):
        print(f"{path}: {counts[path, rule]} of {rule}, where the baseline allows {allowed[path, rule]}")
    print(_summary(counts))
    if counts.total() < allowed.total():
        print(f"{allowed.total() - counts.total()} fewer than the baseline: run python -m tools.language --record")
    return 1 if exceeded else 0


def _summary(counts: baseline.Counts) -> str:
    by_rule = ", ".join(f"{count} {rule}" for rule, count in sorted(baseline.totals(counts).items()))
    return f"tools.language: {counts.total()} known violations ({by_rule})"


if __name__ == "__main__":
    sys.exit(main())

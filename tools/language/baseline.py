"""The record of violations that exist today, per file and rule: it may only shrink.

A file passes while it has at most as many violations of a rule as the record allows, so that parts of the code can be
improved independently of each other. `--record` lowers the record to today's counts. It follows renamed files, and refuses when the
total of a rule would grow.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

type Counts = Counter[tuple[str, str]]  # by path and rule

PATH = Path(__file__).with_name("baseline.txt")


def load() -> Counts:
    """Read the record: one line `path rule count` per file and rule."""
    lines = (line.split() for line in PATH.read_text(encoding="utf-8").splitlines()) if PATH.exists() else ()
    return Counter({(path, rule): int(count) for path, rule, count in lines})


def save(counts: Counts) -> None:
    """Write the record, sorted by path, so that changes of different files merge."""
    lines = sorted(f"{path} {rule} {count}\n" for (path, rule), count in counts.items())
    PATH.write_text("".join(lines), encoding="utf-8")


def totals(counts: Counts) -> Counter[str]:
    """Sum the counts of all files by rule."""
    sums: Counter[str] = Counter()
    for (_, rule), count in counts.items():
        sums[rule] += count
    return sums

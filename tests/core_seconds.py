"""What each folder of tests costs in processor time, with everything its tests start.

    pytest ─(after each test)─► usage of the control group ─► one Cost per test ─► FOLDER/<lane>.json ─┐
    CONTRIBUTING.md: budget and last recorded figure of each folder ──────────────────────────────────┴─► table

    python -m tests.core_seconds FOLDER             print the table of the runs in FOLDER and the 20 costliest tests
    python -m tests.core_seconds FOLDER --record    write the figures into the table of CONTRIBUTING.md too

As root, a session moves itself into a control group of its own, so that daemons, pods and processes that nobody waits for count
too. Elsewhere only this process and the children it has waited for are counted, and the table says so. The time between two
tests belongs to the second one: session fixtures count in the folder that uses them first.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import secrets
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest

REPOSITORY = Path(__file__).parents[1]
CONTRIBUTING = REPOSITORY / "CONTRIBUTING.md"
RESULTS = "QWEN35_TESTS_RESULTS"
"""Environment variable: a folder for the costs of this session. Without it the table is printed at the end of the session."""
GROUP = "qwen35-tests-"
NODES = "qwen35-"
"""Prefix of the control groups of the nodes of tests/cluster. Those of test sessions start with GROUP instead."""
STALE_SECONDS = 60.0
"""A younger control group may be one whose session is about to move into it."""
COSTLIEST = 20
ROW = re.compile(r"^\| `(tests/\S+|collection)` \| (\d*) \| ([\d,]*) \| (.*) \|$", re.MULTILINE)
"""A row of the table of budgets: folder, budget, recorded core-seconds, and what the folder needs them for."""


@dataclass(frozen=True)
class Cost:
    """Of one test, with what had to be set up for it. `core` and `wall` in seconds."""

    test: str
    core: float
    wall: float

    @property
    def folder(self) -> str:
        """The package of tests that it is in, like `tests/pipeline`."""
        parts = self.test.split("::")[0].split("/")
        return "/".join(parts[:2]) if len(parts) > 2 else parts[0]


@dataclass(frozen=True)
class Budget:
    """Core-seconds that a folder may cost, and what it cost when that was last recorded."""

    allowed: int | None
    recorded: int | None


class Meter(Protocol):
    complete: bool
    """Whether daemons and running children are counted."""

    def read(self) -> float:
        """Core-seconds so far."""

    def close(self) -> None: ...


class ChildrenMeter:
    """What this process and the children that it has waited for have used."""

    complete = False

    def read(self) -> float:
        used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(usage.ru_utime + usage.ru_stime for usage in used)

    def close(self) -> None:
        """Nothing was opened."""


class GroupMeter:
    """What a control group of its own has used; with `nodes`, those of the nodes of tests/cluster too."""

    complete = True

    def __init__(self, hierarchy: Path, *, nodes: bool) -> None:
        self._hierarchy = hierarchy
        self._nodes = nodes
        for stale in hierarchy.glob(f"{GROUP}*"):
            with suppress(OSError):  # a session is still in it
                if time.time() - stale.stat().st_mtime > STALE_SECONDS:
                    stale.rmdir()
        self._group = hierarchy / f"{GROUP}{secrets.token_hex(4)}"
        self._group.mkdir()
        self._used: dict[Path, float] = {}
        """By group, when it was last read."""
        self._total = 0.0
        self._move_to(self._group)

    def read(self) -> float:
        nodes = (path for path in self._hierarchy.glob(f"{NODES}*") if not path.name.startswith(GROUP))
        for group in (self._group, *(nodes if self._nodes else ())):
            with suppress(OSError):  # a node that has just ended
                used = used_by(group)
                self._total += increase(self._used.get(group, 0.0), used)
                self._used[group] = used
        return self._total

    def close(self) -> None:
        self._move_to(self._hierarchy)
        with suppress(OSError):  # a process that is about to end is still in it; the next session removes the group
            self._group.rmdir()

    @staticmethod
    def _move_to(group: Path) -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))


def increase(before: float, now: float) -> float:
    """Core-seconds between two readings of a group. A lower one is of a new group of that name: a node started again."""
    return now - before if now >= before else now


def used_by(group: Path) -> float:
    """Core-seconds of a control group with all below it, of either version of control groups."""
    usage = group / "cpuacct.usage"
    if usage.exists():
        return int(usage.read_text()) / 1e9
    fields = dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())
    return int(fields["usage_usec"]) / 1e6


def open_meter(*, nodes: bool) -> Meter:
    root = Path("/sys/fs/cgroup")
    for hierarchy in (root, root / "cpuacct", root / "cpu,cpuacct"):
        if any((hierarchy / name).exists() for name in ("cpuacct.usage", "cgroup.controllers")):
            try:
                return GroupMeter(hierarchy, nodes=nodes)
            except OSError:  # not root, or the hierarchy is mounted read-only
                break
    return ChildrenMeter()


class CoreSeconds:
    """The plugin. tests/conftest.py registers it."""

    def __init__(self, results: Path | None) -> None:
        self._results = results
        self._costs: list[Cost] = []
        self._meter: Meter | None = None
        self._core = self._wall = 0.0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        nodes = any(item.nodeid.startswith("tests/cluster/") for item in session.items)
        self._meter = open_meter(nodes=nodes)
        so_far = ChildrenMeter().read()
        self._costs.append(Cost("collection", so_far, so_far))
        self._core, self._wall = self._meter.read(), time.monotonic()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if self._meter is None:
            return
        core, wall = self._meter.read(), time.monotonic()
        self._costs.append(Cost(nodeid, core - self._core, wall - self._wall))
        self._core, self._wall = core, wall

    def pytest_sessionfinish(self) -> None:
        if self._meter is None:
            return
        self._meter.close()
        if self._results is not None:
            self._results.mkdir(parents=True, exist_ok=True)
            document = {"complete": self._meter.complete, "costs": [asdict(cost) for cost in self._costs]}
            (self._results / f"{os.getpid()}.json").write_text(json.dumps(document))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._meter is None or self._results is not None or len(self._costs) < 2:
            return
        terminalreporter.section("core-seconds")
        terminalreporter.write_line(
            table(self._costs, budgets(CONTRIBUTING.read_text()), complete=self._meter.complete)
        )


def budgets(text: str) -> dict[str, Budget]:
    """By folder, from the table in CONTRIBUTING.md."""
    return {folder: Budget(_number(allowed), _number(recorded)) for folder, allowed, recorded, _ in ROW.findall(text)}


def by_folder(costs: Iterable[Cost]) -> dict[str, tuple[int, float]]:
    """Tests and core-seconds of each folder, the costliest first."""
    tests: Counter[str] = Counter()
    core: Counter[str] = Counter()
    for cost in costs:
        tests[cost.folder] += cost.test != "collection"
        core[cost.folder] += cost.core
    return {folder: (tests[folder], used) for folder, used in core.most_common()}


def table(costs: list[Cost], allowed: Mapping[str, Budget], *, complete: bool) -> str:
    """Core-seconds by folder next to the last recorded ones and the budget, then the costliest tests."""
    lines = [f"{'folder':<24}{'tests':>7}{'core-s':>9}{'recorded':>10}{'budget':>8}"]
    for folder, (tests, core) in by_folder(costs).items():
        budget = allowed.get(folder, Budget(None, None))
        over = " over its budget" if budget.allowed is not None and core > budget.allowed else ""
        lines.append(f"{folder:<24}{tests:>7}{core:>9.1f}{_text(budget.recorded):>10}{_text(budget.allowed):>8}{over}")
    total = sum(cost.core for cost in costs)
    recorded = sum(entry.recorded or 0 for entry in allowed.values())
    budget_sum = sum(entry.allowed or 0 for entry in allowed.values())
    lines.append(
        f"{'all':<24}{sum(cost.test != 'collection' for cost in costs):>7}{total:>9.1f}{recorded:>10}{budget_sum:>8}"
    )
    if not complete:
        lines.append("Daemons and running children are not counted: that needs root and control groups.")
    lines.append(f"the {COSTLIEST} costliest tests, with what was set up for them:")
    costliest = sorted(costs, key=lambda cost: -cost.core)[:COSTLIEST]
    lines += [f"{cost.core:>9.1f} core-s {cost.wall:>7.1f} s  {cost.test}" for cost in costliest]
    return "\n".join(lines)


def recorded(text: str, costs: Iterable[Cost]) -> str:
    """CONTRIBUTING.md with the figures of these costs in its table."""
    core = {folder: used for folder, (_, used) in by_folder(costs).items()}

    def row(match: re.Match[str]) -> str:
        folder, allowed, before, reason = match.groups()
        figure = f"{core[folder]:.0f}" if folder in core else before
        return f"| `{folder}` | {allowed} | {figure} | {reason} |"

    return ROW.sub(row, text)


def load(folder: Path) -> tuple[list[Cost], bool]:
    """The costs of all sessions that wrote into `folder`, and whether every one counted everything."""
    documents = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
    costs = [Cost(**cost) for document in documents for cost in document["costs"]]
    return costs, all(document["complete"] for document in documents)


def _number(text: str) -> int | None:
    return int(text.replace(",", "")) if text else None


def _text(number: int | None) -> str:
    return "" if number is None else str(number)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    costs, complete = load(arguments.folder)
    if not costs:
        print(f"{arguments.folder}: no session wrote its costs here", file=sys.stderr)
        return 1
    text = CONTRIBUTING.read_text()
    print(table(costs, budgets(text), complete=complete))
    if arguments.record and not complete:
        print(f"{arguments.folder}: not everything was counted, so nothing is recorded: run as root", file=sys.stderr)
        return 1
    if arguments.record:
        CONTRIBUTING.write_text(recorded(text, costs))
    return 0


if __name__ == "__main__":
    sys.exit(main())

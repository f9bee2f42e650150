"""`make soak`: what is too long or too random for every change. Runs until its minutes are over, each kind at least once.

    waiting:   one run of each kind ─► what the other lane has left ─► again in turn ─┐ until the minutes are over
                                                                                      ├─► alone: one run of each ─► how many runs of each
    computing: one run of each kind ─► what the other lane has left ─► again in turn ─┘

    python -m tests.soak --minutes 60 [--only KIND …] [--seed N]

The first two lanes run in parallel: tests with clusters, and half an hour of losses, mostly wait. A lane that has run its kinds
takes those of the other lane that have not begun. Tests that assert a limit in seconds or need most of the memory run after both
lanes, when nothing else runs.

Every run has a seed, which is printed and repeats it: hypothesis draws its examples from it, and test files come in the order
that it gives. Most tests of some kinds are tests of `make test`, run once more in another order or with other versions. Such a
kind draws a part of its files, a sixth if the soak has 60 minutes and all from 360 on. Of the other files it runs the tests that
have random examples, and of those that are marked `soak` half if the soak has 60 minutes and all from 120 on, because they take
hours together. The fork server is off, so every process does its own imports. A kind that fails does not stop the others. The exit
code is 1 when a run failed or a kind has no run.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from itertools import count, cycle
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
TESTS = REPOSITORY / "tests"
CLUSTERS = ("controlplane", "cluster")
PROPERTIES = ("pipeline", "simulate", "operator", "manifest", "data", "algorithms")
"""Folders whose tests draw random examples."""
OLD_VERSIONS_INTERPRETER = REPOSITORY / ".venv-oldest" / "bin" / "python"
"""The interpreter of the environment with requirements/oldest.txt. The Makefile installs it."""
SIGNALS, LOSSES = "runtime/test_signals.py", "runtime/test_losses.py"
INSTALLED = "runtime/test_installed.py"
MONTH, REAL_SIZE = "pipeline/test_month.py", "runtime/test_real_size.py"
MINUTES_OF_ALL, MINUTES_OF_MARKED = 360, 120
"""A soak of at least these lengths draws all files, and all tests that are marked `soak`."""


class Lane(Enum):
    """When a kind runs: in parallel with those of the other lane, or when nothing else runs."""

    WAITING = "waiting"
    COMPUTING = "computing"
    ALONE = "alone"


@dataclass(frozen=True)
class Kind:
    """One sort of run: pytest with these folders or files below tests/, these arguments, this environment and this interpreter."""

    name: str
    lane: Lane
    tests: tuple[str, ...]
    arguments: tuple[str, ...] = ("-m", "not quiet")
    environment: Mapping[str, str] = field(default_factory=dict)
    interpreter: Path = Path(sys.executable)
    drawn: bool = False
    """Whether a run draws a part of the tests, because most of them are tests of `make test`."""

    def command(self, seed: int) -> list[str]:
        chosen = [f"tests/{name}" for name in self.tests]
        return [str(self.interpreter), "-m", "pytest", "-q", f"--hypothesis-seed={seed}", *self.arguments, *chosen]


def kinds() -> tuple[Kind, ...]:
    return (*_that_wait(), *_that_compute(), *_alone())


def _that_wait() -> tuple[Kind, ...]:
    oldest_server = ("controlplane/test_admission.py", "controlplane/test_lifecycle.py", "controlplane/test_suspend.py")
    oldest_kuberay = (
        "controlplane/test_lifecycle.py",
        "controlplane/test_suspend.py",
        "controlplane/test_elasticity.py",
    )
    return (
        Kind("parts of a real node killed", Lane.WAITING, ("cluster",)),
        Kind(
            "every write of every story",
            Lane.WAITING,
            ("controlplane",),
            environment={"QWEN35_TESTS_SOAK_SHARE": "1"},  # all of them
            drawn=True,
        ),
        Kind(
            "the oldest API server that the newest can emulate",
            Lane.WAITING,
            oldest_server,
            environment={"QWEN35_TESTBED_KUBERNETES": "1.32"},
        ),
        Kind(
            "the oldest KubeRay",
            Lane.WAITING,
            oldest_kuberay,
            environment={"QWEN35_TESTBED_KUBERAY": "oldest"},
        ),
        Kind("replicas lost for half an hour", Lane.WAITING, (LOSSES,), ("-m", "soak")),
    )


def _that_compute() -> tuple[Kind, ...]:
    folders = (place for place in TESTS.iterdir() if place.is_dir() and any(place.rglob("test_*.py")))
    rest = tuple(sorted({place.name for place in folders} - {"runtime", *CLUSTERS, *PROPERTIES}))
    elsewhere = (
        f"--deselect=tests/{SIGNALS}::test_signals_at_random_moments_of_the_start",
        f"--deselect=tests/{LOSSES}::test_replicas_lost_for_half_an_hour_lose_no_prompt",
        f"--ignore=tests/{REAL_SIZE}",
    )
    return (
        Kind(
            "random examples",
            Lane.COMPUTING,
            PROPERTIES,
            ("-m", "not quiet", f"--ignore=tests/{MONTH}"),
            drawn=True,
        ),
        Kind("a month of updates in virtual time", Lane.COMPUTING, (MONTH,)),
        Kind("runs, in random order", Lane.COMPUTING, ("runtime",), ("-m", "not quiet", *elsewhere), drawn=True),
        Kind("all others, in random order", Lane.COMPUTING, rest, drawn=True),
        Kind(
            "the oldest vLLM, transformers and megatron-core",
            Lane.COMPUTING,
            ("rollout", "engines/megatron", INSTALLED),
            *_without_amx(),
            interpreter=OLD_VERSIONS_INTERPRETER,
            drawn=True,
        ),
    )


def _without_amx() -> tuple[tuple[str, ...], Mapping[str, str]]:
    """Arguments and environment with which vLLM 0.23 takes a processor with AMX for one without: it refuses the models there."""
    if " amx_tile " not in Path("/proc/cpuinfo").read_text():
        return ("-m", "not quiet"), {}
    return ("-m", "not quiet", "-p", "tests.rollout.older_processor"), {"QWEN35_PROCESSOR": "AVX512"}


def with_limits_in_seconds() -> list[str]:
    """Return the files below tests/ that have tests marked `quiet`."""
    files = sorted(TESTS.rglob("test_*.py"))
    return [str(file.relative_to(TESTS)) for file in files if "mark.quiet" in file.read_text()]


def _alone() -> tuple[Kind, ...]:
    timed = tuple(name for name in with_limits_in_seconds() if name != SIGNALS)
    return (
        Kind("signals at random moments of the start", Lane.ALONE, (SIGNALS,), ("-m", "quiet or soak", "-s")),
        Kind("limits in seconds", Lane.ALONE, timed, ("-m", "quiet")),
        Kind("the real size", Lane.ALONE, (REAL_SIZE,)),
    )


def run(kind: Kind, seed: int, minutes: float) -> bool:
    """Whether it passed. Prints the output, each line after the kind's lane. minutes: of the soak."""
    environment = os.environ | _settings(kind, seed, minutes)
    command = kind.command(seed)
    with subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(f"{kind.lane.value} │ {line}", end="", flush=True)
    return process.returncode == 0


def _settings(kind: Kind, seed: int, minutes: float) -> Mapping[str, str]:
    own = {"QWEN35_TESTS": "soak", "QWEN35_TESTS_ORDER": str(seed), "OMP_NUM_THREADS": "1"}
    shares = {"QWEN35_TESTS_SHARE": MINUTES_OF_ALL, "QWEN35_TESTS_SOAK_SHARE": MINUTES_OF_MARKED}
    drawn = {name: f"{min(1.0, minutes / all_of_them):.2f}" for name, all_of_them in shares.items()}
    return own | (drawn if kind.drawn else {}) | kind.environment


@dataclass(frozen=True)
class Ended:
    """A run that has ended."""

    kind: Kind
    seed: int
    passed: bool
    minutes: float


class Turns:
    """Which kind each lane runs next: each kind once, and then the lane's own kinds in turn until the time is over."""

    def __init__(self, lanes: Sequence[Sequence[Kind]], until: float) -> None:
        self._lanes, self._until = lanes, until
        self._remaining = [deque(kinds) for kinds in lanes]
        self._lock = threading.Lock()

    def of(self, lane: int) -> Iterator[Kind]:
        while (kind := self._take(lane)) is not None:
            yield kind
        for kind in cycle(self._lanes[lane]):
            if time.monotonic() >= self._until:
                return
            yield kind

    def _take(self, lane: int) -> Kind | None:
        """The next kind of this lane that has not begun, or the last one of another lane."""
        with self._lock:
            if self._remaining[lane]:
                return self._remaining[lane].popleft()
            return next((kinds.pop() for kinds in self._remaining if kinds), None)


def runs(lane: Iterator[Kind], seeds: Iterator[int], minutes: float) -> list[Ended]:
    """Run the kinds of a lane, one after the other."""
    ended = []
    for kind in lane:
        seed, started = next(seeds), time.monotonic()
        print(f"soak: {kind.name}, seed {seed}", flush=True)
        ended.append(Ended(kind, seed, run(kind, seed, minutes), (time.monotonic() - started) / 60))
    return ended


def report(chosen: Sequence[Kind], ended: Sequence[Ended]) -> int:
    """Print how many runs of each kind passed, and those that failed. Returns the exit code."""
    for kind in chosen:
        own = [run for run in ended if run.kind == kind]
        minutes = sum(run.minutes for run in own)
        print(f"soak: {sum(run.passed for run in own)} of {len(own)} passed in {minutes:.0f} min: {kind.name}")
    failed = [run for run in ended if not run.passed]
    for run in failed:
        print(f"soak: failed: {run.kind.name}, seed {run.seed}")
    return int(bool(failed) or {run.kind.name for run in ended} != {kind.name for kind in chosen})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--only", nargs="+", metavar="KIND", choices=[kind.name for kind in kinds()])
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31), help="of the first run")
    arguments = parser.parse_args()
    chosen = [kind for kind in kinds() if not arguments.only or kind.name in arguments.only]
    until = time.monotonic() + 60 * arguments.minutes
    seeds = count(arguments.seed)  # next() of this counter is one step of the interpreter, so lanes may share it
    lanes = [[kind for kind in chosen if kind.lane is lane] for lane in Lane]
    *beside, alone = lanes
    turns = Turns(beside, until)
    with ThreadPoolExecutor() as threads:
        parallel = threads.map(lambda lane: runs(turns.of(lane), seeds, arguments.minutes), range(len(beside)))
        ended = [run for lane in parallel for run in lane]
    ended += runs(iter(alone), seeds, arguments.minutes)
    return report(chosen, ended)


if __name__ == "__main__":
    sys.exit(main())

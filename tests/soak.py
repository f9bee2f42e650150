"""`make soak`: what is too long or too random for every change. Runs until its minutes are over, each kind at least once.

    kinds ─► one run of each ─► again in turn, with new seeds, until the minutes are over ─► how many runs of each kind

    python -m tests.soak --minutes 60 [--only KIND …] [--seed N]

Every run has a seed, which is printed and repeats it: hypothesis draws its examples from it, and test files come in the order
that it gives. The fork server is off, so every process does its own imports. A kind that fails does not stop the others. The exit
code is 1 when a run failed or a kind has no run.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
TESTS = REPOSITORY / "tests"
CLUSTERS = ("controlplane", "cluster")
SIGNALS, LOSSES = "runtime/test_signals.py", "runtime/test_losses.py"
MONTH = "pipeline/test_month.py"


@dataclass(frozen=True)
class Kind:
    """One sort of run: pytest with these folders or files below tests/, these arguments, and this environment."""

    name: str
    tests: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self, seed: int) -> list[str]:
        chosen = [f"tests/{name}" for name in self.tests]
        return [sys.executable, "-m", "pytest", "-q", f"--hypothesis-seed={seed}", *self.arguments, *chosen]


def kinds() -> tuple[Kind, ...]:
    folders = (place for place in TESTS.iterdir() if place.is_dir() and any(place.rglob("test_*.py")))
    rest = tuple(sorted(place.name for place in folders if place.name not in CLUSTERS))
    return (
        Kind(
            "random examples",
            ("pipeline", "simulate", "operator", "manifest", "data", "algorithms"),
            (f"--ignore=tests/{MONTH}",),
        ),
        Kind("a month of updates in virtual time", (MONTH,)),
        Kind("signals at random moments of the start", (SIGNALS,), ("-m", "soak", "-s")),
        Kind("replicas lost for half an hour", (LOSSES,), ("-m", "soak")),
        Kind("every write of every story", ("controlplane",)),
        Kind(
            "the oldest API server that the newest can emulate",
            ("controlplane/test_admission.py", "controlplane/test_lifecycle.py", "controlplane/test_suspend.py"),
            environment={"QWEN35_TESTBED_KUBERNETES": "1.32"},
        ),
        Kind(
            "the oldest KubeRay",
            ("controlplane/test_lifecycle.py", "controlplane/test_suspend.py", "controlplane/test_elasticity.py"),
            environment={"QWEN35_TESTBED_KUBERAY": "oldest"},
        ),
        Kind("parts of a real node killed", ("cluster",)),
        Kind(
            "all others, in random order",
            rest,
            (
                f"--deselect=tests/{SIGNALS}::test_signals_at_random_moments_of_the_start",
                f"--deselect=tests/{LOSSES}::test_replicas_lost_for_half_an_hour_lose_no_prompt",
                f"--ignore=tests/{MONTH}",
            ),
        ),
    )


def run(kind: Kind, seed: int) -> bool:
    """Whether it passed. What it prints goes to this process's output."""
    print(f"soak: {kind.name}, seed {seed}", flush=True)
    own = {"QWEN35_TESTS": "soak", "QWEN35_TESTS_ORDER": str(seed), "OMP_NUM_THREADS": "1"}
    environment = os.environ | own | kind.environment
    return subprocess.run(kind.command(seed), cwd=REPOSITORY, env=environment, check=False).returncode == 0


def turns(chosen: Sequence[Kind], until: float) -> Iterator[Kind]:
    """Each kind once, then in turn until the time is over."""
    yield from chosen
    for kind in cycle(chosen):
        if time.monotonic() >= until:
            return
        yield kind


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--only", nargs="+", metavar="KIND", choices=[kind.name for kind in kinds()])
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31), help="of the first run")
    arguments = parser.parse_args()
    chosen = [kind for kind in kinds() if not arguments.only or kind.name in arguments.only]
    passed: Counter[str] = Counter()
    failed: list[str] = []
    for number, kind in enumerate(turns(chosen, time.monotonic() + 60 * arguments.minutes)):
        seed = arguments.seed + number
        if run(kind, seed):
            passed[kind.name] += 1
        else:
            failed.append(f"{kind.name}, seed {seed}")
    for kind in chosen:
        print(f"soak: {passed[kind.name]} passed: {kind.name}")
    for failure in failed:
        print(f"soak: failed: {failure}")
    return int(bool(failed) or any(not passed[kind.name] for kind in chosen))


if __name__ == "__main__":
    sys.exit(main())

"""A pytest plugin that counts the functions and files of the product that a test enters, for the table in docs/architecture.md.

    pytest -s -p tests.trip tests/operator/reconcile/test_reconciler.py -k children_are_created --trip-from Reconciler.reconcile
    pytest -s -p tests.trip tests/runtime/test_every_call.py -k all_that_a_run_makes --trip-from RolloutPool.publish

With `--trip-from`, only calls between the first and the second call of the named function count, in all threads: the steady
state of a run is from one publication to the next.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType

import pytest

ROOTS = ("/trainer/qwen35_trainer/", "/operator/qwen35_operator/")
TENSOR_CODE = ("models/", "algorithms/")


class Trip:
    """The functions entered so far, by file."""

    def __init__(self, start: str | None) -> None:
        self.entered: set[tuple[str, str]] = set()
        self._start, self._starts = start, 0

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        root = next((root for root in ROOTS if root in frame.f_code.co_filename), None)
        if event != "call" or root is None:
            return
        name = frame.f_code.co_qualname
        self._starts += name == self._start
        if (self._start is None or self._starts == 1) and not name.endswith(">"):
            self.entered.add((frame.f_code.co_filename.partition(root)[2], name))

    def summary(self) -> str:
        """Return the counts, with and without the tensor code."""
        rest = {(file, name) for file, name in self.entered if not file.startswith(TENSOR_CODE)}
        counts = [f"{len(part)} functions in {len({file for file, _ in part})} files" for part in (self.entered, rest)]
        return f"{counts[0]}; without models and algorithms {counts[1]}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--trip-from", metavar="FUNCTION", help="count from the first to the second call of this function")


def pytest_configure(config: pytest.Config) -> None:
    trip = Trip(config.getoption("--trip-from"))
    threading.setprofile(trip)
    sys.setprofile(trip)
    config.add_cleanup(lambda: _stop(trip))


def _stop(trip: Trip) -> None:
    sys.setprofile(None)
    threading.setprofile(None)
    print(f"\ntrip: {trip.summary()}")

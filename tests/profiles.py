"""Which of two profiles the tests run in.

test    what `make test` runs: the same examples in every run, processes forked from the fork server
soak    what `make soak` runs (QWEN35_TESTS=soak): random examples whose seed is printed, every case of every sweep, no fork server
"""

import os

SOAK = os.environ.get("QWEN35_TESTS") == "soak"
FORKED = os.environ.get("QWEN35_TESTS_FORK", "0" if SOAK else "1") == "1"
"""Whether processes that import torch are forked from one that has imported it."""


ORDER = os.environ.get("QWEN35_TESTS_ORDER")
"""Seed that shuffles the test files; None runs them by name. `make soak` sets it."""
SHARE = float(os.environ.get("QWEN35_TESTS_SHARE", "1"))
"""The part of the test files that a session of `make soak` draws by ORDER. Of the others, tests with random examples run, and of those
marked `soak` the part SOAK_SHARE."""
SOAK_SHARE = float(os.environ.get("QWEN35_TESTS_SOAK_SHARE", "1"))
"""The part of the tests marked `soak` that a session of `make soak` draws by ORDER, each on its own."""


def examples(count: int) -> int:
    """For `@settings(max_examples=…)`: that many in `make test`, ten times as many in `make soak`."""
    return 10 * count if SOAK else count

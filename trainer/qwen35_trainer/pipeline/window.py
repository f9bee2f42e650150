"""The limits on how far the pipeline may run ahead of training: by count and by age.

    version      0                 1                 2            P groups per batch, K batches per version
    batch     0 … K-1          K … 2K-1         2K … 3K-1
    with a maximum lag S = 1, a group born at version 0 may train up to and including batch 2K-1

docs/design/staleness.md states this bounded-staleness rule and proves it. `Buffer` applies the rule.
`runtime/assembly.py` checks the lag of every token again before the token trains.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Window:
    """The two bounds of staleness, from which the size of the window and the deadlines of groups follow.

    The staleness threshold limits the number of groups in the pipeline; the maximum lag limits their age. Raises
    ValueError if the threshold is negative or above the maximum lag, or if `groups_per_batch` or `batches_per_version`
    is below 1.
    """

    groups_per_batch: int
    """P: number of groups (prompts) per batch."""
    batches_per_version: int
    """K: number of batches between two publications of weights."""
    staleness_threshold: float
    """s: number of versions, possibly fractional, whose groups the window holds in addition to the groups of one version.

    At most ⌊(1 + s)·P·K⌋ groups count against the window, where P is `groups_per_batch` and K is `batches_per_version`.
    """
    max_version_lag: int
    """S, in versions: a token of version v may train at version v + S at the latest."""

    def __post_init__(self) -> None:
        problems = [
            *([] if self.groups_per_batch >= 1 else [f"{self.groups_per_batch} groups in a batch < 1"]),
            *([] if self.batches_per_version >= 1 else [f"{self.batches_per_version} batches in a version < 1"]),
            *(
                []
                if 0 <= self.staleness_threshold <= self.max_version_lag
                else [
                    f"stalenessThreshold {self.staleness_threshold} must lie between 0 and maxVersionLag "
                    f"{self.max_version_lag}: otherwise groups would start after their deadline"
                ]
            ),
        ]
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def limit(self) -> int:
        """The maximum number of groups that may count against the window at one time.

        It is (1 + `staleness_threshold`) · `groups_per_batch` · `batches_per_version`, rounded down.
        """
        # Rounding can put the product of decimal fractions just below a whole number (1.1 * 10): allow for one part in
        # a billion.
        return math.floor((1 + self.staleness_threshold) * self.groups_per_batch * self.batches_per_version + 1e-9)

    def version_of(self, batch: int) -> int:
        """Return the weight version at which batch number `batch` (from 0) trains."""
        return batch // self.batches_per_version

    def deadline(self, born: int) -> int:
        """Return the number of the last batch that may train a group whose oldest token came from version `born`."""
        return (born + self.max_version_lag + 1) * self.batches_per_version - 1

"""The versions of the weights that computed the tokens of a response, stored as runs of equal versions."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

type VersionRun = tuple[int, int]
"""A version of the weights, and the number of consecutive tokens that it computed."""


@dataclass(frozen=True, slots=True)
class VersionRuns:
    """The version of each token of a response.

    A response has few runs of equal versions, because weights change seldom. Runs take a small part of the memory of an
    array with one version for each token. numpy's functions accept this object in place of such an array.
    """

    runs: tuple[VersionRun, ...] = ()
    """The runs in order of the tokens. No run is empty, and neighbours have different versions."""

    @classmethod
    def of(cls, versions: Sequence[int] | NDArray[np.int32]) -> VersionRuns:
        """Find the runs in `versions`, which contains the version of each token."""
        values = np.asarray(versions, np.int32)
        if not len(values):
            return cls()
        changes = (values[1:] != values[:-1]).nonzero()[0].tolist()  # each is the last token of a run
        ends = [*(last + 1 for last in changes), len(values)]
        return cls(tuple((int(values[start]), end - start) for start, end in itertools.pairwise([0, *ends])))

    @classmethod
    def join(cls, parts: Iterable[VersionRuns]) -> VersionRuns:
        """Concatenate the versions of consecutive parts of a response."""
        return cls.of_runs(run for part in parts for run in part.runs)

    @classmethod
    def of_runs(cls, runs: Iterable[VersionRun]) -> VersionRuns:
        """Combine neighbouring runs of the same version. No run may be empty."""
        combined: list[VersionRun] = []
        last: int | None = None
        for version, count in runs:
            if version == last:
                combined[-1] = version, combined[-1][1] + count
            else:
                combined.append((version, count))
                last = version
        return cls(tuple(combined))

    def __len__(self) -> int:
        """Return the number of tokens."""
        return sum(count for _, count in self.runs)

    def __getitem__(self, part: slice) -> VersionRuns:
        """Return the versions of consecutive tokens. Raises ValueError for a slice with another step than 1."""
        start, end, step = part.indices(len(self))
        if step != 1:
            raise ValueError(f"a part of a response has step 1, not {step}")
        cut: list[VersionRun] = []
        at = 0
        for version, count in self.runs:
            if (inside := min(end, at + count) - max(start, at)) > 0:
                cut.append((version, inside))
            at += count
        return VersionRuns(tuple(cut))

    def __array__(self, dtype: type[np.generic] | None = None, copy: bool | None = None) -> NDArray[np.int32]:
        """Return an array with the version of each token. Raises ValueError if `copy` is False."""
        if copy is False:
            raise ValueError("the versions of tokens have no array that could be shared")
        versions, counts = zip(*self.runs, strict=True) if self.runs else ((), ())
        return np.repeat(np.array(versions, dtype or np.int32), counts)

    def tolist(self) -> list[int]:
        """Return the version of each token."""
        return [version for version, count in self.runs for _ in range(count)]

"""The device memory that one pool frees in mode Colocated, before the other pool computes on the same devices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryChange:
    """Device memory in use before and after an engine was put to sleep, in bytes."""

    before: int
    after: int

    @property
    def freed(self) -> int:
        """Number of bytes that were freed."""
        return self.before - self.after

    @classmethod
    def total(cls, changes: Iterable[MemoryChange]) -> MemoryChange:
        """Return the sum of the changes of several engines."""
        listed = list(changes)
        return cls(sum(each.before for each in listed), sum(each.after for each in listed))

    def __str__(self) -> str:
        return f"{self.freed / 2**30:.2f} of {self.before / 2**30:.2f} GiB"

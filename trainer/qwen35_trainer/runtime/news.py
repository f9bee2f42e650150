"""What the driver tells its follower."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from qwen35_trainer.progress.records import Record


@dataclass(frozen=True)
class News:
    """What a follower has not seen yet."""

    records: tuple[Record, ...]
    phase: str
    over: bool
    hosts: Mapping[str, str] = field(default_factory=dict)
    """Rollout replica → where it runs; empty until they have loaded."""


class Broadcast:
    """A sink that keeps records until the follower has them."""

    def __init__(self) -> None:
        self._records: list[Record] = []
        self._forgotten = 0
        self.changed = asyncio.Event()

    def write(self, record: Record) -> None:
        self._records.append(record)
        self.changed.set()

    def after(self, seen: int) -> tuple[Record, ...]:
        """Records after the first `seen`, which the follower has and which are dropped."""
        del self._records[: seen - self._forgotten]
        self._forgotten = seen
        return tuple(self._records)

    def close(self) -> None:
        self.changed.set()

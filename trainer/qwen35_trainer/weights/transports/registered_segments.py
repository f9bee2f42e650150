"""Registered memory for one version after another. Memory is registered once, and used again.

Registering pins memory, which takes about as long as writing to it for the first time: at least 0.2 s per GB on an idle
machine, and ten times as long where a hypervisor provides the pages. The two segments that are written in turn are
therefore made together, for the first version, while the run starts.

A third segment, made while a replica was late, is kept. If it were unregistered, a later one could get its address, and NIXL
refuses other metadata for an address that a reader knows.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from qwen35_trainer.weights.segment import MemorySegment, SegmentPool
from qwen35_trainer.weights.transfer_agent import RemoteMemory, TransferAgent

TURNS = 2
"""Number of segments that take turns: a version is written to one while the previous version is in the other."""


@dataclass(frozen=True)
class RegisteredSegment:
    """A segment, and the description by which other processes read its bytes."""

    segment: MemorySegment
    remote: RemoteMemory


class RegisteredSegments:
    """A pool of memory segments, registered with a transfer agent so that other processes can read the versions in them.

    When this object is deleted, all its segments are unregistered.
    """

    def __init__(self, agent: TransferAgent) -> None:
        self._agent, self._pool = agent, SegmentPool(TURNS)
        self._registered: dict[str, RegisteredSegment] = {}  # by name; keeps memory in place until it is unregistered
        weakref.finalize(self, _unregister, agent, self._registered)

    def claim(self, version: int, size: int, needed: frozenset[int] = frozenset()) -> RegisteredSegment:
        """Return a registered segment of `size` bytes for `version`, locked for writing.

        A free segment of this size is used again. Free segments of another size are unregistered. needed:
        versions whose segments must not be overwritten. Raises
        TooLittleMemory if a new segment must be created and does not fit into the memory.
        """
        claimed = self._pool.claim(version, size, needed)
        alive = {segment.handle.name for segment in self._pool.segments}
        for name in self._registered.keys() - alive:
            self._agent.unregister(self._registered.pop(name).remote)
        for segment in self._pool.segments:
            if segment.handle.name not in self._registered:
                self._registered[segment.handle.name] = RegisteredSegment(segment, self._agent.register(segment.data))
        return self._registered[claimed.handle.name]

    def of(self, segment: MemorySegment) -> RegisteredSegment:
        """Return the registered segment, from an earlier `claim`, that contains `segment`."""
        return self._registered[segment.handle.name]


def _unregister(agent: TransferAgent, registered: dict[str, RegisteredSegment]) -> None:
    """Unregister all segments, before their memory is freed."""
    while registered:
        _, entry = registered.popitem()
        agent.unregister(entry.remote)

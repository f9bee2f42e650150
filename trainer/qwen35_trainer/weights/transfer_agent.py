"""One-sided reads: what a process needs from a library of remote memory access (RDMA).

    source:  register(memory) ──RemoteMemory, in any message──► reader: start_read(…, into its own registered memory) ─► PendingRead
                                                                reader: is_done, again and again ─► true, or SourceLost

The source does nothing while it is read from. A read that has begun can write to the reader's memory until it is done or lost, even after
it was cancelled and its source was forgotten (NIXL 1.5.1 with UCX over TCP: a source that had been stopped wrote two seconds after
the release of the read). So nobody cancels a read: a reader that gives up on it keeps its memory until `is_done` has answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from qwen35_trainer.failure_reasons import FailureReason
from qwen35_trainer.weights.segment import Memory


class SourceLost(RuntimeError):
    """Memory of another process cannot be read: the process has ended, is not reachable, does not answer, or holds it no more."""

    failure = FailureReason.WORKER_LOST


@dataclass(frozen=True)
class RemoteMemory:
    """Registered memory of a process, with all that another process needs to read it."""

    agent: str
    """Name of the agent that registered it. No two agents have the same one."""
    metadata: bytes
    """How the agent can be reached, and what it has registered. The format is the library's."""
    address: int
    size: int


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive bytes to read."""

    source: int
    """Offset of the first byte in the remote memory."""
    target: int
    """Offset of the first byte in the reader's memory."""
    size: int


class PendingRead(Protocol):
    """A read that has begun."""

    def is_done(self) -> bool:
        """Whether all bytes have arrived. Does not wait. Raises SourceLost if they will not arrive, and none is written any more."""
        ...


class TransferAgent(Protocol):
    """Registers memory of this process, and reads registered memory of others. Its methods may be called on any thread."""

    @property
    def name(self) -> str:
        """A name that no other agent has."""
        ...

    def register(self, memory: Memory) -> RemoteMemory:
        """Let other processes read `memory`, and this process read into it, until `unregister`. The memory must exist until then."""
        ...

    def unregister(self, memory: RemoteMemory) -> None: ...

    def start_read(self, source: RemoteMemory, memory: Memory, spans: Sequence[Span]) -> PendingRead:
        """Begin to copy `spans` of `source` to `memory`, which is registered. Raises SourceLost."""
        ...

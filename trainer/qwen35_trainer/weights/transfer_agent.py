"""One-sided reads: what a process needs from a library of remote memory access (RDMA).

    source:  register(memory) ──RemoteMemory, in any message──► reader: start_read(…, into its own registered memory) ─► PendingRead
                                                                reader: is_done, again and again ─► true, or SourceLost

The source does nothing while it is read from. A read that has begun can write to the reader's memory until it is done
or lost, even after it was cancelled and its source was forgotten. (NIXL 1.5.1 with UCX over TCP: a source that had been
stopped wrote two seconds after the release of the read.) A read is therefore never cancelled: a reader that gives up a
read keeps the memory until `is_done` returns True or raises SourceLost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from qwen35_trainer.failure_reasons import FailureReason
from qwen35_trainer.weights.segment import Memory


class SourceLost(RuntimeError):
    """Memory of another process cannot be read: the process has ended, is not reachable, or does not answer in time."""

    failure = FailureReason.WORKER_LOST


@dataclass(frozen=True)
class RemoteMemory:
    """A description of registered memory of a process, with which another process can read the memory."""

    agent: str
    """Name of the agent that registered the memory. No two agents have the same name."""
    metadata: bytes
    """How the agent can be reached, and which memory it has registered, in the format of the library."""
    address: int
    size: int


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive bytes to read: where they are in the remote memory, and where they go in the reader's memory."""

    source: int
    """Offset of the first byte in the remote memory."""
    target: int
    """Offset of the first byte in the reader's memory."""
    size: int


class PendingRead(Protocol):
    """A read that has begun."""

    def is_done(self) -> bool:
        """Return whether all bytes have arrived, without waiting.

        Raises SourceLost if they will not arrive. After True or SourceLost, the read writes nothing any more.
        """
        ...


class TransferAgent(Protocol):
    """Registers memory of this process, and reads registered memory of others. Its methods may be called on any thread."""

    @property
    def name(self) -> str:
        """A name that no other agent has."""
        ...

    def register(self, memory: Memory) -> RemoteMemory:
        """Register `memory`: until `unregister`, other processes can read it, and this process can read into it.

        The memory must not be freed before `unregister`.
        """
        ...

    def unregister(self, memory: RemoteMemory) -> None: ...

    def start_read(self, source: RemoteMemory, memory: Memory, spans: Sequence[Span]) -> PendingRead:
        """Begin to copy `spans` of `source` to `memory`, which must be registered with this agent.

        Returns before the bytes have arrived. Raises SourceLost if the process that holds `source` cannot be reached.
        """
        ...

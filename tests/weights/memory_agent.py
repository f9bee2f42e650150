"""A stand-in for NIXL: agents of one process that read each other's memory when the test lets them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from qwen35_trainer.weights.segment import Memory
from qwen35_trainer.weights.transfer_agent import RemoteMemory, SourceLost, Span


@dataclass
class Network:
    """The registered memory of all agents, and the reads that have begun."""

    memory: dict[tuple[str, int], Memory] = field(default_factory=dict)
    reads: list["MemoryRead"] = field(default_factory=list)
    is_stopped: bool = False
    """Whether reads stay under way."""

    def deliver(self) -> None:
        """End all reads that are under way, with the bytes that their sources have now."""
        for read in self.reads:
            read.copy()

    @property
    def under_way(self) -> list["MemoryRead"]:
        return [read for read in self.reads if not read.ended]


@dataclass
class MemoryRead:
    source: Memory
    target: Memory
    spans: Sequence[Span]
    ended: bool = False

    def is_done(self) -> bool:
        return self.ended

    def copy(self) -> None:
        if not self.ended:
            for span in self.spans:
                self.target[span.target : span.target + span.size] = self.source[span.source : span.source + span.size]
        self.ended = True


class MemoryAgent:
    """An agent of a `Network`. registrations: how often it has registered memory."""

    def __init__(self, network: Network, name: str) -> None:
        self.network, self.name, self.registrations = network, name, 0

    def register(self, memory: Memory) -> RemoteMemory:
        self.registrations += 1
        self.network.memory[self.name, memory.ctypes.data] = memory
        return RemoteMemory(self.name, b"", memory.ctypes.data, memory.nbytes)

    def unregister(self, memory: RemoteMemory) -> None:
        del self.network.memory[self.name, memory.address]

    def start_read(self, source: RemoteMemory, memory: Memory, spans: Sequence[Span]) -> MemoryRead:
        assert (self.name, memory.ctypes.data) in self.network.memory, "the target is not registered"
        if (source.agent, source.address) not in self.network.memory:
            raise SourceLost(f"{source.agent} has ended")
        read = MemoryRead(self.network.memory[source.agent, source.address], memory, spans)
        self.network.reads.append(read)
        if not self.network.is_stopped:
            read.copy()
        return read

"""The memory of a train rank, by what it holds at the moment when it holds most."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace


@dataclass(frozen=True)
class TrainMemory:
    """Bytes that a train rank holds at one moment, on its device."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    reference: float = 0.0
    """The frozen model of the KL term."""
    gathered: float = 0.0
    """Parameters that FSDP has gathered, and its buffers for sums of gradients."""
    activations: float = 0.0
    head: float = 0.0
    """Logits and their gradients."""

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return float(sum(getattr(self, field.name) for field in fields(self)))

    def with_parts(self, **parts: float) -> TrainMemory:
        """Return the same memory with `parts` added."""
        return replace(self, **{name: getattr(self, name) + value for name, value in parts.items()})


def largest(moments: dict[str, TrainMemory]) -> tuple[str, TrainMemory]:
    """Return the moment with the most bytes, and its name."""
    return max(moments.items(), key=lambda moment: moment[1].total)


@dataclass(frozen=True)
class RankMemory:
    """The memory of a train rank: on its device at its peak, and in the host all the time."""

    peak: str
    """The moment at which the device holds most."""
    device: TrainMemory
    host: float
    """Bytes of offloaded state in the host's memory, pinned."""
    state: float
    """Bytes on the device between two updates."""

"""The memory of a train rank at its peak, by use."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace


@dataclass(frozen=True)
class TrainMemory:
    """The bytes that a train rank holds on its device at one moment, such as the optimizer step, by use."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    """Optimizer state: moments, and with the Megatron engine the master weights."""
    reference: float = 0.0
    """Parameters of the reference model of the KL term."""
    gathered: float = 0.0
    """Parameters that FSDP has all-gathered, and its buffers for the reduce-scatter of gradients."""
    published: float = 0.0
    """Parameters, or parts of the optimizer state, that the Megatron engine has gathered for a publication or a checkpoint."""
    activations: float = 0.0
    head: float = 0.0
    """Logits and their gradients."""

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return float(sum(getattr(self, field.name) for field in fields(self)))

    def with_parts(self, **parts: float) -> TrainMemory:
        """Return a copy in which some fields have changed.

        parts: name of a field → bytes to add to the field; may be negative.
        """
        return replace(self, **{name: getattr(self, name) + value for name, value in parts.items()})


def largest(moments: dict[str, TrainMemory]) -> tuple[str, TrainMemory]:
    """Return the name and the memory of the moment with the most bytes.

    moments: name of a moment, such as "optimizer step" → memory at this moment.
    """
    return max(moments.items(), key=lambda moment: moment[1].total)


@dataclass(frozen=True)
class RankMemory:
    """The memory of a train rank: on its device at the peak and between updates, and in host memory."""

    peak: str
    """Name of the moment at which the device holds most."""
    device: TrainMemory
    """Memory on the device at the peak."""
    host: float
    """Bytes of offloaded state in host memory, which is pinned on machines with an accelerator."""
    state: float
    """Bytes on the device between two updates."""
    parked: float
    """Bytes that a sleeping rank has in the host in addition, in mode Colocated."""

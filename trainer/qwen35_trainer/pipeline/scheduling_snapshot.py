"""The state of scheduling between two batches, as a checkpoint stores it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulingSnapshot:
    """The point where a run starts or continues. The defaults start a new run."""

    batch: int = 0
    """The next batch to train."""
    position: int = 0
    """The first prompt, by place in the epoch order, that was never dispatched."""
    pending: tuple[int, ...] = ()
    """Earlier prompts that have neither trained nor left for good. They are dispatched first."""
    group: int = 0
    """The number of the next group."""

"""Where a run stands between two batches: all that a checkpoint needs to know of scheduling."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Begin with a new run's, or with what a checkpoint or the journal holds."""

    batch: int = 0
    """The next one to train."""
    position: int = 0
    """The first prompt, by place in the epoch order, that was never dispatched."""
    pending: tuple[int, ...] = ()
    """Prompts before it that have neither trained nor left for good: they are dispatched first."""
    group: int = 0
    """The number of the next group."""

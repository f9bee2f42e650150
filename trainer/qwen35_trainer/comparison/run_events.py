"""Counts what a summary leaves out: how often a run started and repeated updates, what it lost, and its publications."""

from __future__ import annotations

from dataclasses import dataclass

from qwen35_trainer.progress.records import FinishRecord, RunRecord, SpanRecord, UpdateRecord


@dataclass(slots=True)
class RunEvents:
    """Counts and seconds, added up record by record."""

    starts: int = 0
    """Number of attempts that loaded the model. Loads that the timeline of a long run has joined count once."""
    failures: int = 0
    """Number of attempts that ended with a record of their failure."""
    repeated: int = 0
    """Number of updates that a later attempt repeated."""
    replicas_lost: int | None = None
    """Number of replicas that were lost. None: the run's release did not record it."""
    publications: int = 0
    """Number of updates since whose predecessor a publication ended."""
    publishing: float = 0.0
    """Seconds from the end of a copy of the weights until all replicas had loaded them, in all publications."""
    longest: float = 0.0
    """The longest of these times."""
    pauses: int = 0
    """Number of updates before which training waited for a copy of the weights."""
    paused: float = 0.0
    """Seconds for which it waited."""

    def add(self, record: RunRecord, *, repeated: bool) -> None:
        """Add the next record. repeated: whether a later attempt repeated this update."""
        match record:
            case SpanRecord(kind="load", lane="train-0"):
                self.starts += 1
            case FinishRecord(outcome="Failed"):
                self.failures += 1
            case UpdateRecord():
                self.repeated += repeated
                self._add_update(record)

    def _add_update(self, update: UpdateRecord) -> None:
        if update.replicas_lost is not None:
            self.replicas_lost = (self.replicas_lost or 0) + update.replicas_lost
        if update.seconds_publishing:
            self.publications += 1
            self.publishing += update.seconds_publishing
            self.longest = max(self.longest, update.seconds_publishing)
        if update.seconds_copying:
            self.pauses += 1
            self.paused += update.seconds_copying

"""Counts events of a run that its summary does not contain.

These are starts, failed attempts, repeated updates, lost replicas, publications, and pauses of
training for a copy of the weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from qwen35_trainer.progress.records import FinishRecord, RunRecord, SpanRecord, UpdateRecord


@dataclass(slots=True)
class RunEvents:
    """Counts and total seconds of the events of one run. `add` is called with each record of the run."""

    starts: int = 0
    """Number of attempts that loaded the model. In a long run, the metrics file may join the loads of several
    attempts into one span, which counts once."""
    failures: int = 0
    """Number of attempts that recorded an end with the outcome Failed."""
    repeated: int = 0
    """Number of updates that a later attempt trained again."""
    replicas_lost: int | None = None
    """Number of replicas that were lost. None: no update records it, because the run is SFT or of an earlier release."""
    publications: int = 0
    """Number of updates that record the end of a publication since the update before."""
    publishing: float = 0.0
    """Total seconds of all publications, each from the end of the copy of the weights until all replicas had loaded them."""
    longest: float = 0.0
    """Seconds of the longest publication, in the sense of `publishing`."""
    pauses: int = 0
    """Number of updates before which training waited for a copy of the weights or for its probe."""
    paused: float = 0.0
    """Total seconds of the waits that `pauses` counts."""

    def add(self, record: RunRecord, *, repeated: bool) -> None:
        """Count the next record of the run.

        repeated: whether the record is an update or evaluation that a later attempt repeated. Such an update is
        counted in the field `repeated`, and also in the other fields, like any other update.
        """
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

"""The requests of a run to the coordinator. Facts about the pools are in `events.py`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EvaluateVersion:
    """Generate `samples` sequences for each of `groups` once `version` is published, and before the next version is.

    It is answered by exactly one `VersionEvaluated` or `EvaluationSkipped`, unless the run has ended.
    """

    version: int
    groups: tuple[int, ...]
    samples: int


@dataclass(frozen=True, slots=True)
class TakeCheckpoint:
    """Save a checkpoint before the next batch trains, or when the save in progress is complete."""


@dataclass(frozen=True, slots=True)
class StopTraining:
    """Train no further batch; save, then end. Evaluations that are not complete are skipped."""


type Request = EvaluateVersion | TakeCheckpoint | StopTraining

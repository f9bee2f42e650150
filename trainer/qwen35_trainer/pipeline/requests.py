"""The requests of a run to the coordinator. Facts about the pools are in `events.py`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EvaluateVersion:
    """Evaluate `version` while it is the published version: generate `samples` sequences per group.

    groups: numbers of the groups, one for each held-out prompt. The coordinator answers with exactly one
    `VersionEvaluated` or `EvaluationSkipped`, unless the run has ended.
    """

    version: int
    groups: tuple[int, ...]
    samples: int


@dataclass(frozen=True, slots=True)
class TakeCheckpoint:
    """Save a checkpoint. If a batch is in training, the checkpoint is saved after this batch.

    If another checkpoint is already being saved, the requested one is saved after it, and further batches may train
    meanwhile. If no batch trains and the other checkpoint contains the present state, no further checkpoint is saved.
    """


@dataclass(frozen=True, slots=True)
class StopTraining:
    """Train no further batch, save a checkpoint unless the newest one contains all trained batches, and end the run.

    Incomplete evaluations are skipped.
    """


type Request = EvaluateVersion | TakeCheckpoint | StopTraining

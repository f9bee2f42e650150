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
    """Save a checkpoint after the batch in training, and after any checkpoint that is already being saved.

    Further batches may train while an earlier checkpoint is being saved. If no batch trains, and a checkpoint of the
    present state is already being saved, that checkpoint answers the request.
    """


@dataclass(frozen=True, slots=True)
class StopTraining:
    """Train no further batch, save a checkpoint unless the newest one contains all trained batches, and end the run.

    Incomplete evaluations are skipped.
    """


type Request = EvaluateVersion | TakeCheckpoint | StopTraining

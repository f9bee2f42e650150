"""What a manifest and a checkpoint mean to the coordinator."""

from __future__ import annotations

from qwen35_trainer.pipeline.buffer import OnMissedDeadline
from qwen35_trainer.pipeline.journal import origin, recover
from qwen35_trainer.pipeline.settings import Settings
from qwen35_trainer.pipeline.snapshot import Snapshot
from qwen35_trainer.pipeline.window import Window
from qwen35_trainer.runtime.job import Job
from qwen35_trainer.spec import TrainingSpec

AHEAD = 0.25
"""Sequences that wait in a replica's own queue, as a share of its slots: a freed slot is not empty for a round trip."""


def settings_of(spec: TrainingSpec, updates_total: int) -> Settings:
    """The coordinator's settings."""
    knobs = spec.effective_async
    rollout = spec.rollout
    assert rollout is not None
    return Settings(
        window=Window(spec.groups_per_batch, spec.batches_per_version, knobs.stalenessThreshold, knobs.maxVersionLag),
        group_size=spec.algorithm.groupSize,
        batches=-(-updates_total // knobs.requireBatches),
        on_missed_deadline=OnMissedDeadline(knobs.onMissedDeadline),
        partial_rollout=knobs.partialRollout,
        taking_turns=spec.mode == "Colocated",
        dynamic_sampling=spec.algorithm.dynamicSampling,
        lane_after=rollout.lane.afterTokens if rollout.lane else None,
        adaptive=knobs.adaptiveDispatch,
    )


def slots_of(spec: TrainingSpec) -> int:
    """Sequences that the coordinator gives to a replica at a time."""
    assert spec.rollout is not None
    return spec.rollout.maxSequences + round(AHEAD * spec.rollout.maxSequences)


def start_of(job: Job) -> Snapshot:
    """Where to begin. The journal knows more than the checkpoint, if it is of the attempt that saved it and not of later ones.

    Raises JournalDamaged.
    """
    if job.resume is None:
        return Snapshot()
    progress, file = job.resume.progress, job.folder.journal
    journal = file.read_bytes() if file.exists() else b""
    base = origin(journal)
    if base is not None and base.attempt == progress.journal != "" and base.snapshot.batch <= progress.batch:
        return recover(journal, progress.batch)
    return Snapshot(progress.batch, progress.position, progress.pending, progress.group)

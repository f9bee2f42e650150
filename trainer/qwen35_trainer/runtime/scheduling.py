"""Translates a manifest and a checkpoint into the coordinator's settings and starting point."""

from __future__ import annotations

import logging

from qwen35_trainer.manifest import TrainingSpec
from qwen35_trainer.pipeline.buffer import MissedDeadlinePolicy
from qwen35_trainer.pipeline.coordinator_settings import CoordinatorSettings
from qwen35_trainer.pipeline.journal import origin, recover
from qwen35_trainer.pipeline.replay import JournalDamaged
from qwen35_trainer.pipeline.scheduling_snapshot import SchedulingSnapshot
from qwen35_trainer.pipeline.window import Window
from qwen35_trainer.runtime.job import Job

logger = logging.getLogger(__name__)

QUEUE_SHARE = 0.25
"""Sequences that wait in a replica's queue, as a share of its slots, so that a freed slot is filled without a round trip."""


def settings_of(spec: TrainingSpec, updates_total: int) -> CoordinatorSettings:
    """Return the coordinator's settings."""
    knobs = spec.effective_async
    rollout = spec.rollout
    assert rollout is not None
    return CoordinatorSettings(
        window=Window(spec.groups_per_batch, spec.batches_per_version, knobs.stalenessThreshold, knobs.maxVersionLag),
        group_size=spec.algorithm.groupSize,
        batches=-(-updates_total // knobs.updatesPerBatch),
        on_missed_deadline=MissedDeadlinePolicy(knobs.onMissedDeadline),
        partial_rollout=knobs.partialRollout,
        taking_turns=spec.mode == "Colocated",
        dynamic_sampling=spec.algorithm.dynamicSampling,
        lane_after=rollout.stragglerLane.afterTokens if rollout.stragglerLane else None,
        adaptive=knobs.adaptiveDispatch,
    )


def slots_of(spec: TrainingSpec) -> int:
    """Return the maximum number of sequences that the coordinator assigns to a replica."""
    assert spec.rollout is not None
    return spec.rollout.maxSequencesPerReplica + round(QUEUE_SHARE * spec.rollout.maxSequencesPerReplica)


def start_of(job: Job) -> SchedulingSnapshot:
    """Return the scheduling state from which the run begins or continues.

    If the attempt that saved the checkpoint also wrote the journal, the state comes from the journal, because the
    journal also contains the groups that left after the checkpoint. Otherwise the state comes from the checkpoint.

    A damaged journal is logged and not used: the state then comes from the checkpoint, too. Prompts whose groups left
    untrained after the checkpoint have another turn then.
    """
    if job.resume is None:
        return SchedulingSnapshot()
    progress, file = job.resume.progress, job.folder.journal
    journal = file.read_bytes() if file.exists() else b""
    base = origin(journal)
    if base is not None and base.attempt == progress.journal != "" and base.snapshot.batch <= progress.batch:
        try:
            return recover(journal, progress.batch)
        except JournalDamaged as error:
            logger.warning("%s: the run continues from the position in checkpoint %s. %s", file, job.resume.path, error)
    return SchedulingSnapshot(progress.batch, progress.position, progress.pending, progress.group)

"""The description of a run, complete before the driver starts, and the scheduling state from which the run begins."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from qwen35_trainer.atomic_files import FolderWriter
from qwen35_trainer.data.encode import EncodedPrompt
from qwen35_trainer.data.sft import SupervisedExample
from qwen35_trainer.data.source_rows import SourceRows, dump_rows
from qwen35_trainer.epoch import Epoch
from qwen35_trainer.manifest import Manifest, TrainingSpec, dump_manifest
from qwen35_trainer.pipeline.buffer import MissedDeadlinePolicy
from qwen35_trainer.pipeline.commands import SchedulingSnapshot
from qwen35_trainer.pipeline.coordinator_settings import CoordinatorSettings
from qwen35_trainer.pipeline.journal import origin, recover
from qwen35_trainer.pipeline.replay import JournalDamaged
from qwen35_trainer.pipeline.window import Window
from qwen35_trainer.rewards.response_decoder import ResponseDecoder
from qwen35_trainer.runtime.checkpoint_store import CheckpointStore, SavedCheckpoint
from qwen35_trainer.runtime.folder import RunFolder
from qwen35_trainer.runtime.journal_file import read_journal
from qwen35_trainer.runtime.owner import run_of

logger = logging.getLogger(__name__)

QUEUE_SHARE = 0.25
"""Maximum number of sequences in a replica's queue, as a share of its slots.

Because of the queue, a replica can fill a free slot without waiting for the driver.
"""


@dataclass(frozen=True)
class Job:
    """The description of a run without its data.

    It is small, so workers can start while Ray transfers the data.
    """

    manifest: Manifest
    base: Path
    """The manifest's folder, to which relative paths in the manifest are relative."""
    folder: RunFolder
    resume: SavedCheckpoint | None
    started: float
    """Time at which the command began, in Unix seconds."""
    threads: int
    """Number of threads of each worker in a local run. In a cluster, the CPUs of a worker determine its
    number of threads."""
    updates_total: int
    vocabulary: int
    """Number of tokens of the tokenizer."""
    pictures: bool
    """Whether any training prompt or example contains an image or a video."""
    end_token: int
    stop_tokens: tuple[int, ...] = ()
    """Further tokens at which a response ends."""
    replicas_read_pictures: bool = False
    """Whether any prompt, for training or for evaluation, contains an image or a video."""
    in_cluster: bool = False
    source_rows: tuple[SourceRows, ...] = ()
    """The rows of the training sources that consist of files. Each checkpoint contains them."""
    attempt: str = field(default_factory=lambda: secrets.token_hex(4))
    """Random name of this attempt. Each start of a run has a new one.

    The attempt's checkpoints, owner.json and journal contain this name.
    """
    epoch: Epoch | None = None
    """The period in which this attempt owns the output folder. None: the folder is not claimed yet."""
    checkpoint_epoch: Epoch | None = None
    """The period in which this attempt owns the folder of the checkpoints.

    None: that folder is not claimed yet, or the run has no such folder.
    """

    @property
    def spec(self) -> TrainingSpec:
        return self.manifest.spec

    @property
    def writer(self) -> FolderWriter:
        """The writer of the output folder.

        Once the folder is claimed, the writer checks before each write that this attempt still owns the folder.
        """
        return self.epoch or FolderWriter(self.folder.root)

    @property
    def checkpoints(self) -> CheckpointStore | None:
        """The checkpoints of the run.

        None in a cluster without `checkpoint.storage`, because all ranks must write to one folder.
        """
        if self.in_cluster and self.spec.checkpoint.storage is None:
            return None
        folder = checkpoint_folder(self.folder, self.spec, self.base)
        manifest = dump_manifest(_with_absolute_model_path(self.manifest, self.base))
        limit, rows = self.spec.async_.stallSeconds, dump_rows(self.source_rows)
        return CheckpointStore(folder, self.spec.checkpoint.keep, manifest, self.checkpoint_epoch, limit, rows)

    @property
    def publications(self) -> Path | None:
        """Folder for the published weights of this run, which all attempts of the run share.

        None if `spec.publication.folder` is not set.
        """
        folder = self.spec.publication.folder
        if folder is None:
            return None
        run = run_of(self.manifest, self.folder, in_cluster=self.in_cluster)
        assert run is not None, "the run has begun"
        return self.base / folder / run


@dataclass(frozen=True)
class RunData:
    """The data of a run, and the decoder that turns responses into text.

    prompts: encoded prompts for training; empty in SFT. validation: encoded prompts for evaluation; empty in SFT.
    examples: supervised examples for training; empty except in SFT. held_out: supervised examples for evaluation; empty
    except in SFT.
    """

    decoder: ResponseDecoder
    prompts: Sequence[EncodedPrompt]
    validation: Sequence[EncodedPrompt]
    examples: Sequence[SupervisedExample]
    held_out: Sequence[SupervisedExample]


def checkpoint_folder(folder: RunFolder, spec: TrainingSpec, base: Path) -> Path:
    """Return the folder of a run's checkpoints: `spec.checkpoint.storage.path`, or else `checkpoints` in `folder`.

    folder: output folder of the run. base: the folder of the manifest, to which a relative path is relative.
    """
    storage = spec.checkpoint.storage
    return folder.checkpoints if storage is None or storage.path is None else base / storage.path


def with_model_at(spec: TrainingSpec, path: str) -> TrainingSpec:
    """Return a copy of the spec in which the model's folder is at `path`."""
    source = spec.model.source.model_copy(update={"path": path})
    return spec.model_copy(update={"model": spec.model.model_copy(update={"source": source})})


def _with_absolute_model_path(manifest: Manifest, base: Path) -> Manifest:
    """Return the manifest with an absolute path of the model's folder, as checkpoints contain it.

    base: the folder to which a relative path in the manifest is relative. A checkpoint does not contain this folder, so
    it could not resolve a relative path.
    """
    path = manifest.spec.model.source.path
    if path is None:
        return manifest
    return manifest.model_copy(update={"spec": with_model_at(manifest.spec, str((base / path).resolve()))})


def coordinator_settings(spec: TrainingSpec, updates_total: int) -> CoordinatorSettings:
    """Return the coordinator's settings for a spec in any mode except SFT, which has no coordinator.

    updates_total: number of updates of the run.
    """
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
        max_response_tokens=spec.data.maxResponseTokens,
        adaptive=knobs.adaptiveDispatch,
    )


def replica_slots(spec: TrainingSpec) -> int:
    """Return the maximum number of sequences that a replica has at a time: in its slots and in its queue."""
    assert spec.rollout is not None
    return spec.rollout.maxSequencesPerReplica + round(QUEUE_SHARE * spec.rollout.maxSequencesPerReplica)


def scheduling_start(job: Job) -> SchedulingSnapshot:
    """Return the scheduling state from which the run begins or continues.

    The state comes from the journal if the attempt that saved the checkpoint also wrote the journal, because
    the journal also contains the groups that left the pipeline after the checkpoint. Otherwise the state comes
    from the checkpoint.

    If the journal is damaged, or has the format of another release, a warning is logged, and the state comes from the
    checkpoint. Prompts whose groups left the pipeline untrained after the checkpoint are then dispatched again. Raises
    JournalNotRead if the disk fails.
    """
    if job.resume is None:
        return SchedulingSnapshot()
    progress, file = job.resume.progress, job.folder.journal
    journal = read_journal(file)
    try:
        base = origin(journal)
        if base is not None and base.attempt == progress.journal != "" and base.snapshot.batch <= progress.batch:
            return recover(journal, progress.batch)
    except JournalDamaged as error:
        logger.warning("%s: the run continues from the position in checkpoint %s. %s", file, job.resume.path, error)
    return SchedulingSnapshot(progress.batch, progress.position, progress.pending, progress.group)

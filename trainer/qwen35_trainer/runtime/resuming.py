"""Chooses the checkpoint that a run starts from, and checks that the run may save into its folder of checkpoints.

    a folder of checkpoints              no --resume      --resume auto                  --resume DIR
    empty, without an owner              begins a run     begins a run; refused if the   begins from DIR
                                                          output folder names a
                                                          checkpoint in another folder
    of this run                          refused          continues from the newest      continues from DIR
    of a release without owner.json      refused          continues from the newest      continues from DIR, if DIR is in it
    of another run                       refused          refused                        takes the folder over, if DIR is the newest

For `--resume auto`, the newest checkpoint is the newest one of the lineage: the checkpoints that led to the weights of
the last attempt. After --resume DIR, checkpoints of later updates in the folder belong to an abandoned attempt, until
the run saves for the first time. `owner.json` names the checkpoint from which the last attempt began (epoch.py).

A run resumes only from checkpoints of a run with the same fixed fields (manifest/fixed.py) and the same rows to train on, because
a checkpoint contains positions in their order. This module writes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os.path import normpath
from pathlib import Path
from socket import gethostname
from typing import Any

from qwen35_trainer.data.source_rows import SourceRows, changed, parse_rows
from qwen35_trainer.epoch import OWNER_FILE, FolderRefused, Owner
from qwen35_trainer.manifest import Manifest, TrainingSpec
from qwen35_trainer.manifest.fixed import differences
from qwen35_trainer.progress.metrics_file import read_records
from qwen35_trainer.progress.records import CheckpointRecord
from qwen35_trainer.runtime.checkpoint_store import (
    MANIFEST_FILE,
    ROWS_FILE,
    CheckpointError,
    CheckpointStore,
    SavedCheckpoint,
    StorageFailed,
    attempt_of,
    load,
    update_of,
)
from qwen35_trainer.runtime.folder import RunFolder, listed, spec_in, unwritable
from qwen35_trainer.runtime.job import checkpoint_folder, with_model_at
from qwen35_trainer.runtime.owner import Claim, run_of


@dataclass(frozen=True)
class RunStart:
    """The checkpoint from which a run begins, and the states of the folders into which the run writes."""

    checkpoint: SavedCheckpoint | None
    """The checkpoint from which the run begins. None: the run begins from the model of the manifest."""
    claim: Claim | None
    """The state of the folder in which the run saves checkpoints. None in a cluster without storage, where
    nothing is saved."""
    output: Claim
    """The state of the output folder."""


def find_start(
    resume: str | None, folder: RunFolder, manifest: Manifest, base: Path, *, in_cluster: bool = False
) -> RunStart:
    """Return the checkpoint from which a run begins, and the states of the folders into which the run writes.

    resume: the value of --resume, which is the folder of a checkpoint, or `auto` for the run's newest checkpoint, if
    there is one. None: the option is not given. folder: output folder of the run. base: the manifest's folder.
    in_cluster: whether the run is a training of a cluster, which saves no checkpoints without `checkpoint.storage`.

    Raises CheckpointError if the checkpoint is not complete, or if `auto` finds no checkpoint although the run has saved
    one. Raises StorageFailed if the folder of the checkpoints cannot be read. Raises FolderRefused if the checkpoint
    belongs to a run with other fixed fields, or if the folder in which this run would save cannot be written, belongs
    to another run, or has checkpoints that the run would not continue.
    """
    spec = manifest.spec
    if in_cluster and spec.checkpoint.storage is None:
        return RunStart(None, None, _claim_on(folder.root))
    place = checkpoint_folder(folder, spec, base)
    option = "--output" if spec.checkpoint.storage is None else "spec.checkpoint.storage.path"
    if (problem := unwritable(place, in_cluster=in_cluster)) is not None:
        raise FolderRefused(f"spec.checkpoint.storage: {problem}" if in_cluster else f"{option} {problem}")
    # First, because another attempt may save and claim while this one looks. Its claim then refuses what has changed.
    output, claim = _claim_on(folder.root), _claim_on(place)
    present = _CheckpointFolder(place, claim.owner, tuple(CheckpointStore(place, spec.checkpoint.keep).complete))
    foreign = present.is_foreign(run_of(manifest, folder, in_cluster=in_cluster), folder)
    chosen = None if resume is None else present.newest_of_lineage if resume == "auto" else Path(resume).resolve()
    advice = _Advice(option, in_cluster=in_cluster)
    if foreign and (resume == "auto" or not present.continued_by(chosen)):
        raise FolderRefused(_foreign_folder(present, spec, base, advice))
    unowned = present.owner is None and not present.contains(chosen)
    if present.newest is not None and (resume is None or unowned):
        raise FolderRefused(
            f"{place} holds checkpoints of an earlier run. Continue it with --resume auto, or name {advice.elsewhere}"
        )
    if resume == "auto" and chosen is None and (last := _last_saved(folder)) is not None:
        raise CheckpointError(
            f"{place} holds no checkpoint, and this run saved {last} last. Mount that folder again, or continue with --resume "
            f"{last}. For a fresh start, delete {folder.root}"
        )
    checkpoint = None if chosen is None else load(chosen)
    if checkpoint is not None and (lines := _differing(checkpoint.path, spec, base)):
        raise FolderRefused(
            f"checkpoint {checkpoint.path} is of a run with another manifest:\n{lines}\n"
            f"Restore these values to continue that run. {advice.for_a_new_run}"
        )
    return RunStart(checkpoint, claim, output)


def check_rows(checkpoint: Path, rows: Sequence[SourceRows], spec: TrainingSpec, *, in_cluster: bool = False) -> None:
    """Raise FolderRefused if a checkpoint is of a run with other rows to train on.

    rows: the rows that were read now. A checkpoint of a release that did not save the rows is accepted. Raises
    CheckpointError if its rows cannot be read.
    """
    file = checkpoint / ROWS_FILE
    if not file.is_file():
        return
    try:
        lines = changed(parse_rows(file.read_text()), rows)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint {checkpoint} cannot be read: {file} does not say which rows it is of. Name another with --resume DIR"
        ) from error
    if lines:
        option = "--output" if spec.checkpoint.storage is None else "spec.checkpoint.storage.path"
        raise FolderRefused(
            f"checkpoint {checkpoint} is of a run with other rows in data.train:\n{listed(lines)}\n"
            f"Restore the files to continue that run. {_Advice(option, in_cluster=in_cluster).for_a_new_run}"
        )


def _claim_on(folder: Path) -> Claim:
    try:
        return Claim.on(folder)
    except OSError as error:
        raise StorageFailed(f"{folder} cannot be read: {error.strerror}") from error


def newest_of_lineage(folder: Path, owner: Owner | None) -> Path | None:
    """Return the checkpoint in a folder from which `--resume auto` continues. None if the folder has no checkpoint.

    owner: content of the folder's owner.json; None: there is no such file. Raises CheckpointError if only checkpoints
    of abandoned attempts are left.
    """
    return _CheckpointFolder(folder, owner, tuple(CheckpointStore(folder, 1).complete)).newest_of_lineage


def start_name(checkpoint: SavedCheckpoint | None, folder: Path) -> str:
    """Return the value of `Owner.start` in `folder` for an attempt that begins from `checkpoint`.

    The value is the name of a checkpoint in `folder`, the path of any other checkpoint, or "" without a checkpoint.
    """
    if checkpoint is None:
        return ""
    within = checkpoint.path.parent.resolve() == folder.resolve()
    return checkpoint.path.name if within else str(checkpoint.path)


def _last_saved(folder: RunFolder) -> str | None:
    """Return the path of the last checkpoint in the run's records. None if there is none, or no records exist."""
    if not folder.metrics.is_file():
        return None
    saved = None
    for record in read_records(folder.metrics).of(CheckpointRecord):
        saved = record.path
    return saved


@dataclass(frozen=True)
class _CheckpointFolder:
    """The content of a folder of checkpoints before the run begins."""

    folder: Path
    owner: Owner | None
    complete: tuple[Path, ...]
    """The folders of the complete checkpoints, in order of their updates."""

    @property
    def newest(self) -> Path | None:
        return self.complete[-1] if self.complete else None

    @property
    def newest_of_lineage(self) -> Path | None:
        """The newest checkpoint that the last attempt saved. None if the folder has no checkpoint.

        If the last attempt saved no checkpoint, the result is the checkpoint from which that attempt began or, if that
        is gone, the newest checkpoint of an earlier update. Checkpoints of later updates may remain from an abandoned
        attempt, and do not count. Raises CheckpointError if the folder has only such checkpoints.
        """
        owner = self.owner
        if owner is None or not owner.start:
            return self.newest
        if saved := [path for path in self.complete if attempt_of(path) in (owner.attempt, None)]:
            return saved[-1]
        if (start := self.folder / owner.start).is_dir():
            return start
        if earlier := [path for path in self.complete if update_of(path) < update_of(start)]:
            return earlier[-1]
        if self.complete:
            raise CheckpointError(
                f"{self.folder} holds only checkpoints that this run did not lead to: it continued from {start}, which is gone. "
                f"Restore that folder, or name a checkpoint with --resume, such as {self.newest}"
            )
        return None

    def is_foreign(self, run: str | None, output: RunFolder) -> bool:
        """Return whether the folder belongs to another run.

        run: identity of this run; None: this run is new. output: output folder of this run.
        """
        if self.owner is None or self.owner.run == run:
            return False
        # A run that is killed before its first save, and again between writing run.id and its claim, finds its earlier name here.
        killed_twice = self.newest is None and (self.owner.host, self.owner.output) == (gethostname(), str(output.root))
        return not killed_twice

    def contains(self, checkpoint: Path | None) -> bool:
        return checkpoint is not None and checkpoint.parent.resolve() == self.folder.resolve()

    def continued_by(self, checkpoint: Path | None) -> bool:
        """Return whether `checkpoint` is the newest in the folder.

        A run may take over another run's folder only if it continues from the newest checkpoint. Otherwise its next
        save would delete the later checkpoints.
        """
        return self.newest is not None and checkpoint is not None and checkpoint.resolve() == self.newest.resolve()


@dataclass(frozen=True)
class _Advice:
    """Composes the advice in error messages. option: the option or field that names the folder of the checkpoints."""

    option: str
    in_cluster: bool

    @property
    def elsewhere(self) -> str:
        return "another --output" if self.option == "--output" else f"another folder in {self.option}"

    @property
    def for_a_new_run(self) -> str:
        if self.in_cluster:
            return "For a new training, name another folder in spec.checkpoint.storage"
        return (
            f"For a new run, leave --resume out and name {self.elsewhere}; if it is to start from these weights, write them "
            "with qwen35 export and name that folder in spec.model.source.path"
        )


def _foreign_folder(present: _CheckpointFolder, spec: TrainingSpec, base: Path, advice: _Advice) -> str:
    """Return the message for the case that the folder of the checkpoints belongs to another run."""
    if advice.in_cluster:
        return f"{present.folder} is the folder of another run, {present.owner}. Name another folder in spec.checkpoint.storage"
    if present.newest is None:
        return (
            f"{present.folder} is the folder of another run, {present.owner}, and holds no checkpoint now. Name {advice.elsewhere}, or "
            f"delete {present.folder / OWNER_FILE} if that run is over"
        )
    text = f"{present.folder} holds the checkpoints of another run, {present.owner}"
    if lines := _differing(present.newest, spec, base):
        return f"{text}, with another manifest:\n{lines}\nName {advice.elsewhere}"
    return (
        f"{text}. Name {advice.elsewhere}, or take them over, after which that run can save there no more, with "
        f"--resume {present.newest}"
    )


def _differing(checkpoint: Path, spec: TrainingSpec, base: Path) -> str:
    """Compare the fixed fields of a spec with the manifest in a checkpoint. Returns one line for each difference.

    The result is "" if the fields are equal, or if an old release saved the checkpoint without a manifest. Raises
    CheckpointError if the manifest in the checkpoint cannot be read.
    """
    file = checkpoint / MANIFEST_FILE
    if not file.is_file():
        return ""
    try:
        earlier = spec_in(file)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint {checkpoint} cannot be read: {file} does not say what it is of. Name another with --resume DIR"
        ) from error
    return listed(differences(earlier, _with_comparable_path(spec, earlier, base)))


def _with_comparable_path(spec: TrainingSpec, earlier: Mapping[str, Any], base: Path) -> TrainingSpec:
    """Return the spec with the absolute path of the model's folder, to compare it with the spec of a checkpoint.

    earlier: the spec in the checkpoint. A relative path counts as equal to every absolute path in `earlier` that ends
    with it, because the manifest may be in another folder on another machine.
    """
    match spec.model.source.path, earlier:
        case str(written), {"model": {"source": {"path": str(there)}}}:
            end = [part for part in Path(normpath(written)).parts if part != ".."]
            same = list(Path(there).parts[-len(end) :]) == end
            return with_model_at(spec, there if same else str((base / written).resolve()))
    return spec

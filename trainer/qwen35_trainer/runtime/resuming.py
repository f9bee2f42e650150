"""From which checkpoint a run starts, and whether the folder that it saves into may be its own.

    a folder of checkpoints              no --resume      --resume auto                  --resume DIR
    empty, without an owner              begins a run     begins a run; refused where    begins from DIR
                                                          the run has saved elsewhere
    of this run                          refused          continues from the newest      continues from DIR
    of a release without owner.json      refused          continues from the newest      continues from DIR, if DIR is in it
    of another run                       refused          refused                        takes the folder over, if DIR is the newest

What is resumed must be of a run with the same fixed fields (spec/fixed.py). Nothing is written here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os.path import normpath
from pathlib import Path
from socket import gethostname
from typing import Any

from qwen35_trainer.progress.records import CheckpointRecord, read_records
from qwen35_trainer.runtime.checkpoint import MANIFEST, Checkpoint, CheckpointError, CheckpointStore, load
from qwen35_trainer.runtime.disk import unwritable
from qwen35_trainer.runtime.folder import FolderRefused, RunFolder, listed, spec_in
from qwen35_trainer.runtime.job import checkpoint_folder, with_model_at
from qwen35_trainer.runtime.owner import OWNER, Claim, Owner, run_of
from qwen35_trainer.spec import Manifest, TrainingSpec
from qwen35_trainer.spec.fixed import differences


@dataclass(frozen=True)
class Start:
    """Where a run begins, and where it saves."""

    checkpoint: Checkpoint | None
    """None: from the model of the manifest."""
    claim: Claim | None
    """None where nothing is saved: in a cluster without storage."""


def find_start(
    resume: str | None, folder: RunFolder, manifest: Manifest, base: Path, *, in_cluster: bool = False
) -> Start:
    """What --resume asks for: `auto` is the newest checkpoint of the run, if there is one; otherwise a checkpoint's folder.

    Raises CheckpointError for a checkpoint that is not whole, and FolderRefused when it is of a run with other fixed fields, or
    when the folder that this run would save into cannot be written or is another run's.
    """
    spec = manifest.spec
    if in_cluster and spec.checkpoint.storage is None:
        return Start(None, None)
    place = checkpoint_folder(folder, spec, base)
    option = "--output" if spec.checkpoint.storage is None else "spec.checkpoint.storage.path"
    if (problem := unwritable(place)) is not None:
        raise FolderRefused(f"{option} {problem}")
    try:
        claim = Claim.on(place)
    except OSError as error:
        raise CheckpointError(f"{place} cannot be read: {error.strerror}") from error
    found = _Found(place, claim.owner, CheckpointStore(place, spec.checkpoint.keep).newest)
    foreign = found.is_foreign(run_of(manifest, folder, in_cluster=in_cluster), folder)
    chosen = None if resume is None else found.newest if resume == "auto" else Path(resume).resolve()
    advice = _Advice(option, in_cluster=in_cluster)
    if foreign and (resume == "auto" or not found.continued_by(chosen)):
        raise FolderRefused(_another_runs(found, spec, base, advice))
    unowned = found.owner is None and not found.holds(chosen)
    if found.newest is not None and (resume is None or unowned):
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
    return Start(checkpoint, claim)


def _last_saved(folder: RunFolder) -> str | None:
    """The newest checkpoint that the run's records name; None for a run without any, and for one whose records are lost."""
    if not folder.metrics.is_file():
        return None
    saved = [record.path for record in read_records(folder.metrics) if isinstance(record, CheckpointRecord)]
    return saved[-1] if saved else None


@dataclass(frozen=True)
class _Found:
    """A folder of checkpoints, as it is before the run."""

    folder: Path
    owner: Owner | None
    newest: Path | None

    def is_foreign(self, run: str | None, output: RunFolder) -> bool:
        """Whether it belongs to a run other than `run`, which writes to `output`."""
        if self.owner is None or self.owner.run == run:
            return False
        # Killed before its first save, and again between a new run.id and its claim, a run finds its earlier name here.
        killed_twice = self.newest is None and (self.owner.host, self.owner.output) == (gethostname(), str(output.root))
        return not killed_twice

    def holds(self, checkpoint: Path | None) -> bool:
        return checkpoint is not None and checkpoint.parent.resolve() == self.folder.resolve()

    def continued_by(self, checkpoint: Path | None) -> bool:
        """Whether going on from it loses nothing: what comes after it would be deleted by the next save."""
        return self.newest is not None and checkpoint is not None and checkpoint.resolve() == self.newest.resolve()


@dataclass(frozen=True)
class _Advice:
    """What to do instead. option: what says where checkpoints go."""

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


def _another_runs(found: _Found, spec: TrainingSpec, base: Path, advice: _Advice) -> str:
    if advice.in_cluster:
        return f"{found.folder} is the folder of another run, {found.owner}. Name another folder in spec.checkpoint.storage"
    if found.newest is None:
        return (
            f"{found.folder} is the folder of another run, {found.owner}, and holds no checkpoint now. Name {advice.elsewhere}, or "
            f"delete {found.folder / OWNER} if that run is over"
        )
    text = f"{found.folder} holds the checkpoints of another run, {found.owner}"
    if lines := _differing(found.newest, spec, base):
        return f"{text}, with another manifest:\n{lines}\nName {advice.elsewhere}"
    return (
        f"{text}. Name {advice.elsewhere}, or take them over, after which that run can save there no more, with "
        f"--resume {found.newest}"
    )


def _differing(checkpoint: Path, spec: TrainingSpec, base: Path) -> str:
    """A line for each fixed field that is another than in the manifest of the checkpoint, whose release may have kept none."""
    file = checkpoint / MANIFEST
    if not file.is_file():
        return ""
    try:
        earlier = spec_in(file)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint {checkpoint} cannot be read: {file} does not say what it is of. Name another with --resume DIR"
        ) from error
    return listed(differences(earlier, _placed(spec, earlier, base)))


def _placed(spec: TrainingSpec, earlier: Mapping[str, Any], base: Path) -> TrainingSpec:
    """The spec with the full path of the model's folder, which a checkpoint has too.

    A relative path agrees with each that ends with it: on another machine the manifest is in another folder.
    """
    match spec.model.source.path, earlier:
        case str(written), {"model": {"source": {"path": str(there)}}}:
            end = [part for part in Path(normpath(written)).parts if part != ".."]
            same = list(Path(there).parts[-len(end) :]) == end
            return with_model_at(spec, there if same else str((base / written).resolve()))
    return spec

"""The description of a run, complete before Ray starts."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from qwen35_trainer.data.encode import EncodedPrompt
from qwen35_trainer.data.sft import SupervisedExample
from qwen35_trainer.manifest import Manifest, TrainingSpec, dump_manifest
from qwen35_trainer.rewards.response_decoder import ResponseDecoder
from qwen35_trainer.runtime.checkpoint_store import CheckpointStore, SavedCheckpoint
from qwen35_trainer.runtime.folder import RunFolder
from qwen35_trainer.runtime.owner import Owner


@dataclass(frozen=True)
class Job:
    """A run without its data: small, so that workers can start while Ray transfers the data."""

    manifest: Manifest
    base: Path
    """The manifest's folder: relative paths start here."""
    folder: RunFolder
    resume: SavedCheckpoint | None
    started: float
    """Wall-clock second at which the command began."""
    threads: int
    """Threads of each worker; in a cluster Ray gives each its CPUs."""
    updates_total: int
    vocabulary: int
    """Tokens of the tokenizer."""
    pictures: bool
    """Whether any training example shows a picture."""
    end_token: int
    in_cluster: bool = False
    attempt: str = field(default_factory=lambda: secrets.token_hex(4))
    """A new name at each start of a run. Its checkpoints, their folder and its journal contain it."""
    owner: Owner | None = None
    """The owner record in the folder of the checkpoints, once that folder is claimed."""

    @property
    def spec(self) -> TrainingSpec:
        return self.manifest.spec

    @property
    def checkpoints(self) -> CheckpointStore | None:
        """The run's checkpoints; None in a cluster without storage, where pods share no folder that all ranks could write to."""
        if self.in_cluster and self.spec.checkpoint.storage is None:
            return None
        folder = checkpoint_folder(self.folder, self.spec, self.base)
        manifest = dump_manifest(_with_absolute_model_path(self.manifest, self.base))
        return CheckpointStore(folder, self.spec.checkpoint.keep, manifest, self.owner)


@dataclass(frozen=True)
class RunData:
    """Encoded prompts, or examples in SFT, and the decoder that turns responses into text."""

    decoder: ResponseDecoder
    prompts: Sequence[EncodedPrompt]
    validation: Sequence[EncodedPrompt]
    examples: Sequence[SupervisedExample]
    held_out: Sequence[SupervisedExample]


def checkpoint_folder(folder: RunFolder, spec: TrainingSpec, base: Path) -> Path:
    """Return the folder of a run's checkpoints."""
    storage = spec.checkpoint.storage
    return folder.checkpoints if storage is None or storage.path is None else base / storage.path


def with_model_at(spec: TrainingSpec, path: str) -> TrainingSpec:
    """Return the spec with another path of the model's folder."""
    source = spec.model.source.model_copy(update={"path": path})
    return spec.model_copy(update={"model": spec.model.model_copy(update={"source": source})})


def _with_absolute_model_path(manifest: Manifest, base: Path) -> Manifest:
    """Return the manifest with the absolute path of the model's folder, because a checkpoint does not record the manifest's folder."""
    path = manifest.spec.model.source.path
    if path is None:
        return manifest
    return manifest.model_copy(update={"spec": with_model_at(manifest.spec, str((base / path).resolve()))})

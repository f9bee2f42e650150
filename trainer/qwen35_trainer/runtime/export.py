"""`qwen35 export`: the model of a checkpoint as a Hugging Face folder, or its adapters as a PEFT one.

    run.yaml ─► which model, which adapters ─┐
    checkpoint ─► what was trained ──────────┼─► .OUTPUT.partial: weights, configuration, tokenizer, checksums ─► OUTPUT
    source folder, or seed ─► all the rest ──┘

The output is whole or absent, and is never written over anything.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from qwen35_trainer.models.qwen3_5.export import HEAD
from qwen35_trainer.runtime.checkpoint import CONTENTS, MANIFEST, Checkpoint, CheckpointStore, load
from qwen35_trainer.runtime.disk import sync
from qwen35_trainer.runtime.folder import RunFolder
from qwen35_trainer.runtime.job import checkpoint_folder
from qwen35_trainer.runtime.owner import read_owner, run_of
from qwen35_trainer.spec import LoRA, Manifest, Train, TrainingSpec, load_manifest

if TYPE_CHECKING:
    from torch import Tensor

    from qwen35_trainer.engines.fsdp.saved_weights import SavedWeights
    from qwen35_trainer.models.qwen3_5.checkpoint_files import CheckpointFiles
    from qwen35_trainer.models.qwen3_5.hub_folder import Part, Values


class ExportRefused(ValueError):
    """There is nothing to export, or nowhere to write it; says why and what to do."""


@dataclass(frozen=True)
class Exported:
    checkpoint: Path
    update: int
    folder: Path
    size: int
    """Bytes."""


def export(what: Path, output: Path, *, source: Path | None = None, adapter: bool = False) -> Exported:
    """Write the model of `what`, a checkpoint or the newest one of a run's folder, to the folder `output`.

    source: the folder that the run started from, where it is not where the manifest says; a relative path in the manifest
    is refused without it, and so is `source` for a run that started from random weights. adapter: LoRA's A and B alone, as PEFT loads them, not added to the weights.
    Raises ExportRefused, CheckpointError, CheckpointUnusable, WeightsUnreadable, ManifestError, FolderRefused for a damaged
    owner.json, and OSError when writing fails.
    """
    manifest, checkpoint = _find(what)
    if source is not None and manifest.spec.model.source.random is not None:
        raise ExportRefused(
            f"--source {source}: the run started from random weights, which are drawn again from spec.seed; leave it out"
        )
    lora = manifest.spec.train.lora
    if adapter and lora is None:
        raise ExportRefused(f"--adapter: {what} trained all weights, not adapters; leave it out")
    output = output.resolve()
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ExportRefused(f"--output {output} exists and is not an empty folder; name a new one")
    if output == Path.cwd() or output.is_mount():
        raise ExportRefused(
            f"--output {output} cannot be replaced, as a mount or the current folder; name a folder inside it"
        )
    from qwen35_trainer.engines.fsdp.saved_weights import SavedWeights, WeightsUnreadable

    saved = SavedWeights(checkpoint.path)
    output.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".partial", dir=output.parent))
    try:
        if adapter:
            assert lora is not None
            _write_adapter(saved, lora, manifest, aside)
        else:
            with ExitStack() as stack:
                _write_model(saved, manifest, source, aside, stack)
        size = _finish(aside, output)
    except WeightsUnreadable as error:
        if not checkpoint.path.is_dir():  # of a run that goes on and keeps the newest ones
            raise ExportRefused(
                f"{checkpoint.path} was deleted meanwhile; export again, or raise checkpoint.keep"
            ) from error
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return Exported(checkpoint.path, checkpoint.progress.update, output, size)


def _find(what: Path) -> tuple[Manifest, Checkpoint]:
    """The manifest of the run, and the checkpoint of it that is meant."""
    if not what.is_dir():
        raise ExportRefused(f"{what} does not exist; name a run's folder, or a checkpoint in one")
    if (run := RunFolder(what)).manifest.is_file():
        manifest = load_manifest(run.manifest)
        storage = manifest.spec.checkpoint.storage
        if storage is not None and storage.path is not None and not Path(storage.path).is_absolute():
            raise ExportRefused(
                f"spec.checkpoint.storage.path {storage.path} is relative to a manifest elsewhere; name a checkpoint in it"
            )
        place = checkpoint_folder(run, manifest.spec, Path())
        newest = CheckpointStore(place, 1).latest()
        if newest is None:
            raise ExportRefused(
                f"{what}: no checkpoint in {place}. A run saves one at its end, and by checkpoint.everyUpdates"
            )
        owner = read_owner(place)
        if owner is not None and owner.run not in [run_of(manifest, run, in_cluster=pods) for pods in (False, True)]:
            raise ExportRefused(
                f"{what}: {place} holds the checkpoints of another run now, {owner}; name a checkpoint in it"
            )
        own = newest.path / MANIFEST
        return load_manifest(own) if own.is_file() else manifest, newest
    if not (what / CONTENTS).is_file():
        raise ExportRefused(
            f"{what} is neither a run's folder, which has a run.yaml, nor a checkpoint like update-000020 in one"
        )
    checkpoint = load(what)
    own, run = checkpoint.path / MANIFEST, RunFolder(what.resolve().parent.parent)
    if not own.is_file() and not run.manifest.is_file():
        raise ExportRefused(f"{what}: {own} is missing, which names its model; name the run's folder instead")
    return load_manifest(own if own.is_file() else run.manifest), checkpoint


def _write_model(saved: SavedWeights, manifest: Manifest, source: Path | None, output: Path, stack: ExitStack) -> None:
    from qwen35_trainer.models.qwen3_5.checkpoint_files import CheckpointFiles
    from qwen35_trainer.models.qwen3_5.hub_folder import write_hub_folder

    model = manifest.spec.model
    if model.source.random is not None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="qwen35-export-")))
        _write_random(manifest.spec, folder)
    else:
        folder = source or Path(model.source.path or "")
        if source is None and not folder.is_absolute():
            raise ExportRefused(
                f"spec.model.source.path {folder} is relative to a manifest elsewhere; name the folder with --source"
            )
        if not folder.is_dir():
            raise ExportRefused(f"the run's source {folder} is not a folder here; name it with --source")
    files = CheckpointFiles.open(folder)
    if problems := _misfits(saved, files, manifest.spec.train):
        raise ExportRefused(
            f"the checkpoint is not of the model in {folder}: {'; '.join(problems[:5])}. Name the right --source"
        )
    write_hub_folder(files, _values(saved, files, manifest.spec.train.lora), output)


def _misfits(saved: SavedWeights, files: CheckpointFiles, train: Train) -> list[str]:
    """What of a checkpoint does not belong to this source, or to this way to train it."""
    wanted = {name: stored.shape for name, stored in files.tensors.items()}
    found = dict(saved.shapes)
    if files.config.tie_word_embeddings:
        found.pop(HEAD, None)
    if train.lora is not None:
        return _adapter_misfits(found, wanted, train.lora.rank)
    problems = [f"it holds {name}, the source does not" for name in found if name not in wanted]
    problems += [
        f"{name} is {shape}, not {wanted[name]}" for name, shape in found.items() if wanted.get(name, shape) != shape
    ]
    # A vision tower trains only where there are pictures.
    missing = [name for name in wanted if name not in found and not (found and name.startswith("model.visual."))]
    if missing and (not train.freeze or not found):
        problems.append(f"it lacks {len(missing)} parameters, {missing[0]} among them")
    return problems


def _adapter_misfits(
    found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]], rank: int
) -> list[str]:
    from qwen35_trainer.weights.adapters import DOWN, UP

    layers = {name.removesuffix(part) for name in found for part in (DOWN, UP) if name.endswith(part)}
    problems = [f"it holds {name}, which is not an adapter" for name in found if not name.endswith((DOWN, UP))]
    for layer in sorted(layers):
        rows, columns = wanted.get(f"{layer}weight", (0, 0))
        if (found.get(layer + DOWN), found.get(layer + UP)) != ((rank, columns), (rows, rank)):
            problems.append(f"the adapter of {layer}weight is {found.get(layer + DOWN)} and {found.get(layer + UP)}")
    return problems if layers else [*problems, "it holds no adapters"]


def _write_random(spec: TrainingSpec, folder: Path) -> None:
    """The model that a run with random weights started from: such models are small."""
    from safetensors import SafetensorError

    from qwen35_trainer.data.tokenizer import load_tokenizer
    from qwen35_trainer.models.qwen3_5.build import build
    from qwen35_trainer.models.qwen3_5.precision import PRECISIONS

    tokenizer = load_tokenizer(spec.model, Path())
    longest = spec.data.maxPromptTokens + spec.data.maxResponseTokens
    precision = PRECISIONS[spec.model.precision]
    model = build(
        spec.model,
        seed=spec.seed,
        vocabulary=len(tokenizer),
        max_length=longest,
        base=Path(),
        precision=precision,
    )
    for part in (model.config, *(getattr(model.config, name) for name in model.config.sub_configs)):
        part.dtype = precision
    try:
        model.save_pretrained(folder)
    except SafetensorError as error:  # a full disk, for one
        raise OSError(str(error)) from error
    tokenizer.save_pretrained(folder)


def _values(saved: SavedWeights, files: CheckpointFiles, lora: LoRA | None) -> Values:
    """Values of what trained."""
    trained = saved.shapes
    if lora is None:
        return lambda name: partial(saved.read, name) if name in trained else None
    from qwen35_trainer.weights.adapters import DOWN, UP

    def merged(name: str) -> Part | None:
        layer = name.removesuffix("weight")
        if layer + DOWN not in trained:
            return None
        change: Tensor = saved.read(layer + UP) @ saved.read(layer + DOWN)
        return lambda *part: files.read(name, *part).float() + lora.alpha / lora.rank * change[part]

    return merged


def _write_adapter(saved: SavedWeights, lora: LoRA, manifest: Manifest, output: Path) -> None:
    """As the PEFT library names and stores them."""
    from qwen35_trainer.models.qwen3_5.hub_folder import save
    from qwen35_trainer.weights.adapters import DOWN, UP

    # With tied embeddings a checkpoint may hold the output layer too.
    names = sorted(name for name in saved.shapes if name.endswith((DOWN, UP)))
    tensors = {f"base_model.model.{name}.weight": saved.read(name) for name in names}
    if not tensors:
        raise ExportRefused("the checkpoint holds no adapters: it was trained without train.lora")
    save(tensors, output / "adapter_model.safetensors", {"format": "pt"})
    layers = {name.rpartition(".")[0] for name in names}
    config = {
        "peft_type": "LORA",
        # Of the text class alone: in a vision-language model the same layers have other names.
        "task_type": None if any(".language_model." in name for name in names) else "CAUSAL_LM",
        "base_model_name_or_path": manifest.spec.model.source.path or manifest.spec.model.name,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(layers),  # in full: the same last name in the vision tower is not meant
        "inference_mode": True,
    }
    (output / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _finish(aside: Path, output: Path) -> int:
    """Checksums, then the output's name. Returns the size in bytes."""
    from qwen35_trainer.models.qwen3_5.hub_folder import seal

    seal(aside)
    size = sum(path.stat().st_size for path in aside.rglob("*"))
    sync(aside)
    aside.rename(output)  # which may be an empty folder
    sync(output.parent)
    return size

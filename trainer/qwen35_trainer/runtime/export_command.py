"""`qwen35 export`: writes the model of a checkpoint as a Hugging Face folder, or only its adapters for PEFT.

    run.yaml ─► which model, which adapters ─────┐
    checkpoint ─► the ranks' shards, joined ─────┼─► .OUTPUT.partial: weights, configuration, tokenizer, checksums ─► OUTPUT
    source folder, or seed ─► everything else ───┘

The shards of the ranks are joined by engines/fsdp/saved_weights.py. LoRA adapters are merged into the weights. Weights
get the dtypes of the source folder or, if the run started from random weights, the dtype of model.precision
(models/qwen3_5/hub_folder.py). The output is complete or absent, and an existing file is never overwritten.
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

from qwen35_trainer.atomic_files import sync
from qwen35_trainer.epoch import read_owner
from qwen35_trainer.manifest import LoRASpec, Manifest, TrainingSpec, TrainSpec, load_manifest
from qwen35_trainer.runtime.checkpoint_store import CONTENTS_FILE, MANIFEST_FILE, SavedCheckpoint, load
from qwen35_trainer.runtime.folder import RunFolder
from qwen35_trainer.runtime.job import checkpoint_folder
from qwen35_trainer.runtime.owner import run_of
from qwen35_trainer.runtime.resuming import newest_of_lineage

if TYPE_CHECKING:
    from torch import Tensor

    from qwen35_trainer.engines.fsdp.saved_weights import SavedWeights
    from qwen35_trainer.models.qwen3_5.checkpoint_files import CheckpointFiles
    from qwen35_trainer.models.qwen3_5.hub_folder import PartReader, TrainedValues


class ExportRefused(ValueError):
    """An export is impossible: there is nothing to export, an argument cannot be used, or the weights are unusable.

    The message contains what to do.
    """


@dataclass(frozen=True)
class Exported:
    checkpoint: Path
    update: int
    folder: Path
    size: int
    """Size of the exported folder, in bytes."""
    template: str | None = None
    """The run's `data.chatTemplate.file`, which the folder of a model does not contain; None: it has the run's template."""


def export(what: Path, output: Path, *, source: Path | None = None, adapter: bool = False) -> Exported:
    """Write the model of a checkpoint to the folder `output`.

    what: the folder of a checkpoint, or the folder of a run. For a run, the checkpoint from which the run would
    continue is exported: the newest one that does not belong to an abandoned attempt (`resuming.py`).

    source: the folder of the model from which the run started; None: the path in the manifest, which must be absolute
    then. With `adapter`, no source folder is read. A source is refused for a run that started from random weights.

    adapter: whether to write only the matrices A and B of LoRA, in the format of PEFT, instead of the weights with the
    adapters merged into them.

    Raises ExportRefused if there is nothing to export, if an argument cannot be used, or if the saved weights are
    damaged or do not fit the model; CheckpointError for a checkpoint that is not complete; ManifestError for an invalid
    manifest of the run; FolderRefused for a damaged owner.json; and OSError if writing fails.
    """
    manifest, checkpoint = _find(what)
    output = output.resolve()
    _check_options(what, output, manifest, source, adapter=adapter)
    # torch takes seconds to import: not for what was refused so far.
    from qwen35_trainer.engines.fsdp.saved_weights import SavedWeights, WeightsUnreadable
    from qwen35_trainer.models.qwen3_5.checkpoint_files import CheckpointUnusable

    try:
        size = _write(SavedWeights(checkpoint.path), manifest, source, output, adapter=adapter)
    except CheckpointUnusable as error:
        raise ExportRefused(str(error)) from error
    except WeightsUnreadable as error:
        if checkpoint.path.is_dir():
            raise ExportRefused(str(error)) from error
        # Deleted by the run, which continues and keeps only the newest ones.
        message = f"{checkpoint.path} was deleted meanwhile; export again, or raise checkpoint.keep"
        raise ExportRefused(message) from error
    template = None if adapter else manifest.spec.data.chatTemplate.file
    return Exported(checkpoint.path, checkpoint.progress.update, output, size, template)


def _check_options(what: Path, output: Path, manifest: Manifest, source: Path | None, *, adapter: bool) -> None:
    if source is not None and manifest.spec.model.source.random is not None:
        raise ExportRefused(
            f"--source {source}: the run started from random weights, which are drawn again from spec.seed; leave it out"
        )
    if adapter and manifest.spec.train.lora is None:
        raise ExportRefused(f"--adapter: {what} trained all weights, not adapters; leave it out")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ExportRefused(f"--output {output} exists and is not an empty folder; name a new one")
    if output == Path.cwd() or output.is_mount():
        raise ExportRefused(
            f"--output {output} cannot be replaced, as a mount or the current folder; name a folder inside it"
        )


def _find(what: Path) -> tuple[Manifest, SavedCheckpoint]:
    """Return the manifest of the run, and the checkpoint to export. what: the folder of a checkpoint or of a run.

    Raises ExportRefused if `what` is neither, or contains no checkpoint of the run; ManifestError, CheckpointError or
    FolderRefused if a manifest, the checkpoint or owner.json cannot be read.
    """
    if not what.is_dir():
        raise ExportRefused(f"{what} does not exist; name a run's folder, or a checkpoint in one")
    if (run := RunFolder(what)).manifest.is_file():
        manifest = load_manifest(run.manifest, new=False)
        storage = manifest.spec.checkpoint.storage
        if storage is not None and storage.path is not None and not Path(storage.path).is_absolute():
            raise ExportRefused(
                f"spec.checkpoint.storage.path {storage.path} is relative to a manifest elsewhere; name a checkpoint in it"
            )
        place = checkpoint_folder(run, manifest.spec, Path())
        owner = read_owner(place)
        newest = newest_of_lineage(place, owner)
        if newest is None:
            raise ExportRefused(
                f"{what}: no checkpoint in {place}. A run saves one at its end, and by checkpoint.everyUpdates"
            )
        if owner is not None and owner.run not in [run_of(manifest, run, in_cluster=pods) for pods in (False, True)]:
            raise ExportRefused(
                f"{what}: {place} holds the checkpoints of another run now, {owner}; name a checkpoint in it"
            )
        own = newest / MANIFEST_FILE
        return load_manifest(own, new=False) if own.is_file() else manifest, load(newest)
    if not (what / CONTENTS_FILE).is_file():
        raise ExportRefused(
            f"{what} is neither a run's folder, which has a run.yaml, nor a checkpoint like update-000020 in one"
        )
    checkpoint = load(what)
    own, run = checkpoint.path / MANIFEST_FILE, RunFolder(what.resolve().parent.parent)
    if not own.is_file() and not run.manifest.is_file():
        raise ExportRefused(f"{what}: {own} is missing, which names its model; name the run's folder instead")
    return load_manifest(own if own.is_file() else run.manifest, new=False), checkpoint


def _write(saved: SavedWeights, manifest: Manifest, source: Path | None, output: Path, *, adapter: bool) -> int:
    """Write the whole output folder, or nothing. Returns the size of the output in bytes.

    saved, manifest: weights and manifest of the checkpoint. The other parameters are those of `export`.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    partial_output = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".partial", dir=output.parent))
    try:
        lora = manifest.spec.train.lora
        if adapter and lora is not None:
            _write_adapter(saved, lora, manifest, partial_output)
        else:
            with ExitStack() as stack:
                _write_model(saved, manifest, source, partial_output, stack)
        return _finish(partial_output, output)
    finally:
        shutil.rmtree(partial_output, ignore_errors=True)


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


def _misfits(saved: SavedWeights, files: CheckpointFiles, train: TrainSpec) -> list[str]:
    """Return the reasons why the checkpoint's tensors do not fit the source folder or the manifest.

    The list is empty if the tensors fit.
    """
    from qwen35_trainer.models.qwen3_5.hub_tensors import HEAD

    wanted = {name: stored.shape for name, stored in files.tensors.items()}
    if train.multiTokenPrediction is not None:
        wanted |= {name: stored.shape for name, stored in files.head.items()}
    shapes = dict(saved.shapes)
    if files.config.tie_word_embeddings:
        shapes.pop(HEAD, None)
    if train.lora is not None:
        return _adapter_misfits(shapes, wanted, train.lora.rank)
    problems = [f"it holds {name}, the source does not" for name in shapes if name not in wanted]
    problems += [
        f"{name} is {shape}, not {wanted[name]}" for name, shape in shapes.items() if wanted.get(name, shape) != shape
    ]
    # A vision tower trains only where there are pictures.
    missing = [name for name in wanted if name not in shapes and not (shapes and name.startswith("model.visual."))]
    if missing and (not train.freeze or not shapes):
        problems.append(f"it lacks {len(missing)} parameters, {missing[0]} among them")
    return problems


def _adapter_misfits(
    shapes: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]], rank: int
) -> list[str]:
    from qwen35_trainer.weights.adapters import DOWN, UP

    layers = {name.removesuffix(part) for name in shapes for part in (DOWN, UP) if name.endswith(part)}
    problems = [f"it holds {name}, which is not an adapter" for name in shapes if not name.endswith((DOWN, UP))]
    for layer in sorted(layers):
        rows, columns = wanted.get(f"{layer}weight", (0, 0))
        if (shapes.get(layer + DOWN), shapes.get(layer + UP)) != ((rank, columns), (rows, rank)):
            problems.append(f"the adapter of {layer}weight is {shapes.get(layer + DOWN)} and {shapes.get(layer + UP)}")
    return problems if layers else [*problems, "it holds no adapters"]


def _write_random(spec: TrainingSpec, folder: Path) -> None:
    """Write to `folder` the model with random weights from which a run started.

    Such models are small enough to build in memory. Raises OSError if writing fails.
    """
    from safetensors import SafetensorError

    from qwen35_trainer.data.tokenizer import load_tokenizer
    from qwen35_trainer.models.qwen3_5.build_model import ModelSettings, build
    from qwen35_trainer.models.qwen3_5.precision import PRECISIONS

    tokenizer = load_tokenizer(spec.model, Path())
    longest = spec.data.maxPromptTokens + spec.data.maxResponseTokens
    precision = PRECISIONS[spec.model.precision]
    model = build(ModelSettings(spec.model, spec.seed, len(tokenizer), longest, Path(), precision))
    for part in (model.config, *(getattr(model.config, name) for name in model.config.sub_configs)):
        part.dtype = precision
    try:
        model.save_pretrained(folder)
    except SafetensorError as error:  # for example a full disk
        raise OSError(str(error)) from error
    tokenizer.save_pretrained(folder)


def _values(saved: SavedWeights, files: CheckpointFiles, lora: LoRASpec | None) -> TrainedValues:
    """Return a function that takes the name of a tensor, and returns a reader of its trained values.

    The function returns None for a tensor that did not train. lora: the settings of LoRA, whose adapters are merged
    into the weights of the source folder; None: the run trained without adapters.
    """
    trained = saved.shapes
    if lora is None:
        return lambda name: partial(saved.read, name) if name in trained else None
    from qwen35_trainer.weights.adapters import DOWN, UP

    def merged(name: str) -> PartReader | None:
        layer = name.removesuffix("weight")
        if layer + DOWN not in trained:
            return None
        change: Tensor = saved.read(layer + UP) @ saved.read(layer + DOWN)
        return lambda *part: files.read(name, *part).float() + lora.alpha / lora.rank * change[part]

    return merged


def _write_adapter(saved: SavedWeights, lora: LoRASpec, manifest: Manifest, output: Path) -> None:
    """Write the adapters with the names and the format of the PEFT library.

    Raises ExportRefused if the checkpoint contains no adapters.
    """
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
        # Only for the text class: in a vision-language model the same layers have other names.
        "task_type": None if any(".language_model." in name for name in names) else "CAUSAL_LM",
        "base_model_name_or_path": manifest.spec.model.source.path or manifest.spec.model.name,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(layers),  # full names, because the vision tower has layers with the same last name
        "inference_mode": True,
    }
    (output / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _finish(partial_output: Path, output: Path) -> int:
    """Write the checksums into `partial_output`, and rename that folder to `output`.

    Returns the folder's size in bytes.
    """
    from qwen35_trainer.models.qwen3_5.hub_folder import seal

    seal(partial_output)
    size = sum(path.stat().st_size for path in partial_output.rglob("*"))
    sync(partial_output)
    partial_output.rename(output)  # replaces the output if that is an empty folder
    sync(output.parent)
    return size

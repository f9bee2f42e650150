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
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from qwen35_trainer.runtime.checkpoint import Checkpoint, CheckpointStore, load
from qwen35_trainer.runtime.disk import sync
from qwen35_trainer.runtime.folder import RunFolder
from qwen35_trainer.runtime.job import checkpoint_folder
from qwen35_trainer.spec import LoRA, Manifest, TrainingSpec, load_manifest

if TYPE_CHECKING:
    from torch import Tensor

    from qwen35_trainer.engines.fsdp.checkpoint import SavedWeights
    from qwen35_trainer.models.qwen3_5.checkpoint_files import CheckpointFiles
    from qwen35_trainer.models.qwen3_5.hub_folder import Values

FLOAT32 = ("linear_attn.A_log", "linear_attn.norm.weight")
"""Ends of the names of what published checkpoints keep in float32 whatever the rest is stored in."""


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

    source: the folder that the run started from, where it is not where the manifest says; a relative path in the manifest starts
    at the current folder. adapter: LoRA's A and B alone, as PEFT loads them, not added to the weights.
    Raises ExportRefused, CheckpointError, CheckpointUnusable, ManifestError, and OSError when writing fails.
    """
    manifest, checkpoint = _find(what)
    lora = manifest.spec.train.lora
    if adapter and lora is None:
        raise ExportRefused(f"--adapter: {what} trained all weights, not adapters; leave it out")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ExportRefused(f"--output {output} exists and is not an empty folder; name a new one")
    from qwen35_trainer.engines.fsdp.checkpoint import SavedWeights

    saved = SavedWeights(checkpoint.path)
    aside = output.resolve().with_name(f".{output.resolve().name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        if adapter:
            assert lora is not None
            _write_adapter(saved, lora, manifest, aside)
        else:
            with ExitStack() as stack:
                _write_model(saved, manifest, source, aside, stack)
        size = _finish(aside, output)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return Exported(checkpoint.path, checkpoint.progress.update, output, size)


def _find(what: Path) -> tuple[Manifest, Checkpoint]:
    """The manifest of the run, and the checkpoint of it that is meant."""
    if (run := RunFolder(what)).manifest.is_file():
        manifest = load_manifest(run.manifest)
        place = checkpoint_folder(run, manifest.spec, Path())
        newest = CheckpointStore(place, 1).latest()
        if newest is None:
            raise ExportRefused(
                f"{what}: no checkpoint in {place}. A run saves one at its end, and by checkpoint.everyUpdates"
            )
        return manifest, newest
    checkpoint = load(what)  # says what a checkpoint is, where `what` is none
    run = RunFolder(what.resolve().parents[1])
    if not run.manifest.is_file():
        raise ExportRefused(f"{what}: {run.manifest} is missing, which names its model; name the run's folder instead")
    return load_manifest(run.manifest), checkpoint


def _write_model(saved: SavedWeights, manifest: Manifest, source: Path | None, output: Path, stack: ExitStack) -> None:
    from qwen35_trainer.models.qwen3_5.checkpoint_files import CheckpointFiles
    from qwen35_trainer.models.qwen3_5.hub_folder import write_hub_folder

    model = manifest.spec.model
    if model.source.random is not None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="qwen35-export-")))
        _write_random(manifest.spec, folder)
    else:
        folder = source or Path(model.source.path or "")
        if not folder.is_dir():
            raise ExportRefused(f"the run's source {folder} is not a folder here; name it with --source")
    files = CheckpointFiles.open(folder)
    write_hub_folder(files, _values(saved, files, manifest.spec.train.lora), output)


def _write_random(spec: TrainingSpec, folder: Path) -> None:
    """The model that a run with random weights started from: such models are small."""
    import torch

    from qwen35_trainer.data.tokenizer import load_tokenizer
    from qwen35_trainer.models.qwen3_5.build import build

    tokenizer = load_tokenizer(spec.model, Path())
    longest = spec.data.maxPromptTokens + spec.data.maxResponseTokens
    model = build(spec.model, seed=spec.seed, vocabulary=len(tokenizer), max_length=longest, base=Path())
    if spec.model.precision == "BF16":
        for name, parameter in model.named_parameters():
            if not name.endswith(FLOAT32):
                parameter.data = parameter.data.to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _values(saved: SavedWeights, files: CheckpointFiles, lora: LoRA | None) -> Values:
    """Values of what trained. The last two stay in memory: experts stored one by one ask for the same two in turn."""
    read = lru_cache(maxsize=2)(saved.read)
    if lora is None:
        return lambda name: read(name) if name in saved.names else None
    from qwen35_trainer.weights.adapters import DOWN, UP

    def merged(name: str) -> Tensor | None:
        layer = name.removesuffix("weight")
        if layer + DOWN not in saved.names:
            return None
        change: Tensor = read(layer + UP) @ read(layer + DOWN)
        return files.read(name).float() + lora.alpha / lora.rank * change

    return merged


def _write_adapter(saved: SavedWeights, lora: LoRA, manifest: Manifest, output: Path) -> None:
    """As the PEFT library names and stores them."""
    from safetensors.torch import save_file

    from qwen35_trainer.weights.adapters import DOWN, UP

    output.mkdir(parents=True)
    # With tied embeddings a checkpoint may hold the output layer too.
    names = sorted(name for name in saved.names if name.endswith((DOWN, UP)))
    tensors = {f"base_model.model.{name}.weight": saved.read(name) for name in names}
    save_file(tensors, output / "adapter_model.safetensors", metadata={"format": "pt"})
    layers = {name.rpartition(".")[0] for name in names}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
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
    size = sum(path.stat().st_size for path in aside.iterdir())
    sync(aside)
    aside.rename(output)  # which may be an empty folder
    sync(output.resolve().parent)
    return size

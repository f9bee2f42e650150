"""Loads the weights of an engine so that each rank gets its own shard.

random weights  built unsharded on every rank from one seed, then sharded: such models are small
a folder        built without values ─► sharded ─► each rank reads its rows from the files: no rank holds the whole model
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from qwen35_trainer.manifest import ModelSpec
from qwen35_trainer.models.qwen3_5 import HFModule, classes
from qwen35_trainer.models.qwen3_5.build_model import build
from qwen35_trainer.models.qwen3_5.checkpoint_files import CheckpointFiles, check_finite


@dataclass(frozen=True)
class Origin:
    """The source of a model: a function that builds it, and the files with the values of its weights, if there are
    any.
    """

    construct: Callable[[], HFModule]
    """Builds the model unsharded, on the CPU with its values, or on the meta device if `files` hold the values."""
    files: CheckpointFiles | None = None


def origin(model: ModelSpec, *, seed: int, vocabulary: int, max_length: int, base: Path) -> Origin:
    """Return the origin of the model that `spec.model` names. Raises CheckpointUnusable for a folder that cannot be loaded.

    seed: seed of random weights. vocabulary: number of tokens of the tokenizer. max_length: maximum length of prompt and
    response together, in tokens. base: the folder to which `source.path` is relative.
    """
    if model.source.random is not None:
        return Origin(partial(build, model, seed=seed, vocabulary=vocabulary, max_length=max_length, base=base))
    assert model.source.path is not None, "volumes are mounted to a path before the trainer starts"
    files = CheckpointFiles.open(base / model.source.path)
    return Origin(partial(_without_weights, files), files)


def _without_weights(files: CheckpointFiles) -> HFModule:
    """Build a model whose parameters are on the meta device.

    Its buffers have their values, because buffers are computed and not stored in the files.
    """
    from accelerate import init_empty_weights  # type: ignore[import-untyped]

    with init_empty_weights(include_buffers=False):
        model = classes.construct(files.config)
    model.tie_weights()
    return model


def fill(model: HFModule, files: CheckpointFiles, device: torch.device, *, offloaded: bool) -> None:
    """Load the values of `files` into a sharded model that is on the meta device. Each rank reads only its own rows.

    device: where the model will be. offloaded: whether parameters stay in host memory instead. Parameters that are not in
    the files (adapters) stay uninitialised.
    Raises CheckpointUnusable naming every tensor whose rows on this rank are not finite.
    """
    buffers = {name: buffer.to(device) for name, buffer in model.named_buffers()}
    model.to_empty(device="cpu" if offloaded else device)
    for name, buffer in buffers.items():
        owner, _, last = name.rpartition(".")
        model.get_submodule(owner)._buffers[last] = buffer
    check_finite(files.folder, _read(model, files))


def _read(model: HFModule, files: CheckpointFiles) -> Iterator[tuple[str, Tensor]]:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in files.tensors:
                local, rows = local_part(parameter)
                local.copy_(files.read(name, *rows))
                yield name, local


def local_part(parameter: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """Return the part of a parameter that this rank holds, and its slices in the whole parameter."""
    if not isinstance(parameter, DTensor):
        return parameter, ()
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    part = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
    return parameter.to_local(), part

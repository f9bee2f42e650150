"""The source of a model's weights: random values, or the files of a checkpoint folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from qwen35_trainer.manifest import ModelSpec
from qwen35_trainer.models.qwen3_5 import HFModule, classes
from qwen35_trainer.models.qwen3_5.build_model import ModelSettings, build
from qwen35_trainer.models.qwen3_5.checkpoint_files import CheckpointFiles


@dataclass(frozen=True)
class Origin:
    """The source of a model: a function that builds the model, and the files that hold its weights."""

    construct: Callable[[], HFModule]
    """A function that builds the model unsharded: on the meta device if `files` hold its values, and otherwise on
    the CPU with values."""
    files: CheckpointFiles | None = None


def origin(model: ModelSpec, *, seed: int, vocabulary: int, max_length: int, base: Path) -> Origin:
    """Return the origin of the weights that `spec.model` names. Raises CheckpointUnusable for a folder that cannot be loaded.

    seed: seed of random weights.
    vocabulary: number of tokens of the tokenizer.
    max_length: maximum length of prompt and response together, in tokens.
    base: the folder to which `source.path` is relative.
    """
    if model.source.random is not None:
        return Origin(partial(build, ModelSettings(model, seed, vocabulary, max_length, base)))
    assert model.source.path is not None, "volumes are mounted to a path before the trainer starts"
    files = CheckpointFiles.open(base / model.source.path)
    return Origin(partial(_without_weights, files), files)


def _without_weights(files: CheckpointFiles) -> HFModule:
    """Build a model whose parameters are on the meta device.

    Its buffers have values, because buffers are computed and not stored in the files.
    """
    from accelerate import init_empty_weights  # type: ignore[import-untyped]

    with init_empty_weights(include_buffers=False):
        model = classes.construct(files.config)
    model.tie_weights()
    return model

"""Build a Qwen3.5 model with random weights or from a Hugging Face folder, adapted to this trainer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qwen35_trainer.manifest import ModelSpec, RandomModelSpec, RandomVisionSpec
from qwen35_trainer.models.qwen3_5 import HFModule, classes
from qwen35_trainer.models.qwen3_5.adapter import adapt
from qwen35_trainer.models.qwen3_5.checkpoint_files import CheckpointFiles, check_finite
from qwen35_trainer.models.qwen3_5.classes import HFConfig
from qwen35_trainer.models.qwen3_5.precision import stored_in

VISION_TOKENS = {
    "vision_start_token_id": 3,
    "vision_end_token_id": 4,
    "image_token_id": 5,
    "video_token_id": 6,
}
"""Ids of the vision tokens in the character tokenizer, by the fields of a configuration that name them."""


@dataclass(frozen=True)
class ModelSettings:
    """The settings that determine the model which `build` returns."""

    model: ModelSpec
    seed: int
    """Seed of random weights. The same seed gives the same weights in every process."""
    vocabulary: int
    """Number of tokens of the tokenizer."""
    max_length: int
    """Maximum length of a prompt and its response together, in tokens."""
    base: Path
    """The folder to which `source.path` is relative."""
    precision: torch.dtype = torch.float32
    """Type of the parameters, except of those that are always float32 (`precision.py`)."""


def build(settings: ModelSettings) -> HFModule:
    """Build the model of `spec.model` on the CPU, and adapt it to this trainer.

    The result is a vision-language model if the configuration has a vision tower, and otherwise a text model. Raises
    CheckpointUnusable naming all problems of a folder.
    """
    model, precision = settings.model, settings.precision
    if model.source.random is not None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            built = classes.construct(
                _random_configuration(model.source.random, settings.vocabulary, settings.max_length)
            )
        for name, parameter in built.named_parameters():
            parameter.data = parameter.data.to(stored_in(name, precision))
        return adapt(built)
    assert model.source.path is not None, "volumes are mounted to a path before the trainer starts"
    return adapt(_from_files(CheckpointFiles.open(settings.base / model.source.path), precision))


def base_weights(settings: ModelSettings) -> Mapping[str, Tensor]:
    """Return the weights of the model that `build` builds from the same settings: name in the module → tensor.

    A weight of a folder is read each time it is looked up, so that the whole model need not be in memory. Random
    weights are all computed immediately.
    """
    path = settings.model.source.path
    if path is not None:
        return _FolderWeights(CheckpointFiles.open(settings.base / path), settings.precision)
    return {name: parameter.data for name, parameter in build(settings).named_parameters()}


class _FolderWeights(Mapping[str, Tensor]):
    """The weights of a folder, converted to the types of a model that is stored in `precision`.

    A weight is read from the files each time it is looked up.
    """

    def __init__(self, files: CheckpointFiles, precision: torch.dtype) -> None:
        self._files, self._precision = files, precision

    def __getitem__(self, name: str) -> Tensor:
        return self._files.read(name).to(stored_in(name, self._precision))

    def __iter__(self) -> Iterator[str]:
        return iter(self._files.tensors)

    def __len__(self) -> int:
        return len(self._files.tensors)


def configuration(model: ModelSpec, *, vocabulary: int, max_length: int, base: Path) -> HFConfig:
    """Return the configuration of the model of `spec.model`, without building the model.

    vocabulary: number of tokens of the tokenizer.
    max_length: maximum length of a prompt and its response together, in tokens.
    base: the folder to which `source.path` is relative.
    """
    if model.source.random is not None:
        return _random_configuration(model.source.random, vocabulary, max_length)
    assert model.source.path is not None, "volumes are mounted to a path before the trainer starts"
    return classes.read_config(base / model.source.path)


def _from_files(files: CheckpointFiles, precision: torch.dtype) -> HFModule:
    """Build a model and load its parameters from the files, without drawing random values first.

    Buffers are not in the files; they are computed.
    """
    from accelerate import init_empty_weights  # type: ignore[import-untyped]

    with init_empty_weights(include_buffers=False):
        model = classes.construct(files.config)
    weights = {name: files.read(name).to(stored_in(name, precision)) for name in files.tensors}
    check_finite(files.folder, weights.items())
    model.load_state_dict(weights, strict=False, assign=True)  # a tied layer has no entry of its own
    model.tie_weights()
    return model


def _random_configuration(shape: RandomModelSpec, vocabulary: int, max_length: int) -> HFConfig:
    import transformers

    text = {
        "vocab_size": vocabulary,
        "hidden_size": shape.hiddenSize,
        "num_hidden_layers": shape.layers,
        "full_attention_interval": shape.fullAttentionInterval,
        "num_attention_heads": shape.attentionHeads,
        "num_key_value_heads": shape.keyValueHeads,
        "head_dim": shape.headDim,
        "linear_num_key_heads": shape.linearKeyHeads,
        "linear_num_value_heads": shape.linearValueHeads,
        "linear_key_head_dim": shape.linearHeadDim,
        "linear_value_head_dim": shape.linearHeadDim,
        "initializer_range": shape.initializerRange,
        "tie_word_embeddings": shape.tieEmbeddings,
        "max_position_embeddings": max_length,
        "use_cache": False,
        **_feed_forward(shape),
    }
    family = "Qwen3_5" if shape.experts == 0 else "Qwen3_5Moe"
    if shape.vision is None:
        return getattr(transformers, f"{family}TextConfig")(**text)
    return getattr(transformers, f"{family}Config")(
        text_config=text,
        vision_config=_tower(shape.vision, shape),
        tie_word_embeddings=shape.tieEmbeddings,
        initializer_range=shape.initializerRange,
        **VISION_TOKENS,
    )


def _feed_forward(shape: RandomModelSpec) -> dict[str, Any]:
    if shape.experts == 0:
        return {"intermediate_size": shape.intermediateSize}
    return {
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.expertsPerToken,
        "moe_intermediate_size": shape.intermediateSize,
        "shared_expert_intermediate_size": shape.intermediateSize,
    }


def _tower(vision: RandomVisionSpec, shape: RandomModelSpec) -> dict[str, Any]:
    return {
        "depth": vision.depth,
        "hidden_size": vision.heads * vision.headDim,
        "intermediate_size": vision.intermediateSize,
        "num_heads": vision.heads,
        "patch_size": vision.patchSize,
        "temporal_patch_size": vision.temporalPatchSize,
        "spatial_merge_size": vision.spatialMergeSize,
        "num_position_embeddings": vision.positionGrid**2,
        "out_hidden_size": shape.hiddenSize,
        "initializer_range": shape.initializerRange,
    }

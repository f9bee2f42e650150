"""Trainings of several sizes whose planned memory is compared with what the engines hold: specs, batches and plans."""

from dataclasses import replace
from typing import Any

import numpy as np

from qwen35_trainer.catalog.model_sizes import ModelSizes
from qwen35_trainer.data.picture_arrays import PictureArrays
from qwen35_trainer.engines.train_batch import TrainBatch
from qwen35_trainer.manifest import TrainingSpec, parse_spec
from qwen35_trainer.models.qwen3_5.build_model import VISION_TOKENS
from qwen35_trainer.planning.micro_batch_size import MicroBatchSize
from qwen35_trainer.planning.tower_activations import TowerActivations
from tests.distributed.samples import batch_of_lengths, spec_of

VOCABULARY, PROMPT, RESPONSE, SAMPLES = 1000, 40, 120, 4
SHOWN = 156
"""Tokens of the picture of a sample that shows one."""
HEADS = {"attentionHeads": 4, "keyValueHeads": 2, "headDim": 32, "linearKeyHeads": 2, "linearHeadDim": 32}
SIZES: dict[str, dict[str, Any]] = {
    "small": HEADS | {"hiddenSize": 96, "intermediateSize": 192, "linearValueHeads": 4, "layers": 4},
    "larger": HEADS | {"hiddenSize": 192, "intermediateSize": 512, "linearValueHeads": 6, "layers": 8},
    "experts": HEADS
    | {
        "hiddenSize": 96,
        "intermediateSize": 64,
        "linearValueHeads": 4,
        "layers": 4,
        "experts": 8,
        "expertsPerToken": 2,
    },
    "vision": HEADS
    | {
        "hiddenSize": 96,
        "intermediateSize": 192,
        "linearValueHeads": 4,
        "layers": 4,
        "vision": {"depth": 6, "heads": 4, "headDim": 32, "intermediateSize": 256},
    },
    # The activations of its tower are half of what it holds.
    "tower": HEADS
    | {
        "hiddenSize": 32,
        "intermediateSize": 64,
        "linearValueHeads": 2,
        "layers": 4,
        "vision": {"depth": 8, "heads": 2, "headDim": 32, "intermediateSize": 160},
    },
    # The activations of their MLPs are most of what they hold, as in the published models with fused kernels.
    "wide": HEADS | {"hiddenSize": 64, "intermediateSize": 4096, "linearValueHeads": 4, "layers": 4},
    "wide experts": HEADS
    | {
        "hiddenSize": 64,
        "intermediateSize": 1024,
        "linearValueHeads": 4,
        "layers": 4,
        "experts": 4,
        "expertsPerToken": 2,
    },
}
ALLOWED = 0.1
"""Relative difference between planned and counted bytes."""


def spec(size: str, ranks: int, *, precision: str = "BF16", micro: int = 1, **train: Any) -> dict[str, Any]:
    document = spec_of(ranks, random=SIZES[size], **train)
    document["model"]["precision"] = precision
    document["data"] |= {"maxPromptTokens": PROMPT, "maxResponseTokens": RESPONSE}
    document["train"]["batch"] |= {"promptsPerUpdate": SAMPLES, "microBatchSequences": micro}
    return document


def pictured_spec(ranks: int, **train: Any) -> dict[str, Any]:
    """For `batch_of_pictures`."""
    document = spec("tower", ranks, **train)
    document["data"] |= {"maxPromptTokens": SHOWN, "maxResponseTokens": PROMPT + RESPONSE - SHOWN}
    return document


def parsed(document: dict[str, Any]) -> TrainingSpec:
    result, problems = parse_spec(document)
    assert result is not None, problems
    return result


def shape(size: str) -> ModelSizes:
    random = parsed(spec(size, 1)).model.source.random
    assert random is not None
    return ModelSizes.of_random(random, VOCABULARY)


def batch_of_pictures() -> TrainBatch:
    """Samples of the maximum length that consist of one picture and a short response."""
    tower = shape("tower").vision
    assert tower is not None
    rows = 8
    grid = np.array([[1, rows, SHOWN * tower.merged_patches // rows]])
    patches = np.ones((int(grid.prod()), tower.patch_values), np.float32)
    shown = PictureArrays(patches, grid, np.empty((0, 0), np.float32), np.empty((0, 3), np.int64))
    text = batch_of_lengths([(SHOWN, PROMPT + RESPONSE - SHOWN)] * SAMPLES)
    return replace(
        text,
        responses=np.maximum(text.responses, max(VISION_TOKENS.values()) + 1),
        prompts=np.full(SAMPLES * SHOWN, VISION_TOKENS["image_token_id"], np.int32),
        pictures=(shown,) * SAMPLES,
    )


def batch() -> TrainBatch:
    """Every sample has the maximum length, which the plan assumes."""
    return batch_of_lengths([(PROMPT, RESPONSE)] * SAMPLES)


def of_tower(sizes: ModelSizes, spec: TrainingSpec) -> float:
    """Planned bytes of the tower's activations."""
    tower = TowerActivations.of(sizes, spec, MicroBatchSize.of(spec), pictures=True)
    return tower.kept + tower.computed


def assert_within(planned: float, counted: float) -> None:
    assert abs(planned / counted - 1) <= ALLOWED, (
        f"planned {planned:,.0f}, counted {counted:,.0f}: {planned / counted - 1:+.1%}"
    )

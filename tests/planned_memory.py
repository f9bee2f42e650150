"""Trainings of several sizes whose planned memory is compared with what the engines hold: specs, batches and plans."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from qwen35_trainer.catalog.model_sizes import ModelSizes
from qwen35_trainer.data.picture_arrays import PictureArrays
from qwen35_trainer.engines.train_batch import TrainBatch
from qwen35_trainer.manifest import TrainingSpec, parse_spec
from qwen35_trainer.models.qwen3_5.build_model import VISION_TOKENS
from qwen35_trainer.planning.micro_batch_size import MicroBatchSize
from qwen35_trainer.planning.tower_activations import TowerActivations
from tests.distributed.samples import batch_of_lengths, policy_spec_of, spec_of

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
    "larger experts": HEADS
    | {
        "hiddenSize": 128,
        "intermediateSize": 96,
        "linearValueHeads": 4,
        "layers": 8,
        "experts": 16,
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
OTHER = {"small": "larger", "larger": "small", "experts": "larger experts"}
ALLOWED = 0.1
"""Relative difference between planned and counted bytes."""


def cases(table: Mapping[str, tuple[str, int, dict[str, Any]]], seldom: Collection[str] = ()) -> Iterator[Any]:
    """Each case (size, ranks, options of `spec`), and in `make soak` the same with another size.

    seldom: cases that run in `make soak` only.
    """
    for name, (size, ranks, train) in table.items():
        yield pytest.param(size, ranks, train, id=name, marks=[pytest.mark.soak] if name in seldom else [])
        if size in OTHER:
            yield pytest.param(OTHER[size], ranks, train, id=f"{name}: {OTHER[size]}", marks=pytest.mark.soak)


def spec(
    size: str, ranks: int, *, precision: str = "BF16", micro: int = 1, reference: bool = False, **train: Any
) -> dict[str, Any]:
    """reference: whether it is a policy's training with a reference model, for `policy_batch`."""
    if reference:
        document = policy_spec_of(ranks, "Loss", random=SIZES[size], **train)
        document["algorithm"]["groupSize"] = SAMPLES
    else:
        document = spec_of(ranks, random=SIZES[size], **train)
    document["model"]["precision"] = precision
    document["data"] |= {"maxPromptTokens": PROMPT, "maxResponseTokens": RESPONSE}
    prompts = 1 if reference else SAMPLES
    document["train"]["batch"] |= {"promptsPerUpdate": prompts, "microBatchSequences": micro}
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


def batch_for(document: dict[str, Any]) -> TrainBatch:
    """A batch for what `spec` has returned."""
    return policy_batch() if "algorithm" in document else batch()


def policy_batch() -> TrainBatch:
    """The samples of one group, as long as those of `batch`."""
    random, text = np.random.default_rng(0), batch()
    return replace(
        text,
        log_probs=random.normal(-3.0, 0.3, SAMPLES * RESPONSE).astype(np.float32),
        rewards=random.normal(size=SAMPLES).astype(np.float32),
        group=np.zeros(SAMPLES, np.int64),
    )


def of_tower(sizes: ModelSizes, spec: TrainingSpec) -> float:
    """Planned bytes of the tower's activations."""
    tower = TowerActivations.of(sizes, spec, MicroBatchSize.of(spec), pictures=True)
    return tower.kept + tower.computed


def assert_within(planned: float, counted: float) -> None:
    assert abs(planned / counted - 1) <= ALLOWED, (
        f"planned {planned:,.0f}, counted {counted:,.0f}: {planned / counted - 1:+.1%}"
    )

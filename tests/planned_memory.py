"""Trainings of two sizes whose planned memory is compared with what the engines hold: specs, batches and plans."""

from typing import Any

from qwen35_trainer.catalog.model_sizes import ModelSizes
from qwen35_trainer.engines.train_batch import TrainBatch
from qwen35_trainer.manifest import TrainingSpec, parse_spec
from tests.distributed.samples import batch_of_lengths, spec_of

VOCABULARY, PROMPT, RESPONSE, SAMPLES = 1000, 40, 120, 4
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


def parsed(document: dict[str, Any]) -> TrainingSpec:
    result, problems = parse_spec(document)
    assert result is not None, problems
    return result


def shape(size: str) -> ModelSizes:
    random = parsed(spec(size, 1)).model.source.random
    assert random is not None
    return ModelSizes.of_random(random, VOCABULARY)


def batch() -> TrainBatch:
    """Every sample has the maximum length, which the plan assumes."""
    return batch_of_lengths([(PROMPT, RESPONSE)] * SAMPLES)


def assert_within(planned: float, counted: float) -> None:
    assert abs(planned / counted - 1) <= ALLOWED, (
        f"planned {planned:,.0f}, counted {counted:,.0f}: {planned / counted - 1:+.1%}"
    )

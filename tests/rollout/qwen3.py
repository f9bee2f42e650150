"""Tiny mixtures of experts of Qwen3 whose sizes vLLM's kernels have."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from qwen35_trainer.models.qwen3_5 import classes
from tests.models import qwen3_moe
from tests.rollout.test_vllm import MAX_LENGTH, VOCABULARY

SIZES = {
    "head_dim": 32,
    "hidden_size": 64,
    "initializer_range": 0.1,
    "max_position_embeddings": MAX_LENGTH,
    "moe_intermediate_size": 64,
    "vocab_size": VOCABULARY,
}


def qwen3_models(folder: Path, seeds: Sequence[int], **fields: Any) -> dict[int, Any]:
    """Float32 models of the library by seed, in evaluation mode. The folder is written with the weights of the first seed.

    fields: other values in config.json.
    """
    models = {seeds[0]: qwen3_moe.write(folder, **SIZES | fields)}
    for seed in seeds[1:]:
        torch.manual_seed(seed)
        models[seed] = classes.construct(classes.read_config(folder)).eval()
        for parameter in models[seed].parameters():
            if parameter.dim() == 1:  # as in the folder
                parameter.data.uniform_(0.5, 1.5)
    return models

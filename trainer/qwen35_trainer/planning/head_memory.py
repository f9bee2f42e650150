"""Bytes of the output layer's logits: those of a bounded number of rows exist at a time."""

from __future__ import annotations

from typing import Final

from qwen35_trainer.planning.activations import Kernels

CHUNK_LOGITS: Final = 2**27
"""Maximum number of logits at a time: `models/qwen3_5/head.py`."""


def fsdp(vocabulary: int, hidden: int, scored: float, width: int, kernels: Kernels) -> float:
    """Return the bytes during the backward pass of the FSDP engine's head: logits, their gradient, and that of the weight.

    scored: number of rows of the micro-batch. width: bytes of a number in the model's precision. Without fused kernels
    the log-probabilities and the probabilities are float32 tables in addition to the gradient (`head_passes.py`); the kernels
    overwrite the product (`head_kernels.py`). The weight's gradient is summed in float32 over several chunks.
    """
    rows = min(scored, CHUNK_LOGITS // vocabulary)
    one_chunk = scored <= CHUNK_LOGITS // vocabulary
    logits = rows * vocabulary * (8 + width if kernels == "Torch" else 2 * width)
    return logits + vocabulary * hidden * (width if one_chunk else 4 + width)


def megatron(vocabulary: int, tensor: int, scored: float) -> float:
    """Return the bytes of the Megatron engine's head on the last stage (`vocabulary_parallel.py`): six float32 tables.

    Two are kept for the backward pass, in which four gradients exist, too.
    """
    part = -(-vocabulary // tensor)
    return min(scored, CHUNK_LOGITS // part) * part * 24

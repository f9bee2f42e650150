"""Bytes of logits and gradients during the backward pass of the output layer (the head).

A micro-batch has one row of logits for each response token. Engines compute the logits of a chunk of rows at a time.
"""

from __future__ import annotations

from typing import Final

from qwen35_trainer.planning.activations import Kernels

CHUNK_LOGITS: Final = 2**27
"""Maximum number of logits in a chunk, as in `models/qwen3_5/head.py`."""


def fsdp(vocabulary: int, hidden: int, scored: float, width: int, kernels: Kernels) -> float:
    """Return the bytes that exist during the backward pass of the FSDP engine's head, in addition to the hidden states.

        kernels   bytes for each logit of a chunk
        Torch     4 + 4 + width: log-probabilities and probabilities in float32 (`head_passes.py`), and the gradient of the logits
        Fused     width + width: the last chunk, which the forward pass keeps and autograd frees only after the backward pass, and a
                  chunk that is computed again; the kernels overwrite a chunk by its gradient (`head_kernels.py`)

    The gradient of the weight (vocabulary × hidden) has `width` bytes per number, and 4 more for a
    float32 sum if there are several chunks.

    With one chunk, Fused computes no chunk again and needs only half of the bytes above for logits, so the result is too
    high. With several chunks, the result is too low, because two tensors are not counted: the kept chunk of Torch, and
    the gradient of the previous chunk, which exists until the next gradient replaces it.

    scored: number of rows of the micro-batch. width: bytes of a number in the model's precision.
    """
    rows = min(scored, CHUNK_LOGITS // vocabulary)
    one_chunk = scored <= CHUNK_LOGITS // vocabulary
    logits = rows * vocabulary * (8 + width if kernels == "Torch" else 2 * width)
    return logits + vocabulary * hidden * (width if one_chunk else 4 + width)


def megatron(vocabulary: int, tensor: int, scored: float) -> float:
    """Return the bytes of logits and gradients during the backward pass of the Megatron engine's head,
    which is on the last pipeline stage.

    tensor: number of tensor-parallel ranks, which divide the vocabulary. scored: number of rows of the micro-batch.
    A chunk has six float32 tensors of the size of its logits: autograd saves two (`vocabulary_parallel.py`), and
    the backward pass has four gradients.
    """
    part = -(-vocabulary // tensor)
    return min(scored, CHUNK_LOGITS // part) * part * 24

"""Bytes of logits and gradients during the backward pass of the output layer (the head).

A micro-batch has one row of logits for each response token. Engines compute the logits of a chunk of rows at a time.
"""

from __future__ import annotations

from typing import Final

from qwen35_trainer.planning.activations import Kernels

CHUNK_LOGITS: Final = 2**27
"""Maximum number of logits in a chunk, as in `models/qwen3_5/head.py`."""


def fsdp(
    vocabulary: int,
    hidden: int,
    scored: float,
    width: int,
    kernels: Kernels,
    *,
    float32_logits: bool = False,
    weight_trains: bool = True,
) -> float:
    """Return the bytes that exist during the backward pass of the FSDP engine's head, in addition to the hidden states.

        tensors of a chunk    bytes for each logit
        computed              Torch: 4 + 4, log-probabilities and probabilities in float32 (`head_passes.py`), and a copy of the gradient
                              with `width` bytes. Fused: `logit`, which the kernels overwrite by the gradient (`head_kernels.py`), and such
                              a copy. There is no copy if the gradient has `width` bytes already
        kept                  Torch: 4, Fused: `logit`. The last chunk, which the forward pass keeps and autograd frees only after
                              the backward pass; the only chunk is kept and computed at the same time
        previous gradient     `width`, until the next gradient replaces it

    The gradient of the weight (vocabulary × hidden), if the weight trains, has `width` bytes per number. If there are several
    chunks, it is a float32 sum, which is rounded to a copy at the end if `width` is 2.

    With two chunks and Fused the result is too high, because the kept chunk is the previous gradient.

    scored: number of rows of the micro-batch. width: bytes of a number in the model's precision. float32_logits: whether
    a logit has 4 bytes (train.headPrecision); otherwise it has `width` bytes. weight_trains: whether the weight has a gradient.
    """
    logit = 4 if float32_logits else width
    kept, of_gradient = (4, 4) if kernels == "Torch" else (logit, logit)
    computed = (8 if kernels == "Torch" else logit) + (0 if of_gradient == width else width)
    rows, weight = CHUNK_LOGITS // vocabulary, vocabulary * hidden if weight_trains else 0
    if scored <= rows:
        return scored * vocabulary * computed + weight * width
    logits = rows * vocabulary
    in_a_chunk = logits * (kept + width + computed) + weight * 4
    at_the_end = logits * (kept + width) + weight * (4 if width == 4 else 4 + width)
    return max(in_a_chunk, at_the_end)


def megatron(vocabulary: int, hidden: int, tensor: int, scored: float, width: int) -> float:
    """Return the bytes that exist during the backward pass of the Megatron engine's head (`vocabulary_parallel.py`), in
    addition to the hidden states. The head is on the last pipeline stage.

    A chunk has two float32 tensors of the size of its logits, whether logits are rounded or not: log-probabilities and
    probabilities. The gradient of the rank's part of the weight has `width` bytes per number. If there are several chunks,
    it is a float32 sum, which is rounded to a copy at the end if `width` is 2.

    tensor: number of tensor-parallel ranks, which divide the vocabulary. scored: number of rows of the micro-batch. width:
    bytes of a number in the model's precision.
    """
    part = -(-vocabulary // tensor)
    rows, weight = CHUNK_LOGITS // part, part * hidden
    if scored <= rows:
        return scored * part * 8 + weight * width
    return max(rows * part * 8 + weight * 4, weight * (4 if width == 4 else 4 + width))

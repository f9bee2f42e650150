"""The passes of `head_passes.py` in Triton. Each reads the product (a chunk's logits) once, in its precision, without a copy.

    reduce     a program for each row: one sweep over the vocabulary with a running maximum (online softmax,
               https://arxiv.org/abs/1805.02867), and for the entropy the running mean of how far logits lie below it
    gradient   a program for each block of a row: overwrites the logits by their gradient

For each 16-bit logit this moves 6 bytes where torch's operations move 30, and with entropies 80; the products are computed
by the vendor's library. Tested with Triton's interpreter, and compiled for NVIDIA's architectures; nothing in this file has
run on hardware.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Number of tokens of the vocabulary that a Triton program processes together."""
WARPS_PER_PROGRAM = 8
LOWEST_LOGIT = tl.constexpr(-1e30)
"""A number below every logit. It is finite, so that the difference of two such numbers is 0 and not NaN."""


def prepare(product: Tensor, temperature: float) -> Tensor:
    """Return the product unchanged: the kernels divide by the temperature when they read it."""
    return product


def reduce(
    prepared: Tensor, targets: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute the results of `head_passes.reduce` with Triton kernels, from the product (R, V)."""
    rows, vocabulary = prepared.shape
    log_probs, logsumexp, entropy = torch.empty(3, rows, dtype=torch.float32, device=prepared.device)
    with torch.cuda.device_of(prepared):
        _reduce[(rows,)](
            prepared,
            targets,
            log_probs,
            logsumexp,
            entropy,
            vocabulary,
            1 / temperature,
            with_entropy,
            BLOCK,
            num_warps=WARPS_PER_PROGRAM,
        )
    return log_probs, logsumexp, entropy if with_entropy else None


def gradient(
    prepared: Tensor,
    targets: Tensor,
    logsumexp: Tensor,
    entropy: Tensor | None,
    by_log_prob: Tensor,
    by_entropy: Tensor | None,
    temperature: float,
) -> Tensor:
    """Compute `head_passes.gradient` with Triton kernels. The result overwrites the product (R, V) and has its precision."""
    rows, vocabulary = prepared.shape
    with torch.cuda.device_of(prepared):
        _gradient[(rows, triton.cdiv(vocabulary, BLOCK))](
            prepared,
            targets,
            logsumexp,
            logsumexp if entropy is None else entropy,
            by_log_prob,
            by_log_prob if by_entropy is None else by_entropy,
            vocabulary,
            1 / temperature,
            entropy is not None,
            BLOCK,
            num_warps=WARPS_PER_PROGRAM,
        )
    return prepared


@triton.jit
def _scaled(logits, at, vocabulary, inverse_temperature):
    """Load logits of a row divided by the temperature, in float32."""
    return tl.load(logits + at, mask=at < vocabulary, other=LOWEST_LOGIT).to(tl.float32) * inverse_temperature


@triton.jit
def _reduce(
    logits,
    targets,
    log_probs,
    logsumexp,
    entropies,
    vocabulary,
    inverse_temperature,
    WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocabulary
    maximum = LOWEST_LOGIT
    total = 0.0
    below = 0.0
    for start in range(0, vocabulary, BLOCK):
        at = start + tl.arange(0, BLOCK)
        logit = _scaled(logits, at, vocabulary, inverse_temperature)
        highest = tl.maximum(maximum, tl.max(logit, 0))
        scale = tl.exp(maximum - highest)
        weight = tl.exp(logit - highest)
        if WITH_ENTROPY:
            # Relative to a higher maximum, all previous logits are lower by the difference.
            below = scale * (below + total * (maximum - highest)) + tl.sum(weight * (logit - highest), 0)
        total = scale * total + tl.sum(weight, 0)
        maximum = highest
    log_total = maximum + tl.log(total)
    target = _scaled(logits, tl.load(targets + row), vocabulary, inverse_temperature)
    tl.store(log_probs + row, target - log_total)
    tl.store(logsumexp + row, log_total)
    if WITH_ENTROPY:
        tl.store(entropies + row, tl.log(total) - below / total)


@triton.jit
def _gradient(
    logits,
    targets,
    logsumexp,
    entropies,
    by_log_prob,
    by_entropy,
    vocabulary,
    inverse_temperature,
    WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocabulary
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    logit = _scaled(logits, at, vocabulary, inverse_temperature)
    log_prob = logit - tl.load(logsumexp + row)
    upstream = tl.load(by_log_prob + row)
    slope = upstream
    if WITH_ENTROPY:
        slope += tl.load(by_entropy + row) * (log_prob + tl.load(entropies + row))
    of_logit = tl.where(at == tl.load(targets + row), upstream, 0.0) - tl.exp(log_prob) * slope
    of_product = of_logit * inverse_temperature
    tl.store(logits + at, of_product.to(logits.dtype.element_ty), mask=at < vocabulary)

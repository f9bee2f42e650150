"""The passes of `head_passes.py` as Triton kernels, which read each logit once, in its precision, without a copy.

    reduce     One program per row sweeps once over the vocabulary (online softmax, https://arxiv.org/abs/1805.02867).
               It keeps the maximum logit so far, and the sum of exp(logit - maximum). For the entropy, it also keeps
               the sum of exp(logit - maximum) · (logit - maximum), and at the end divides this sum by the first sum.
    gradient   One program per block of a row overwrites the logits with their gradient.

For each 16-bit logit, the kernels move 6 bytes to and from memory: `reduce` reads it, `gradient` reads and writes it.
Torch's operations move 30 bytes without entropies, and 80 bytes with entropies. The kernels were tested in Triton's
interpreter and compiled for NVIDIA's architectures; they have not run on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Number of tokens of the vocabulary that a Triton program processes in one step."""
WARPS_PER_PROGRAM = 8
LOWEST_LOGIT = tl.constexpr(-1e30)
"""A number below every logit. It is finite, so that subtracting it from itself gives 0 and not NaN."""


def prepare(product: Tensor, temperature: float) -> Tensor:
    """Return the logits unchanged: the kernels divide by the temperature when they read a logit."""
    return product


def reduce(
    prepared: Tensor, targets: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return three (rows,) float32 tensors: log-probs of the targets, the logsumexp of each row, and entropies.

    prepared: logits (rows, vocabulary), not yet divided by the temperature. All results are those of the divided logits.
    The entropies are None if `with_entropy` is false.
    """
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
    """Return the gradient of the loss with respect to the logits. It overwrites `prepared` in place.

    prepared: logits (rows, vocabulary), not yet divided by the temperature.
    logsumexp, entropy: results of `reduce`.
    by_log_prob, by_entropy: (rows,) gradients of the loss with respect to log-probs and entropies. by_entropy is None
      if entropies were not computed.
    """
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
    """Load logits of a row, and return them divided by the temperature, in float32."""
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

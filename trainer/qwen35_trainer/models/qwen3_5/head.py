"""Log-probabilities of chosen tokens, and entropies, without the logits of all rows in memory.

With a vocabulary of 248,000 tokens, the float32 logits of 4,096 rows are 4 GB, and a plain softmax with its gradient
holds several copies of them. Here the logits of one *chunk* of rows at a time are computed, reduced to two numbers per
row and dropped. The backward pass computes the logits again, which costs a fourth matrix product in addition to three.
Only the last chunk's logits are kept. This does not raise peak memory, because the backward pass begins with the last
chunk. A micro-batch of one chunk therefore has no extra cost.

Logits are in the weight's precision, or in float32 (`float32_logits`): rounded to bfloat16, a logit of 10 nats has an
error of up to 1/32, and so do log-probs. Gradients of logits are rounded to the weight's precision, like all gradients.
The sum of the weight's gradient over chunks is in float32.

    hidden ─product─► logits of a chunk ─pass─► two numbers per row ─ … ─► gradient of the logits ─two products─► gradients
                            └─ under truncated sampling, the logits of tokens that could not be drawn are removed in place

The matrix products are computed by the vendor's library, which reaches the hardware's limit at these shapes (hundreds
of rows, thousands of channels, the whole vocabulary). The passes over the logits are Triton kernels on a GPU
(`head_kernels.py`), and torch's operations elsewhere (`head_passes.py`).
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from qwen35_trainer.models.qwen3_5 import Context, head_passes, products
from qwen35_trainer.models.qwen3_5.kept_logits import KeptLogits

CHUNK_LOGITS = 2**27
"""Maximum number of logits in memory at a time (512 MiB in float32): those of 540 rows with the vocabulary of
published models. Matrix products of this size are efficient, and there are few chunks whose gradients must be added to
that of the weight."""

HAS_TRITON = find_spec("triton") is not None


class TokenScores(NamedTuple):
    """Scores of R tokens.

    This is a tuple, because FSDP2 looks for tensors in the result of a forward pass, and finds them inside tuples.
    """

    log_probs: Tensor
    """(R,) float32: log-probability of each token, in nats."""
    entropy: Tensor | None
    """(R,) float32: entropy of the distribution of each token, in nats. None: not computed."""
    router_losses: Tensor | None = None
    """(2,) float32: load-balancing loss and z-loss of the routers (`router.losses`), summed over layers.

    None: not computed.
    """


def token_scores(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    with_entropy: bool = False,
    chunk: int | None = None,
    *,
    float32_logits: bool = False,
    kept: KeptLogits | None = None,
) -> TokenScores:
    """Compute the scores of `targets` under softmax(hidden · weightᵀ / temperature).

    hidden: (R, D), R rows of D channels.
    weight: (V, D), the whole output layer, one row for each of the V tokens of the vocabulary. Under FSDP, call this
      function where the weight is unsharded.
    targets: (R,) int64.
    chunk: number of rows per chunk; None: as many as `CHUNK_LOGITS` allows.
    float32_logits: whether logits are in float32; otherwise they have the weight's precision.
    kept: the tokens over which each row's softmax is taken, including the row's target; None: the whole vocabulary.
      Log-probs, entropies and gradients are those of the distribution over these tokens.

    After the product, everything is computed in float32. The weight's gradient is summed over chunks in float32 and
    rounded once. The backward pass overwrites the logits of the last chunk, so it can run only once.
    """
    if temperature <= 0:
        raise ValueError(f"temperature {temperature}: it must be above 0")
    rows = chunk or max(1, CHUNK_LOGITS // weight.shape[0])
    log_probs, entropy = _Scores.apply(  # type: ignore[no-untyped-call]
        hidden.to(weight.dtype), weight, targets.contiguous(), temperature, with_entropy, rows, float32_logits, kept
    )
    return TokenScores(log_probs, entropy if with_entropy else None)


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        with_entropy: bool,
        chunk: int,
        float32_logits: bool,
        kept: KeptLogits | None,
    ) -> tuple[Tensor, Tensor]:
        passes = _passes(hidden)
        log_probs, logsumexp, entropy = (hidden.new_zeros(len(targets), dtype=torch.float32) for _ in range(3))
        prepared = None
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            prepared = None  # frees the previous chunk first
            prepared = passes.prepare(_logits(hidden, weight, part, float32_logits, kept), temperature)
            log_probs[part], logsumexp[part], of_chunk = passes.reduce(
                prepared, targets[part], temperature, with_entropy
            )
            if of_chunk is not None:
                entropy[part] = of_chunk
        ctx.save_for_backward(hidden, weight, targets, logsumexp, entropy, prepared)
        ctx.settings = temperature, with_entropy, chunk, float32_logits, kept
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, logsumexp, entropy, prepared = ctx.saved_tensors
        temperature, with_entropy, chunk, float32_logits, kept = ctx.settings
        by_log_prob, by_entropy = (gradient.contiguous() for gradient in gradients)
        passes = _passes(hidden)
        of_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        # The gradient of a single chunk is rounded once anyway, and a float32 copy of the weight is large.
        of_weight_type = weight.dtype if len(targets) <= chunk else torch.float32
        of_weight = torch.zeros_like(weight, dtype=of_weight_type) if ctx.needs_input_grad[1] else None
        for start in reversed(range(0, len(targets), chunk)):
            part = slice(start, start + chunk)
            if prepared is None:
                prepared = passes.prepare(_logits(hidden, weight, part, float32_logits, kept), temperature)
            of_product = passes.gradient(
                prepared,
                targets[part],
                logsumexp[part],
                entropy[part] if with_entropy else None,
                by_log_prob[part],
                by_entropy[part] if with_entropy else None,
                temperature,
            ).to(weight.dtype)
            prepared = None
            if of_hidden is not None:
                of_hidden[part] = of_product @ weight
            if of_weight is not None and of_weight.dtype == weight.dtype:
                of_weight.addmm_(of_product.T, hidden[part])
            elif of_weight is not None:
                products.add_outer(of_weight, of_product, hidden[part])
        of_weight = None if of_weight is None else of_weight.to(weight.dtype)
        return of_hidden, of_weight, None, None, None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, part: slice, float32_logits: bool, kept: KeptLogits | None) -> Tensor:
    """Return the logits of the rows in `part`. Those of tokens that `kept` excludes are
    overwritten by REMOVED_LOGIT.
    """
    rows = hidden[part]
    logits = products.rows_times(rows, weight) if float32_logits else rows @ weight.T
    if kept is not None:
        kept.remove_others(logits, part)
    return logits


class _Passes(Protocol):
    """The passes over a chunk's logits. `head_passes.py` documents them."""

    def prepare(self, product: Tensor, temperature: float) -> Tensor: ...

    def reduce(
        self, prepared: Tensor, targets: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]: ...

    def gradient(
        self,
        prepared: Tensor,
        targets: Tensor,
        logsumexp: Tensor,
        entropy: Tensor | None,
        by_log_prob: Tensor,
        by_entropy: Tensor | None,
        temperature: float,
    ) -> Tensor: ...


def _passes(x: Tensor) -> _Passes:
    """Return Triton's passes for a tensor on a GPU, and torch's elsewhere."""
    if x.device.type == "cuda" and HAS_TRITON:
        from qwen35_trainer.models.qwen3_5 import head_kernels

        return head_kernels
    return head_passes

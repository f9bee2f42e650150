"""Whether this model, with the kernels that are installed here, keeps the sequences of a packed row apart.

Gated DeltaNet layers carry a state, and their convolution a few tokens, from left to right through a row. A kernel
that is not told the boundaries, or ignores them, lets one sequence change the next without any error: positions are
right, and the loss looks normal.

    row       a a a B B B … B c D … D e e e …      scored: B and D
    changed   x x x B B B … B y D … D z z z …      neighbours are other tokens: B and D must not notice
    separate  B | D | …                            and must be what they are side by side

The second row is the sharp test: both have the same shapes and run the same kernels, so that rounding is the same too,
and whatever changes has leaked. Against the third, other kernels round differently, which sixteen-bit precision
amplifies from layer to layer: there the comparison finds what is wrong, not what is inexact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from qwen35_trainer.models.qwen3_5 import HFModule
from qwen35_trainer.models.qwen3_5.family import text_config, text_model
from qwen35_trainer.models.qwen3_5.inputs import ModelInput

LENGTHS = (3, 70, 1, 17, 9)
"""Of the sequences a, B, c, D, e. Most tokens stand near a boundary, where a leak is largest; B is longer than the 64
positions of a kernel's chunk, c shorter than the convolution."""


@dataclass(frozen=True)
class Difference:
    """Between two passes over the same sequences, each relative to the size of what is compared."""

    log_prob: float
    """Root mean square over tokens, by their standard deviation."""
    gradient: float
    """Norm of the difference of all parameters' gradients, by the norm of the gradient."""

    def within(self, allowed: Difference) -> bool:
        """False for NaN."""
        return self.log_prob <= allowed.log_prob and self.gradient <= allowed.gradient


CHANGED = Difference(1e-3, 2e-2)
"""Measured without a leak: 0 and 0. With one in the convolution or the state alone: at least 3e-3, mostly 0.1 to 1.
The gradient's bound leaves room for kernels that add in no fixed order."""
SEPARATE = {torch.float32: Difference(1e-3, 1e-2), torch.bfloat16: Difference(0.5, float("inf"))}
"""Measured without a leak: 1e-5 in float32; in bfloat16 up to 0.5 for large random weights, and any gradient."""


class PackingInexact(RuntimeError):
    """Packed sequences would not train as separate ones do."""


def check_packing(model: HFModule) -> None:
    """Score and differentiate a hundred random tokens, packed and side by side. Raises PackingInexact.

    Call it once after loading, on all ranks and before any gradient: gradients are left at None. The model must be
    adapted; it may be sharded, and with a sequence group it must be, over that group too: gradients are compared after
    their reduction, before it each process has the part of its own tokens.  The precision that decides what is allowed
    is the one that the layers compute in.
    """
    vocabulary = text_config(model).vocab_size
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(vocabulary, (length,), generator=generator) for length in LENGTHS]
    # Other tokens than before: 1 … vocabulary - 1 further.
    neighbours = [
        (s + torch.randint(1, vocabulary, s.shape, generator=generator)) % vocabulary if _neighbour(i) else s
        for i, s in enumerate(sequences)
    ]
    targets = torch.cat(sequences).flip(0)
    row = _pass(model, sequences, targets, packed=True)
    changed = _difference(_pass(model, neighbours, targets, packed=True), row, ~_of_neighbours())
    separate = _difference(
        row, _pass(model, sequences, targets, packed=False), torch.ones(len(targets), dtype=torch.bool)
    )
    allowed = SEPARATE.get(row.precision, SEPARATE[torch.bfloat16])
    problems = [
        f"{what}: log-probs differ by {found.log_prob:.2g} of their spread (allowed {limit.log_prob:g}), gradients by "
        f"{found.gradient:.2g} of their norm (allowed {limit.gradient:g})"
        for what, found, limit in (
            ("with other neighbours in the row", changed, CHANGED),
            (f"from separate sequences, in {row.precision}", separate, allowed),
        )
        if not found.within(limit)
    ]
    if problems:
        raise PackingInexact(
            f"a packed row is not exact here, {'; '.join(problems)}. A kernel ignores the boundaries of sequences: set "
            "train.batch.removePadding to false, or remove or update flash-linear-attention"
        )


@dataclass(frozen=True)
class _Pass:
    log_probs: Tensor
    """(tokens,) of all sequences."""
    gradients: list[Tensor]
    """This rank's part, by the log-probs of B and D."""
    precision: torch.dtype
    """Of the layers."""


def _neighbour(i: int) -> bool:
    return i % 2 == 0


def _of_neighbours() -> Tensor:
    return torch.cat([torch.full((length,), _neighbour(i)) for i, length in enumerate(LENGTHS)])


def _pass(model: HFModule, sequences: list[Tensor], targets: Tensor, *, packed: bool) -> _Pass:
    device = text_model(model).rotary_emb.inv_freq.device  # a buffer: parameters may be parked on the host
    inputs = ModelInput.of_text(sequences, packed=packed, device=device)
    width = 0 if packed else inputs.tokens.shape[1]
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).tolist() if packed else [i * width for i in range(len(LENGTHS))]
    rows = torch.cat([torch.arange(start, start + n) for start, n in zip(starts, LENGTHS, strict=False)])
    seen: list[torch.dtype] = []
    hook = text_model(model).layers[0].register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].dtype))
    log_probs = model(inputs, rows.to(device), targets.to(device)).log_probs
    hook.remove()
    # Weights of both signs: under equal ones the differences of neighbouring tokens could cancel.
    weights = torch.linspace(-1, 1, len(rows)).masked_fill(_of_neighbours(), 0.0)
    (log_probs * weights.to(device)).sum().backward()
    gradients = [_local(p.grad) for p in model.parameters() if p.grad is not None]
    for parameter in model.parameters():
        parameter.grad = None
    return _Pass(log_probs.detach(), gradients, seen[0])


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _difference(one: _Pass, other: _Pass, tokens: Tensor) -> Difference:
    tokens = tokens.to(other.log_probs.device)
    own, expected = one.log_probs[tokens].double(), other.log_probs[tokens].double()
    squares = torch.zeros(2, 2, dtype=torch.float64, device=expected.device)  # of log-probs, gradients: distance, size
    squares[0] = torch.stack(((own - expected).square().sum(), (expected - expected.mean()).square().sum()))
    for gradient, reference in zip(one.gradients, other.gradients, strict=True):
        squares[1, 0] += (gradient - reference).double().square().sum()
        squares[1, 1] += reference.double().square().sum()
    # Each rank has a part of the parameters, and all must come to the same decision.
    if dist.is_initialized():
        dist.all_reduce(squares)
    log_prob, gradient_norm = (distance / (size or 1.0) for distance, size in squares.sqrt().tolist())
    return Difference(log_prob, gradient_norm)

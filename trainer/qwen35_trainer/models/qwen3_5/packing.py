"""Check that this model, with the installed kernels, keeps the sequences of a packed row independent.

A Gated DeltaNet layer carries a state from left to right through a row, and its convolution reads a few earlier tokens.
If a kernel does not get the boundaries of sequences, or ignores them, one sequence changes the next without an error:
positions are right, and the loss looks normal. The vision tower reads the patches of all pictures of a row as one row,
so in a training with pictures it must keep the pictures apart in the same way.

    first pass    a a a B B B … B c D … D e e e …   a packed row, in which the sequences B and D are scored
    second pass   x x x B B B … B y D … D z z z …   B and D have other neighbours: their scores must not change
    third pass    a | B | c | D | e                 separate padded sequences: the scores must be nearly equal
    pictures      B, D and e have one picture each; the second pass changes the picture of e, too

With shared prompts (`shared_prompts.py`), the same is done with a row in which B, D and e begin with one prompt:

    shared        a a a p p B B … c D … e e e …     first pass; B, D and e begin with p
    siblings      x x x p p B B … y D … z z z …     second pass: B and D have other neighbours, one of them a continuation of p
    copies        a a a p p B B … c p p D … p p e … third pass: a packed row in which each of them has its own p

The second pass is the precise test: both rows have the same shapes and run the same kernels, so that rounding is the
same, and every difference is a leak. The third pass runs other kernels, which round differently, and 16-bit precision
amplifies the difference from layer to layer. The third pass only detects results that are clearly wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from qwen35_trainer.data.picture_arrays import PictureArrays
from qwen35_trainer.failure_reasons import FailureReason
from qwen35_trainer.models.qwen3_5 import HFModule
from qwen35_trainer.models.qwen3_5.family import text_config, text_model
from qwen35_trainer.models.qwen3_5.inputs import ModelInput
from qwen35_trainer.models.qwen3_5.multimodal import multimodal_input
from qwen35_trainer.models.qwen3_5.shared_prompts import SharedPrompts

SEQUENCE_LENGTHS = (3, 70, 1, 17, 9)
"""Lengths of the five test sequences a, B, c, D and e, in tokens. Most tokens are near a boundary, where a leak is
largest. B is longer than the 64 positions of a kernel's chunk, and c is shorter than the width of the convolution."""
SHARED_PROMPT = 5
"""Number of tokens of the prompt with which the sequences B, D and e begin in the check of shared prompts. It includes the
placeholders of a picture."""
PROMPT_LENGTHS, LEADERS = (3, SHARED_PROMPT, 1, SHARED_PROMPT, SHARED_PROMPT), (0, 1, 2, 1, 1)
"""Lengths of the test sequences' prompts in the check of shared prompts, and for each sequence the first one with the same
prompt."""
PLACEHOLDERS = range(2, 4)
"""Positions of a picture's placeholders in the sequences B, D and e. The sequences a and c
are too short for a picture."""


@dataclass(frozen=True)
class PackingDifference:
    """The difference between two passes over the same sequences, relative to the size of the compared values."""

    log_prob: float
    """Root mean square of the differences of log-probs, divided by the standard deviation of the log-probs."""
    gradient: float
    """Norm of the difference of all parameters' gradients, divided by the norm of the gradient."""

    def within(self, allowed: PackingDifference) -> bool:
        """Whether `log_prob` and `gradient` are at most their values in `allowed`. The result is False if one is NaN."""
        return self.log_prob <= allowed.log_prob and self.gradient <= allowed.gradient


NEIGHBOUR_TOLERANCE = PackingDifference(1e-3, 2e-2)
"""Maximum difference between two packed rows in which the scored sequences have different neighbours. Without a leak,
both differences were 0. With a leak in only the convolution or only the state, they were at least 3e-3, mostly 0.1 to
1. The bound of the gradient allows for kernels that add in no fixed order."""
SEPARATE_TOLERANCES = {
    torch.float32: PackingDifference(1e-3, 1e-2),
    torch.bfloat16: PackingDifference(0.5, float("inf")),
}
"""Maximum difference between packed and separate sequences, by the precision of the layers. In float32, the difference
without a leak was 1e-5. In bfloat16 with large random weights, log-probs differed by up to 0.5, and gradients by so
much that no bound is set."""


class PackingInexact(RuntimeError):
    """Packed sequences would train differently from separate ones."""

    failure = FailureReason.PACKING_INEXACT


def check_packing(model: HFModule, *, pictures: bool = False, share_prompts: bool = False) -> None:
    """Raise PackingInexact if packing changes log-probs or gradients by more than rounding.

    A hundred random tokens are scored and differentiated in three passes: in a packed row, in a packed row with
    different neighbours, and as separate padded sequences. The second pass must agree with the first within
    NEIGHBOUR_TOLERANCE (the precise test). The third pass must agree with the first within SEPARATE_TOLERANCES, which
    depend on the precision of the layers.

    Call this function once after loading, on all ranks and before any gradient is computed: it sets all
    gradients to None. The model must be adapted, and may be sharded. With a context group, the model must be
    sharded over that group too, because gradients are compared after FSDP has reduced them. Before the reduction,
    each process has only the gradient of its own tokens.

    pictures: whether some of the sequences have a picture each; the model must then have a vision tower. share_prompts:
    whether to make the same comparisons with a row in which some sequences share a prompt.
    """
    vocabulary = text_config(model).vocab_size
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(vocabulary, (length,), generator=generator) for length in SEQUENCE_LENGTHS]
    # Adding 1 … vocabulary - 1 makes every token a different one.
    neighbours = [
        (s + torch.randint(1, vocabulary, s.shape, generator=generator)) % vocabulary if _neighbour(i) else s
        for i, s in enumerate(sequences)
    ]
    targets = torch.cat(sequences).flip(0)
    shown, of_neighbours = ((_pictures(model, seeds) if pictures else None) for seeds in ((1, 2, 3), (1, 2, 4)))
    row = _pass(model, sequences, shown, targets, packed=True)
    changed = _difference(_pass(model, neighbours, of_neighbours, targets, packed=True), row, ~_of_neighbours())
    separate = _difference(
        row, _pass(model, sequences, shown, targets, packed=False), torch.ones(len(targets), dtype=torch.bool)
    )
    if problems := _problems(changed, separate, "separate sequences", row.precision):
        raise PackingInexact(
            f"a packed row is not exact here, {'; '.join(problems)}. A kernel ignores the boundaries of sequences: set "
            "train.batch.removePadding to false, or remove or update flash-linear-attention"
        )
    if share_prompts:
        _check_shared_prompts(model, sequences, neighbours, targets, pictures=pictures)


def _check_shared_prompts(
    model: HFModule, sequences: list[Tensor], neighbours: list[Tensor], targets: Tensor, *, pictures: bool
) -> None:
    prompt = sequences[LEADERS[1]][:SHARED_PROMPT]
    begun, siblings = (
        [torch.cat((prompt, each[SHARED_PROMPT:])) if LEADERS[i] == LEADERS[1] else each for i, each in enumerate(row)]
        for row in (sequences, neighbours)
    )
    shown = _pictures(model, (1, 1, 1)) if pictures else None
    shared = SharedPrompts.of(PROMPT_LENGTHS, SEQUENCE_LENGTHS, LEADERS)
    row = _pass(model, begun, shown, targets, packed=True, shared=shared)
    changed = _difference(_pass(model, siblings, shown, targets, packed=True, shared=shared), row, ~_of_neighbours())
    copies = _difference(
        row, _pass(model, begun, shown, targets, packed=True), torch.ones(len(targets), dtype=torch.bool)
    )
    if problems := _problems(changed, copies, "copies of the prompt", row.precision):
        raise PackingInexact(
            f"a row with shared prompts is not exact here, {'; '.join(problems)}. A kernel does not begin from the state of "
            "the prompt: set train.batch.sharePrompts to false, or remove or update flash-linear-attention"
        )


def _problems(changed: PackingDifference, separate: PackingDifference, other: str, precision: torch.dtype) -> list[str]:
    """Return a text for each difference that is too large.

    changed: difference from other neighbours. separate: difference from the form with the name `other`.
    """
    allowed = SEPARATE_TOLERANCES.get(precision, SEPARATE_TOLERANCES[torch.bfloat16])
    return [
        f"{condition}: log-probs differ by {difference.log_prob:.2g} of their spread (allowed {limit.log_prob:g}), gradients by "
        f"{difference.gradient:.2g} of their norm (allowed {limit.gradient:g})"
        for condition, difference, limit in (
            ("with other neighbours in the row", changed, NEIGHBOUR_TOLERANCE),
            (f"from {other}, in {precision}", separate, allowed),
        )
        if not difference.within(limit)
    ]


@dataclass(frozen=True)
class _Pass:
    log_probs: Tensor
    """(tokens,) log-probs of all sequences."""
    gradients: list[Tensor]
    """The part of each parameter's gradient that this rank holds, from the log-probs of the sequences B and D."""
    precision: torch.dtype
    """Precision of the layers."""


def _neighbour(i: int) -> bool:
    return i % 2 == 0


def _of_neighbours() -> Tensor:
    return torch.cat([torch.full((length,), _neighbour(i)) for i, length in enumerate(SEQUENCE_LENGTHS)])


def _pictures(model: HFModule, seeds: tuple[int, int, int]) -> list[PictureArrays | None]:
    """Return the picture of each sequence, two features of random patches; None for sequences that
    are too short for one.

    seeds: seeds of the pictures of the sequences B, D and e.
    """
    tower = model.config.vision_config
    grid = np.array([[1, tower.spatial_merge_size, len(PLACEHOLDERS) * tower.spatial_merge_size]])
    shape = int(grid.prod()), tower.in_channels * tower.temporal_patch_size * tower.patch_size**2
    waiting = iter(seeds)
    return [
        PictureArrays.of(images=(np.random.default_rng(next(waiting)).normal(size=shape).astype(np.float32), grid))
        if length >= PLACEHOLDERS.stop
        else None
        for length in SEQUENCE_LENGTHS
    ]


def _inputs(
    model: HFModule,
    sequences: list[Tensor],
    pictures: list[PictureArrays | None] | None,
    shared: SharedPrompts | None,
    *,
    packed: bool,
    device: torch.device,
) -> ModelInput:
    if pictures is None:
        inputs = ModelInput.of_text(sequences, packed=packed, device=device)
        return inputs if shared is None else inputs.sharing(shared)
    tokens, drawn = [], []
    for sequence, shown in zip(sequences, pictures, strict=True):
        is_drawn = torch.ones(len(sequence), dtype=torch.bool)
        if shown is not None:
            is_drawn[PLACEHOLDERS.start : PLACEHOLDERS.stop] = False
        tokens.append(sequence.where(is_drawn, model.config.image_token_id))
        drawn.append(is_drawn)
    return multimodal_input(tokens, pictures, model.config, written=drawn, shared=shared, packed=packed, device=device)


def _pass(
    model: HFModule,
    sequences: list[Tensor],
    pictures: list[PictureArrays | None] | None,
    targets: Tensor,
    *,
    packed: bool,
    shared: SharedPrompts | None = None,
) -> _Pass:
    device = text_model(
        model
    ).rotary_emb.inv_freq.device  # that of a buffer, since parameters may be parked on the host
    inputs = _inputs(model, sequences, pictures, shared, packed=packed, device=device)
    width = 0 if packed else inputs.tokens.shape[1]
    starts = (
        torch.tensor([0, *SEQUENCE_LENGTHS]).cumsum(0).tolist()
        if packed
        else [i * width for i in range(len(SEQUENCE_LENGTHS))]
    )
    rows = torch.cat([torch.arange(start, start + n) for start, n in zip(starts, SEQUENCE_LENGTHS, strict=False)])
    if shared is not None:
        rows = shared.places[rows]
    precisions: list[torch.dtype] = []
    hook = (
        text_model(model)
        .layers[0]
        .register_forward_pre_hook(lambda _, arguments: precisions.append(arguments[0].dtype))
    )
    log_probs = model(inputs, rows.to(device), targets.to(device)).log_probs
    hook.remove()
    # Weights have both signs: with equal weights the differences of neighbouring tokens could cancel.
    weights = torch.linspace(-1, 1, len(rows)).masked_fill(_of_neighbours(), 0.0)
    (log_probs * weights.to(device)).sum().backward()
    gradients = [_local(p.grad) for p in model.parameters() if p.grad is not None]
    for parameter in model.parameters():
        parameter.grad = None
    return _Pass(log_probs.detach(), gradients, precisions[0])


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _difference(actual: _Pass, reference: _Pass, tokens: Tensor) -> PackingDifference:
    tokens = tokens.to(reference.log_probs.device)
    values, expected = actual.log_probs[tokens].double(), reference.log_probs[tokens].double()
    squares = torch.zeros(2, 2, dtype=torch.float64, device=expected.device)  # of log-probs, gradients: distance, size
    squares[0] = torch.stack(((values - expected).square().sum(), (expected - expected.mean()).square().sum()))
    for gradient, expected_gradient in zip(actual.gradients, reference.gradients, strict=True):
        squares[1, 0] += (gradient - expected_gradient).double().square().sum()
        squares[1, 1] += expected_gradient.double().square().sum()
    # Each rank has a part of the parameters, and all ranks must make the same decision.
    if dist.is_initialized():
        dist.all_reduce(squares)
    log_prob, gradient_norm = (distance / (size or 1.0) for distance, size in squares.sqrt().tolist())
    return PackingDifference(log_prob, gradient_norm)

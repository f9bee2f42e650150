"""Scores in chunks against the plain head: logits of all rows, log-softmax, gather.

With TRITON_INTERPRET=1 in the environment, the same of the Triton kernels (`test_head_kernels.py`).
"""

import math
import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from qwen35_trainer.data.candidates import Candidates
from qwen35_trainer.models.qwen3_5 import head, products
from qwen35_trainer.models.qwen3_5.head import TokenScores, token_scores
from qwen35_trainer.models.qwen3_5.kept_logits import KeptLogits
from tests.profiles import examples

D, V = 16, 37
ROUNDING = 5e-6
"""Maximum difference of log-probs at temperature 1. The rounding of a logit is divided by the temperature, as the logit is. For all rows
and seeds of the test of candidates, in chunks of 4 and 25, the maximum was 1.14e-5 at temperature 0.3, 3.8e-6 at 1 and 1.4e-6 at 2.5."""
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(autouse=True, scope="module")
def interpreted() -> Iterator[None]:
    """The kernels in the place of torch's operations where Triton interprets, in blocks whose size does not divide V."""
    with pytest.MonkeyPatch.context() as patched:
        if INTERPRETED:
            from qwen35_trainer.models.qwen3_5 import head_kernels

            patched.setattr(head_kernels, "BLOCK", 16)
            patched.setattr(head, "_passes", lambda _: head_kernels)
        yield


def drawn(rows: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(rows)
    hidden, weight = torch.randn(rows, D, generator=g), torch.randn(V, D, generator=g)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), torch.randint(V, (rows,), generator=g)


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> TokenScores:
    log_softmax = ((hidden @ weight.T).float() / temperature).log_softmax(-1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    return TokenScores(log_softmax.gather(1, targets.unsqueeze(1)).squeeze(1), entropy)


def gradients(scores: TokenScores, hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Of a sum that weighs every row's log-prob and entropy differently."""
    weights = torch.linspace(-1, 2, len(scores.log_probs), device=scores.log_probs.device)
    total = (scores.log_probs * weights).sum()
    if scores.entropy is not None:
        total = total + (scores.entropy * weights.flip(0)).sum()
    return torch.autograd.grad(total, (hidden, weight))


@settings(max_examples=examples(20 if INTERPRETED else 100))
@given(rows=st.integers(1, 20), chunk=st.integers(1, 25), temperature=st.sampled_from([0.3, 1.0, 2.5]))
def test_values_and_gradients_are_those_of_the_plain_head(rows, chunk, temperature):
    hidden, weight, targets = drawn(rows)
    ours = token_scores(hidden, weight, targets, temperature, with_entropy=True, chunk=chunk)
    theirs = plain(hidden, weight, targets, temperature)
    assert ours.entropy is not None
    torch.testing.assert_close(ours.log_probs, theirs.log_probs, atol=ROUNDING / temperature, rtol=1e-6)
    torch.testing.assert_close(ours.entropy, theirs.entropy, atol=5e-6, rtol=1e-6)
    for own, expected in zip(gradients(ours, hidden, weight), gradients(theirs, hidden, weight), strict=True):
        torch.testing.assert_close(own, expected, atol=2e-5, rtol=1e-5)


def kept_around(targets: Tensor, seed: int = 0) -> KeptLogits:
    """The target of each row and any other tokens, or none at all: the whole vocabulary."""
    random = np.random.default_rng(seed)
    sets = [
        sorted({target, *random.choice(V, random.integers(0, 6)).tolist()}) if random.random() < 0.8 else []
        for target in targets.tolist()
    ]
    counts = np.array([len(ids) for ids in sets], np.int32)
    return KeptLogits(Candidates(counts, np.array([each for ids in sets for each in ids], np.int32)), targets.device)


def plain_over(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, kept: KeptLogits) -> TokenScores:
    """Row by row: the softmax over the logits of the candidates alone."""
    log_probs, entropies, start = [], [], 0
    for row, count in enumerate(kept.candidates.counts.tolist()):
        ids = kept.candidates.ids[start : start + count].tolist() or list(range(V))
        start += count
        log_softmax = ((hidden[row] @ weight[ids].T).float() / temperature).log_softmax(-1)
        log_probs.append(log_softmax[ids.index(int(targets[row]))])
        entropies.append(-(log_softmax.exp() * log_softmax).sum())
    return TokenScores(torch.stack(log_probs), torch.stack(entropies))


@settings(max_examples=examples(20 if INTERPRETED else 60))
@given(
    rows=st.integers(1, 20),
    chunk=st.integers(1, 25),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    seed=st.integers(0, 99),
)
def test_over_candidates_values_and_gradients_are_those_of_their_own_softmax(rows, chunk, temperature, seed):
    hidden, weight, targets = drawn(rows)
    kept = kept_around(targets, seed)
    ours = token_scores(hidden, weight, targets, temperature, with_entropy=True, chunk=chunk, kept=kept)
    theirs = plain_over(hidden, weight, targets, temperature, kept)
    assert ours.entropy is not None
    torch.testing.assert_close(ours.log_probs, theirs.log_probs, atol=ROUNDING / temperature, rtol=1e-6)
    torch.testing.assert_close(ours.entropy, theirs.entropy, atol=5e-6, rtol=1e-6)
    for own, expected in zip(gradients(ours, hidden, weight), gradients(theirs, hidden, weight), strict=True):
        torch.testing.assert_close(own, expected, atol=2e-5, rtol=1e-5)


def test_in_sixteen_bits_too_other_tokens_have_no_part_in_the_softmax():
    hidden, weight, targets = drawn(12, torch.bfloat16)
    kept = kept_around(targets)
    ours = token_scores(hidden, weight, targets, with_entropy=True, chunk=5, kept=kept)
    theirs = plain_over(hidden.float(), weight.float(), targets, 1.0, kept)
    torch.testing.assert_close(ours.log_probs, theirs.log_probs, atol=0.06, rtol=0)
    for own, exact in zip(gradients(ours, hidden, weight), gradients(theirs, hidden, weight), strict=True):
        torch.testing.assert_close(own.float(), exact.float(), atol=0.1, rtol=0.05)


def test_a_token_without_alternatives_is_certain_and_gives_no_gradient():
    hidden, weight, targets = drawn(3)
    kept = KeptLogits(Candidates(np.ones(3, np.int32), targets.numpy().astype(np.int32)), targets.device)
    ours = token_scores(hidden, weight, targets, 0.7, with_entropy=True, kept=kept)
    assert ours.entropy is not None
    assert not ours.log_probs.any()
    assert not ours.entropy.any()
    assert not any(gradient.any() for gradient in gradients(ours, hidden, weight))


def test_without_entropy_there_is_none_and_the_gradient_is_that_of_the_log_probs():
    hidden, weight, targets = drawn(9)
    ours = token_scores(hidden, weight, targets, 0.7, chunk=4)
    assert ours.entropy is None
    theirs = plain(hidden, weight, targets, 0.7)._replace(entropy=None)
    for own, expected in zip(gradients(ours, hidden, weight), gradients(theirs, hidden, weight), strict=True):
        torch.testing.assert_close(own, expected, atol=1e-5, rtol=1e-5)


def test_gradients_are_those_of_finite_differences():
    hidden, weight, targets = (x.detach() for x in drawn(3))
    direction, step = torch.randn(3, D, generator=torch.Generator().manual_seed(5)), 1e-2

    def total(x: Tensor) -> Tensor:
        scores = token_scores(x, weight, targets, 1.5, with_entropy=True, chunk=2)
        assert scores.entropy is not None
        return scores.log_probs.sum() + 2 * scores.entropy.sum()

    moved = (total(hidden + step * direction) - total(hidden - step * direction)) / (2 * step)
    [gradient] = torch.autograd.grad(total(at := hidden.clone().requires_grad_()), at)
    assert float((gradient * direction).sum()) == pytest.approx(float(moved), rel=1e-2)


def test_a_uniform_distribution_in_closed_form():
    """Of V equal logits: log-prob -log V, entropy log V, and no direction raises the entropy."""
    hidden, targets = torch.zeros(2, D, requires_grad=True), torch.tensor([0, V - 1])
    scores = token_scores(hidden, torch.randn(V, D), targets, with_entropy=True)
    assert scores.entropy is not None
    torch.testing.assert_close(scores.log_probs, torch.full((2,), -math.log(V)))
    torch.testing.assert_close(scores.entropy, torch.full((2,), math.log(V)))
    [gradient] = torch.autograd.grad(scores.entropy.sum(), hidden)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-6, rtol=0)


def test_sixteen_bit_products_differ_from_float32_ones_by_their_rounding():
    hidden, weight, targets = drawn(12, torch.bfloat16)
    ours = token_scores(hidden, weight, targets, with_entropy=True, chunk=5)
    theirs = plain(hidden.float(), weight.float(), targets, 1.0)
    assert ours.log_probs.dtype == torch.float32
    # Logits of some 10 nats are rounded to 1/32.
    torch.testing.assert_close(ours.log_probs, theirs.log_probs, atol=0.06, rtol=0)
    torch.testing.assert_close(ours.entropy, theirs.entropy, atol=0.06, rtol=0)
    of_hidden, of_weight = gradients(ours, hidden, weight)
    assert (of_hidden.dtype, of_weight.dtype) == (torch.bfloat16, torch.bfloat16)


def test_float32_logits_of_sixteen_bit_operands_are_not_rounded(monkeypatch):
    monkeypatch.setattr(products, "BLOCK_ELEMENTS", 7 * D)  # which does not divide the vocabulary
    hidden, weight, targets = drawn(12, torch.bfloat16)
    ours = token_scores(hidden, weight, targets, 0.7, with_entropy=True, chunk=5, float32_logits=True)
    theirs = plain(hidden.float(), weight.float(), targets, 0.7)
    torch.testing.assert_close(ours.log_probs, theirs.log_probs, atol=5e-6, rtol=1e-6)
    torch.testing.assert_close(ours.entropy, theirs.entropy, atol=5e-6, rtol=1e-6)
    for own, exact in zip(gradients(ours, hidden, weight), gradients(theirs, hidden, weight), strict=True):
        assert own.dtype == torch.bfloat16
        torch.testing.assert_close(own, exact, atol=0.05, rtol=2**-7)


def test_the_weights_gradient_loses_nothing_to_the_number_of_chunks():
    hidden, weight, targets = drawn(400, torch.bfloat16)

    def of_weight(chunk: int) -> Tensor:
        scores = token_scores(hidden, weight, targets, chunk=chunk, float32_logits=True)
        return torch.autograd.grad(scores.log_probs.sum(), weight)[0]

    exact = torch.autograd.grad(plain(hidden.float(), weight.float(), targets, 1.0).log_probs.sum(), weight)[0].float()
    in_one, in_many = (float((of_weight(chunk) - exact).square().mean().sqrt()) for chunk in (400, 2))
    assert in_many <= 1.1 * in_one


def test_hidden_states_of_another_precision_are_cast_to_the_weight_s():
    hidden, weight, targets = drawn(4)
    expected = token_scores(hidden.bfloat16(), weight.bfloat16(), targets).log_probs
    assert torch.equal(token_scores(hidden, weight.bfloat16(), targets).log_probs, expected)


def test_a_frozen_head_gets_no_gradient_and_passes_one_on():
    hidden, weight, targets = drawn(6)
    token_scores(hidden, weight.detach(), targets, chunk=4).log_probs.sum().backward()
    assert hidden.grad is not None
    expected = torch.autograd.grad(plain(hidden, weight, targets, 1.0).log_probs.sum(), hidden)[0]
    torch.testing.assert_close(hidden.grad, expected, atol=1e-5, rtol=1e-5)


def test_no_rows_score_nothing_and_give_gradients_of_zero():
    hidden, weight, targets = drawn(0)
    scores = token_scores(hidden, weight, targets, with_entropy=True)
    assert scores.log_probs.shape == (0,)
    of_hidden, of_weight = torch.autograd.grad(scores.log_probs.sum(), (hidden, weight))
    assert of_hidden.shape == (0, D)
    assert not of_weight.any()


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_a_temperature_without_a_distribution_is_refused(temperature):
    with pytest.raises(ValueError, match=f"temperature {temperature}: it must be above 0"):
        token_scores(*drawn(2), temperature)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation gave."""

    elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, Tensor):
                self.elements = max(self.elements, each.numel())
        return result


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_logits_of_all_rows_are_never_held(with_entropy, truncated):
    rows, vocabulary, chunk = 64, 500, 8
    hidden = torch.randn(rows, D, requires_grad=True)
    weight, targets = torch.randn(vocabulary, D, requires_grad=True), torch.randint(vocabulary, (rows,))
    ids = targets.numpy().astype(np.int32)
    kept = KeptLogits(Candidates(np.ones(rows, np.int32), ids), targets.device) if truncated else None
    with Largest() as largest:
        scores = token_scores(hidden, weight, targets, 1.0, with_entropy, chunk, kept=kept)
        (scores.log_probs.sum() + (scores.entropy.sum() if scores.entropy is not None else 0)).backward()
    assert largest.elements == max(vocabulary * D, chunk * vocabulary) < rows * vocabulary


class Products(TorchDispatchMode):
    """How many matrix products are made."""

    made = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.made += function in {torch.ops.aten.mm.default, torch.ops.aten.addmm_.default}
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize(("rows", "made"), [(4, 3), (8, 3), (9, 7), (16, 7), (24, 11)])
def test_the_last_chunk_is_multiplied_once(rows, made):
    """Three products a chunk: logits, and gradients of hidden states and weight; all chunks but one make theirs twice."""
    hidden, weight, targets = drawn(rows)
    with Products() as products:
        token_scores(hidden, weight, targets, chunk=8).log_probs.sum().backward()
    assert products.made == made


@pytest.mark.parametrize(("vocabulary", "rows"), [(250, 4), (999, 1), (2000, 1)])
def test_by_default_a_chunk_is_a_number_of_logits_and_at_least_a_row(monkeypatch, vocabulary, rows):
    monkeypatch.setattr(head, "CHUNK_LOGITS", 1000)
    hidden, targets = torch.ones(7, 1), torch.zeros(7, dtype=torch.int64)
    with Largest() as largest, torch.no_grad():
        token_scores(hidden, torch.zeros(vocabulary, 1), targets)
    assert largest.elements == rows * vocabulary

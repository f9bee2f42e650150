"""Forward and backward of an adapted model against the library's, one sequence at a time."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qwen35_trainer.models.qwen3_5.adapter import adapt
from qwen35_trainer.models.qwen3_5.forward import logits
from qwen35_trainer.models.qwen3_5.inputs import ModelInput
from tests.distributed.distance import distance
from tests.models.rounding import allowed, in_float64
from tests.profiles import examples

EXPERTS = [pytest.param(0, id="dense"), pytest.param(4, id="mixture of experts")]
PACKED = [pytest.param(False, id="padded"), pytest.param(True, id="packed")]
LENGTHS = (5, 1, 70, 130, 2, 64)
GRADIENTS = 1e-4
"""Allowed distance of a parameter's gradient, relative to its norm, where float32 is exact enough."""


def rows_of(lengths: list[int], *, packed: bool) -> Tensor:
    """Flat positions of all real tokens, sequence after sequence."""
    if packed:
        return torch.arange(sum(lengths))
    return torch.cat([torch.arange(n) + i * max(lengths) for i, n in enumerate(lengths)])


def reference(model, sequences: list[Tensor]) -> Tensor:
    """Logits (tokens, V) of the library's model, each sequence alone."""
    return torch.cat([model(input_ids=sequence[None], use_cache=False).logits[0] for sequence in sequences])


def scored(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs of the targets and entropies, at temperature 0.7."""
    log_softmax = (logits / 0.7).log_softmax(-1)
    return log_softmax.gather(1, targets.unsqueeze(1)).squeeze(1), -(log_softmax.exp() * log_softmax).sum(-1)


def gradients(model, log_probs: Tensor, entropy: Tensor) -> dict[str, Tensor]:
    """By parameter, of a loss of both."""
    model.zero_grad()
    (log_probs.mean() + entropy.square().mean()).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("experts", EXPERTS)
def test_logits_are_those_of_the_library(make_model, tokens, experts, packed):
    model = make_model(experts=experts)
    sequences = [tokens(n, seed=n) for n in LENGTHS]
    with torch.no_grad():
        expected = reference(model, sequences)
        actual = logits(adapt(model), ModelInput.of_text(sequences, packed=packed, device="cpu"))
    torch.testing.assert_close(
        actual.flatten(0, 1)[rows_of(list(LENGTHS), packed=packed)], expected, atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("experts", EXPERTS)
def test_scores_and_gradients_are_those_of_the_library(make_model, tokens, experts, packed):
    model = make_model(experts=experts)
    adapted = adapt(copy.deepcopy(model))
    lengths = [5, 1, 70, 30]
    sequences, targets = [tokens(n, seed=n) for n in lengths], tokens(sum(lengths), seed=9)
    expected, expected_entropy = scored(reference(model, sequences), targets)
    inputs = ModelInput.of_text(sequences, packed=packed, device="cpu")
    scores = adapted(inputs, rows_of(lengths, packed=packed), targets, 0.7, with_entropy=True)
    assert scores.entropy is not None
    torch.testing.assert_close(scores.log_probs, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(scores.entropy, expected_entropy, atol=1e-4, rtol=1e-4)
    ours = gradients(adapted, scores.log_probs, scores.entropy)
    theirs = gradients(model, expected, expected_entropy)
    precise = in_float64(model)
    exact = gradients(precise, *scored(reference(precise, sequences), targets))
    assert distance(ours, theirs, allowed(theirs, exact, GRADIENTS)) <= GRADIENTS


@settings(max_examples=examples(15))
@given(lengths=st.lists(st.integers(1, 80), min_size=1, max_size=6), seed=st.integers(0, 5))
def test_packed_sequences_score_as_padded_ones_do(lengths, seed):
    model, sequences = MODELS[seed % 2], [TOKENS[seed : seed + n] for n in lengths]
    targets = TOKENS[: sum(lengths)]
    with torch.no_grad():
        padded, packed = (
            model(
                ModelInput.of_text(sequences, packed=each, device="cpu"),
                rows_of(lengths, packed=each),
                targets,
            ).log_probs
            for each in (False, True)
        )
    torch.testing.assert_close(packed, padded, atol=1e-4, rtol=1e-4)


TOKENS = torch.randint(23, (600,), generator=torch.Generator().manual_seed(1))
MODELS: list = []


@pytest.fixture(autouse=True)
def models(make_model):
    """Built once: hypothesis draws many examples."""
    if not MODELS:
        MODELS.extend(adapt(make_model(experts=experts)) for experts in (0, 4))


def test_rows_in_any_order_and_more_than_once_are_scored_each_for_itself(tokens):
    sequences, rows = [tokens(7), tokens(4, seed=1)], torch.tensor([9, 0, 9, 3])
    targets = torch.tensor([1, 2, 3, 4])
    inputs = ModelInput.of_text(sequences, packed=True, device="cpu")
    with torch.no_grad():
        whole = logits(MODELS[0], inputs)[0].log_softmax(-1)
        scored = MODELS[0](inputs, rows, targets).log_probs
    torch.testing.assert_close(scored, whole[rows, targets], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("experts", EXPERTS)
def test_padding_has_no_effect_on_scores_or_gradients(make_model, tokens, experts):
    lengths = [50, 20]
    sequences, targets, results = [tokens(n, seed=n) for n in lengths], tokens(70, seed=3), []
    for filler in (0, 1, 17):
        model = adapt(make_model(experts=experts))
        inputs = ModelInput.of_text(sequences, packed=False, device="cpu")
        inputs.tokens[1, 20:] = filler
        scores = model(inputs, rows_of(lengths, packed=False), targets)
        scores.log_probs.sum().backward()
        results.append((scores.log_probs.detach(), [p.grad for p in model.parameters()]))
    for log_probs, gradients in results[1:]:
        torch.testing.assert_close(log_probs, results[0][0], atol=1e-6, rtol=1e-6)
        for own, other in zip(gradients, results[0][1], strict=True):
            torch.testing.assert_close(own, other, atol=1e-5, rtol=1e-5)


def test_the_first_token_reaches_the_last_score_so_that_a_lost_state_would_show(make_model, tokens):
    model, ids = adapt(make_model()), tokens(100)
    other = ids.clone()
    other[0] = (ids[0] + 1) % 23
    # Full attention carries the first token too: without it only the delta rule's state is left.
    for layer in model.model.layers:
        if hasattr(layer, "self_attn"):
            layer.self_attn.o_proj.weight.data.zero_()
    with torch.no_grad():
        first, second = (
            logits(model, ModelInput.of_text([x], packed=packed, device="cpu"))[0, -1]
            for x, packed in ((ids, True), (other, False))
        )
    assert (first - second).abs().max() > 1e-2


@pytest.mark.parametrize("packed", PACKED)
def test_activation_checkpointing_changes_neither_scores_nor_gradients(make_model, tokens, packed):
    sequences, targets, results = [tokens(30), tokens(9, seed=1)], tokens(39), []
    for checkpointing in (False, True):
        model = adapt(make_model()).train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        inputs = ModelInput.of_text(sequences, packed=packed, device="cpu")
        scores = model(inputs, rows_of([30, 9], packed=packed), targets)
        scores.log_probs.sum().backward()
        results.append([scores.log_probs.detach(), *(p.grad for p in model.parameters())])
    for left_result, other in zip(*results, strict=True):
        assert torch.equal(left_result, other)


def test_a_sixteen_bit_model_runs_packed_and_padded(make_model, tokens):
    model, sequences, targets = adapt(make_model().bfloat16()), [tokens(20), tokens(5)], tokens(25)
    for packed in (False, True):
        inputs = ModelInput.of_text(sequences, packed=packed, device="cpu")
        scores = model(inputs, rows_of([20, 5], packed=packed), targets)
        scores.log_probs.sum().backward()
        assert scores.log_probs.dtype == torch.float32
        assert torch.isfinite(scores.log_probs).all()
    assert all(p.grad is not None and p.grad.dtype == torch.bfloat16 for p in model.parameters())

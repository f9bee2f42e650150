"""The embedded engine: what it generates, what it says about it, and that nothing gets lost."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qwen35_trainer.rollout.base import GroupRequest, GroupResult, Sampling
from qwen35_trainer.rollout.torch import TorchEngine

END = 2
NEVER = 10_000
"""A token that the vocabulary does not have: sequences end at their limit."""


def engine_of(model, *, slots: int = 8, end_token: int = END) -> TorchEngine:
    return TorchEngine(model, end_token=end_token, slots=slots, max_length=96, seed=0)


def run(engine: TorchEngine, limit: int = 500) -> dict[int, GroupResult]:
    """Step until nothing is left. Every group finishes once."""
    finished: dict[int, GroupResult] = {}
    for _ in range(limit):
        if not engine.busy:
            return finished
        for result in engine.step().finished:
            assert result.group not in finished
            finished[result.group] = result
    raise AssertionError(f"still busy after {limit} steps")


def teacher_forced(model, prompt: tuple[int, ...], response: np.ndarray, temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities of a response in one forward pass of the library's model."""
    ids = torch.tensor([*prompt, *response.tolist()])
    with torch.no_grad():
        logits = model(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, ids[len(prompt) :, None]).squeeze(1)


@pytest.mark.parametrize("experts", [pytest.param(0, id="dense"), pytest.param(4, id="mixture of experts")])
def test_log_probabilities_are_those_of_a_whole_forward_pass(make_model, tokens, experts) -> None:
    model = make_model(experts=experts)
    requests = [
        GroupRequest(group, tuple(tokens(length, seed=group).tolist()), 3, 24, Sampling(temperature=0.7))
        for group, length in enumerate([1, 5, 40])
    ]
    engine = engine_of(model)
    engine.submit(requests)
    finished = run(engine)
    for request in requests:
        for sequence in finished[request.group].sequences:
            expected = teacher_forced(model, request.prompt, sequence.tokens, 0.7)
            np.testing.assert_allclose(sequence.log_probs, expected.numpy(), atol=1e-4)


def test_a_sequence_ends_at_the_end_token_or_at_its_limit(make_model) -> None:
    engine = engine_of(make_model())
    engine.submit([GroupRequest(0, (3, 4, 5), 40, 12)])
    [result] = run(engine).values()
    assert len(result.sequences) == 40  # through 8 slots
    ends = [sequence for sequence in result.sequences if not sequence.truncated]
    assert 0 < len(ends) < 40
    for sequence in result.sequences:
        assert END not in sequence.tokens[:-1]
        assert sequence.truncated == (sequence.tokens[-1] != END)
        assert len(sequence.tokens) == 12 if sequence.truncated else len(sequence.tokens) <= 12


def test_greedy_samples_of_a_prompt_are_equal_and_sampled_ones_differ(make_model) -> None:
    engine = engine_of(make_model(), end_token=NEVER)
    engine.submit([GroupRequest(0, (3, 4), 4, 16, Sampling(0.0)), GroupRequest(1, (3, 4), 4, 16)])
    finished = run(engine)
    assert len({tuple(sequence.tokens) for sequence in finished[0].sequences}) == 1
    assert len({tuple(sequence.tokens) for sequence in finished[1].sequences}) > 1


def test_weights_change_in_the_middle_of_a_sequence_and_every_token_says_which_made_it(make_model, tokens) -> None:
    model, other = make_model(seed=0), make_model(seed=1)
    reference = make_model(seed=0)
    prompt = tuple(tokens(7).tolist())
    engine = engine_of(model, end_token=NEVER)
    engine.submit([GroupRequest(0, prompt, 2, 10)])
    for _ in range(4):
        engine.step()
    engine.load(other.state_dict(), version=5)
    assert engine.version == 5
    [result] = run(engine).values()
    for sequence in result.sequences:
        # The distribution of the fifth token was there already when the weights came.
        assert sequence.versions.tolist() == [0] * 5 + [5] * 5
        old = teacher_forced(reference, prompt, sequence.tokens)
        np.testing.assert_allclose(sequence.log_probs[:5], old[:5].numpy(), atol=1e-4)
        assert np.abs(sequence.log_probs[5:] - old[5:].numpy()).max() > 0.01


def test_a_group_is_born_with_its_first_token_and_not_when_it_is_queued(make_model) -> None:
    engine = engine_of(make_model(), slots=2, end_token=NEVER)
    engine.submit([GroupRequest(0, (3,), 2, 3), GroupRequest(1, (4,), 3, 2)])
    assert engine.step().born == {0: 0}
    engine.load(make_model(seed=1).state_dict(), version=1)
    born = {}
    while engine.busy:
        born |= engine.step().born
    assert born == {1: 1}


def test_more_samples_than_slots_are_one_birth(make_model) -> None:
    engine = engine_of(make_model(), slots=2, end_token=NEVER)
    engine.submit([GroupRequest(0, (3,), 5, 2)])
    births = []
    while engine.busy:
        births += list(engine.step().born)
    assert births == [0]


def test_weights_that_do_not_fit_are_refused_by_name_and_nothing_is_loaded(make_model) -> None:
    engine = engine_of(make_model())
    weights = dict(make_model(seed=1).state_dict())
    weights["extra.weight"] = weights.pop("lm_head.weight")
    with pytest.raises(ValueError, match=r"version 3 .*missing \['lm_head.weight'\], unexpected \['extra.weight'\]"):
        engine.load(weights, version=3)
    assert engine.version == 0


def test_a_tensor_of_another_shape_is_refused_even_where_a_copy_would_stretch_it(make_model) -> None:
    engine = engine_of(make_model())
    weights = dict(make_model(seed=1).state_dict())
    weights["model.norm.weight"] = weights["model.norm.weight"][:1]
    with pytest.raises(ValueError, match=r"of another shape \['model.norm.weight'\]"):
        engine.load(weights, version=3)
    assert engine.version == 0


def test_a_request_that_does_not_fit_names_the_field_to_lower(make_model) -> None:
    with pytest.raises(ValueError, match=r"group 7: prompt 3 \+ response 94 tokens exceed the engine's 96"):
        engine_of(make_model()).submit([GroupRequest(7, (3, 4, 5), 1, 94)])


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_group_finishes_exactly_once_whatever_happens_around_it(make_model, data: st.DataObject) -> None:
    engine = engine_of(make_model(), slots=data.draw(st.integers(1, 6)))
    weights = make_model(seed=1).state_dict()
    requests: dict[int, GroupRequest] = {}
    cancelled: set[int] = set()
    finished: dict[int, GroupResult] = {}
    for move in data.draw(st.lists(st.sampled_from(["submit", "step", "step", "cancel", "load"]), max_size=25)):
        match move:
            case "submit":
                prompt = tuple(data.draw(st.lists(st.integers(3, 20), min_size=1, max_size=5)))
                request = GroupRequest(
                    len(requests), prompt, data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
                )
                requests[request.group] = request
                engine.submit([request])
            case "cancel" if requests:
                group = data.draw(st.sampled_from(sorted(requests)))
                engine.cancel([group, 999])
                cancelled |= {group} - finished.keys()
            case "load":
                engine.load(weights, engine.version + 1)
            case "step":
                for result in engine.step().finished:
                    assert result.group not in finished
                    finished[result.group] = result
    finished |= run(engine)
    assert finished.keys() == requests.keys() - cancelled
    for group, result in finished.items():
        assert len(result.sequences) == requests[group].samples
        for sequence in result.sequences:
            assert 1 <= len(sequence.tokens) <= requests[group].max_tokens
            assert (np.diff(sequence.versions) >= 0).all()
            assert (sequence.log_probs <= 0).all()
    assert dataclasses.astuple(engine.step()) == ((), {}, 0)

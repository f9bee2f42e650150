"""The embedded engine: what it generates, what it says about it, and that nothing gets lost."""

import dataclasses
import gc
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qwen35_trainer.pipeline.events import SequenceId
from qwen35_trainer.rollout.rollout_engine import (
    ENVIRONMENT_VERSION,
    NO_TOKENS,
    Completed,
    EndReason,
    GeneratedTokens,
    Sampling,
    SequenceRequest,
    StepOutput,
)
from qwen35_trainer.rollout.torch import TorchEngine
from qwen35_trainer.rollout.version_runs import VersionRuns
from qwen35_trainer.weights.adapters import DOWN, SCALE, UP
from qwen35_trainer.weights.segment import MemorySegment
from tests.profiles import examples
from tests.publications import received
from tests.rollout.loading import load

END = 2
NEVER = 10_000
"""A token that the vocabulary does not have: sequences end at their limit."""
AS_THE_MODEL_SAYS, GREEDY = Sampling(), Sampling(0.0)
TRUNCATED = Sampling(0.7, top_p=0.9, top_k=6, min_p=0.01)
ADAPTED = "model.layers.3.self_attn.q_proj"


def engine_of(model, *, slots: int = 8, end_token: int = END) -> TorchEngine:
    return TorchEngine(model, end_token=end_token, slots=slots, max_length=96, seed=0)


def samples_of(
    group: int, prompt: Sequence[int], samples: int, max_tokens: int, sampling: Sampling = AS_THE_MODEL_SAYS
) -> list[SequenceRequest]:
    """A request for each sample of a group."""
    return [SequenceRequest((group, index), tuple(prompt), max_tokens, sampling) for index in range(samples)]


def run(engine: TorchEngine, limit: int = 500) -> dict[SequenceId, Completed]:
    """Step until nothing is left. Every sequence finishes once."""
    finished: dict[SequenceId, Completed] = {}
    for _ in range(limit):
        if not engine.busy:
            return finished
        for completed in engine.step().finished:
            assert completed.sequence not in finished
            finished[completed.sequence] = completed
    raise AssertionError(f"still busy after {limit} steps")


def teacher_forced(model, prompt: tuple[int, ...], response: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Log-probabilities of a response in one forward pass of the library's model."""
    ids = torch.tensor([*prompt, *response.tolist()])
    with torch.no_grad():
        logits = model(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, ids[len(prompt) :, None]).squeeze(1).numpy()


def assert_candidates(tokens: GeneratedTokens, sampling: Sampling) -> None:
    """Each token is one of its own candidates, of which there are as many as top-k at most; without truncation there are none."""
    if not sampling.truncates:
        assert tokens.candidates is None
        return
    assert tokens.candidates is not None
    assert len(tokens.candidates) == len(tokens)
    for position, token in enumerate(tokens.ids.tolist()):
        candidates = tokens.candidates[position : position + 1].ids.tolist()
        assert token in candidates
        assert len(candidates) <= sampling.top_k
        assert (len(candidates) == 1) == (tokens.log_probs[position] == 0)


def assert_same(actual: GeneratedTokens, expected: GeneratedTokens) -> None:
    for name in ("ids", "log_probs", "versions"):
        np.testing.assert_array_equal(getattr(actual, name), getattr(expected, name), err_msg=name)


def test_tokens_join_in_order_and_are_cut_in_all_their_parts() -> None:
    first = GeneratedTokens(np.array([4, 5], np.int32), np.array([-1, -2], np.float32), VersionRuns.of([0, 1]))
    second = GeneratedTokens(np.array([6], np.int32), np.array([-3], np.float32), VersionRuns.of([2]))
    joined = GeneratedTokens.join([first, second])
    assert len(joined) == 3
    assert_same(joined[1:], GeneratedTokens(np.array([5, 6]), np.array([-2, -3]), VersionRuns.of([1, 2])))
    assert_same(GeneratedTokens.join([]), NO_TOKENS)


@pytest.mark.parametrize("experts", [pytest.param(0, id="dense"), pytest.param(4, id="mixture of experts")])
def test_log_probabilities_are_those_of_a_whole_forward_pass(make_model, tokens, experts) -> None:
    model = make_model(experts=experts)
    prompts = [tuple(tokens(length, seed=group).tolist()) for group, length in enumerate([1, 5, 40])]
    engine = engine_of(model)
    for group, prompt in enumerate(prompts):
        engine.submit(samples_of(group, prompt, 3, 24, Sampling(temperature=0.7)))
    finished = run(engine)
    assert finished.keys() == {(group, index) for group in range(3) for index in range(3)}
    for (group, _), completed in finished.items():
        expected = teacher_forced(model, prompts[group], completed.tokens.ids, 0.7)
        np.testing.assert_allclose(completed.tokens.log_probs, expected, atol=1e-4)


def test_a_sequence_ends_at_the_end_token_or_at_its_limit(make_model) -> None:
    engine = engine_of(make_model())
    engine.submit(samples_of(0, (3, 4, 5), 40, 12))
    finished = run(engine).values()
    assert len(finished) == 40  # through 8 slots
    assert 0 < sum(not completed.truncated for completed in finished) < 40
    for completed in finished:
        ids = completed.tokens.ids
        assert END not in ids[:-1]
        assert completed.truncated == (ids[-1] != END)
        assert len(ids) == 12 if completed.truncated else len(ids) <= 12


def test_greedy_samples_of_a_prompt_are_equal_and_sampled_ones_differ(make_model) -> None:
    engine = engine_of(make_model(), end_token=NEVER)
    engine.submit(samples_of(0, (3, 4), 4, 16, GREEDY) + samples_of(1, (3, 4), 4, 16))
    finished = run(engine)
    responses = [{tuple(finished[group, index].tokens.ids) for index in range(4)} for group in (0, 1)]
    assert len(responses[0]) == 1
    assert len(responses[1]) > 1


def test_weights_change_in_the_middle_of_a_sequence_and_every_token_says_which_made_it(make_model, tokens) -> None:
    model, other = make_model(seed=0), make_model(seed=1)
    reference = make_model(seed=0)
    prompt = tuple(tokens(7).tolist())
    engine = engine_of(model, end_token=NEVER)
    engine.submit(samples_of(0, prompt, 2, 10))
    for _ in range(4):
        engine.step()
    load(engine, other.state_dict(), version=5)
    assert engine.version == 5
    for completed in run(engine).values():
        # The distribution of the fifth token was there already when the weights came.
        assert completed.tokens.versions.tolist() == [0] * 5 + [5] * 5
        old = teacher_forced(reference, prompt, completed.tokens.ids)
        np.testing.assert_allclose(completed.tokens.log_probs[:5], old[:5], atol=1e-4)
        assert np.abs(completed.tokens.log_probs[5:] - old[5:]).max() > 0.01


def test_a_replica_on_the_cpu_computes_with_the_published_bytes_themselves(make_model, tokens) -> None:
    """It never writes to them: other replicas read them. It holds them no longer than it computes with them."""
    model = make_model(seed=0)
    engine = engine_of(model, end_token=NEVER)
    segments: list[MemorySegment] = []
    for version in (1, 2):
        weights = received(make_model(seed=version).named_parameters(), version)
        segments.append(MemorySegment.open(weights.handle))
        first, size, before = (
            weights["lm_head.weight"].data_ptr(),
            weights.manifest.layout.size,
            segments[-1].data.copy(),
        )
        memory = range(first - size, first + size)
        load(engine, weights, version)
        del weights
        engine.submit(samples_of(version, tuple(tokens(7).tolist()), 2, 4))
        run(engine)
        assert all(parameter.data_ptr() in memory for parameter in model.parameters())
        np.testing.assert_array_equal(segments[-1].data, before)
    gc.collect()
    assert [segment.lock_for_writing() for segment in segments] == [True, False]


def test_a_sequence_starts_with_its_first_token_and_not_when_it_is_queued(make_model) -> None:
    engine = engine_of(make_model(), slots=2, end_token=NEVER)
    engine.submit(samples_of(0, (3,), 2, 3) + samples_of(1, (4,), 3, 2))
    assert engine.step().started == {(0, 0): 0, (0, 1): 0}
    load(engine, make_model(seed=1).state_dict(), version=1)
    started: list[tuple[SequenceId, int]] = []
    while engine.busy:
        started += engine.step().started.items()
    assert started == [((1, 0), 1), ((1, 1), 1), ((1, 2), 1)]


def test_a_step_counts_the_tokens_that_it_prefills_once_for_all_samples_of_a_prompt(make_model, tokens) -> None:
    engine = engine_of(make_model(), slots=4, end_token=NEVER)
    engine.submit(samples_of(0, (3, 4, 5), 2, 3))
    step = engine.step()
    assert (step.tokens, step.prefilled, step.prefills) == (2, 3, True)
    step = engine.step()
    assert (step.tokens, step.prefilled, step.prefills) == (2, 0, False)
    taken = engine.take([(0, 0)])
    engine.submit([dataclasses.replace(samples_of(0, (3, 4, 5), 1, 9)[0], kept=taken[0, 0])])
    assert engine.step().prefilled == 3 + 2


def test_more_samples_than_slots_start_once_each(make_model) -> None:
    engine = engine_of(make_model(), slots=2, end_token=NEVER)
    engine.submit(samples_of(0, (3,), 5, 2))
    started: list[SequenceId] = []
    while engine.busy:
        started += engine.step().started
    assert started == [(0, index) for index in range(5)]


@pytest.mark.parametrize("experts", [pytest.param(0, id="dense"), pytest.param(4, id="mixture of experts")])
def test_a_greedy_sequence_continues_in_another_engine_as_if_it_had_stayed(make_model, tokens, experts) -> None:
    prompt = tuple(tokens(7).tolist())
    request = SequenceRequest((3, 1), prompt, 20, GREEDY)
    stays, source, target = (engine_of(make_model(experts=experts), end_token=NEVER) for _ in range(3))
    stays.submit([request])
    [expected] = run(stays).values()
    source.submit([request, *samples_of(4, prompt, 1, 20)])
    for _ in range(8):
        source.step()
    taken = source.take([(3, 1)])
    assert taken.keys() == {(3, 1)}
    assert taken[3, 1].ids.tolist() == expected.tokens.ids[:8].tolist()
    load(target, make_model(experts=experts).state_dict(), version=4)  # the same weights, by another name
    target.submit([dataclasses.replace(request, kept=taken[3, 1])])
    [completed] = run(target).values()
    assert (completed.sequence, completed.truncated) == ((3, 1), True)
    assert completed.tokens.ids.tolist() == expected.tokens.ids.tolist()
    assert_same(completed.tokens[:8], taken[3, 1])
    assert completed.tokens.versions.tolist() == [0] * 8 + [4] * 12
    by_hand = teacher_forced(make_model(experts=experts), prompt, completed.tokens.ids)
    np.testing.assert_allclose(completed.tokens.log_probs, by_hand, atol=1e-4)
    assert run(source).keys() == {(4, 0)}  # nothing of it is left behind


def test_after_a_move_to_other_weights_each_token_has_the_log_probability_of_its_own(make_model, tokens) -> None:
    prompt = tuple(tokens(9).tolist())
    source, target = (engine_of(make_model(), end_token=NEVER) for _ in range(2))
    load(source, make_model(seed=1).state_dict(), version=1)
    load(target, make_model(seed=2).state_dict(), version=2)
    source.submit(samples_of(0, prompt, 3, 24, Sampling(temperature=0.7)))
    for _ in range(10):
        source.step()
    taken = source.take([(0, 0), (0, 2)])
    target.submit([SequenceRequest(name, prompt, 24, Sampling(temperature=0.7), kept) for name, kept in taken.items()])
    finished = run(target)
    assert finished.keys() == {(0, 0), (0, 2)}
    for name, completed in finished.items():
        assert_same(completed.tokens[:10], taken[name])
        assert completed.tokens.versions.tolist() == [1] * 10 + [2] * 14
        for seed, part in ((1, slice(0, 10)), (2, slice(10, 24))):
            expected = teacher_forced(make_model(seed=seed), prompt, completed.tokens.ids, 0.7)
            np.testing.assert_allclose(completed.tokens.log_probs[part], expected[part], atol=1e-4)


def test_a_kept_sequence_and_new_samples_of_its_group_are_admitted_together(make_model, tokens) -> None:
    model, prompt = make_model(), tuple(tokens(6).tolist())
    before = engine_of(model, end_token=NEVER)
    before.submit(samples_of(0, prompt, 1, 12, GREEDY))
    [whole] = run(before).values()
    new = samples_of(0, prompt, 4, 12, GREEDY)
    kept = {1: whole.tokens[:5], 3: whole.tokens[:8]}  # two lengths, between new ones
    engine = engine_of(model, end_token=NEVER)
    engine.submit([dataclasses.replace(request, kept=kept.get(request.sequence[1], NO_TOKENS)) for request in new])
    first = engine.step()
    assert first.started == {(0, 0): 0, (0, 2): 0}  # the others have their first token
    assert first.tokens == 4
    finished = run(engine)
    assert len(finished) == 4
    for completed in finished.values():
        assert completed.tokens.ids.tolist() == whole.tokens.ids.tolist()
        np.testing.assert_allclose(completed.tokens.log_probs, whole.tokens.log_probs, atol=1e-4)


def test_progress_gives_every_new_token_once_wherever_its_slot_moves(make_model) -> None:
    engine = engine_of(make_model(), slots=4, end_token=NEVER)
    # The first slots empty first, so that the last ones move, and what waits fills up.
    engine.submit([SequenceRequest((0, index), (3, 4), limit) for index, limit in enumerate((2, 4, 11, 12, 9, 10))])
    parts: dict[SequenceId, list[GeneratedTokens]] = {}
    finished: dict[SequenceId, Completed] = {}
    for step in range(1, 40):
        finished |= {completed.sequence: completed for completed in engine.step().finished}
        if step % 3 == 0:
            for name, grown in engine.progress().items():
                assert name not in finished
                assert len(grown) > 0
                parts.setdefault(name, []).append(grown)
            assert engine.progress() == {}
    assert len(finished) == 6
    assert parts.keys() == finished.keys() - {(0, 0)}  # over before anybody asked
    for name, given_so_far in parts.items():
        reported = GeneratedTokens.join(given_so_far)
        assert len(reported) >= len(finished[name].tokens) - 3
        assert_same(reported, finished[name].tokens[: len(reported)])


def test_tokens_that_a_sequence_came_with_do_not_count_as_progress(make_model) -> None:
    source, target = engine_of(make_model(), end_token=NEVER), engine_of(make_model(), end_token=NEVER)
    source.submit(samples_of(0, (3, 4), 1, 12))
    for _ in range(5):
        source.step()
    kept = source.take([(0, 0)])[0, 0]
    assert source.progress() == {}
    target.submit([SequenceRequest((0, 0), (3, 4), 12, kept=kept)])
    for _ in range(2):
        target.step()
    [grown] = target.progress().values()
    [completed] = run(target).values()
    assert_same(grown, completed.tokens[5:7])


def test_what_waits_is_taken_with_the_tokens_it_came_with_and_what_is_over_or_unknown_not_at_all(make_model) -> None:
    engine = engine_of(make_model(), slots=1, end_token=NEVER)
    kept = GeneratedTokens(np.array([5, 6], np.int32), np.array([-1, -2], np.float32), VersionRuns.of([0, 3]))
    engine.submit(
        [
            SequenceRequest((0, 0), (3,), 1),
            SequenceRequest((0, 1), (3,), 9),
            SequenceRequest((1, 0), (3,), 9, kept=kept),
            SequenceRequest((1, 1), (3,), 9),
        ]
    )
    [over] = engine.step().finished
    engine.step()
    taken = engine.take([(0, 0), (0, 1), (1, 0), (1, 1), (7, 7)])
    assert over.sequence == (0, 0)
    assert {name: len(tokens) for name, tokens in taken.items()} == {(0, 1): 1, (1, 0): 2, (1, 1): 0}
    assert_same(taken[1, 0], kept)
    assert not engine.busy
    assert engine.take([(0, 1)]) == {}


def test_weights_that_do_not_fit_are_refused_by_name_and_nothing_is_loaded(make_model) -> None:
    engine = engine_of(make_model())
    weights = dict(make_model(seed=1).state_dict())
    weights["extra.weight"] = weights.pop("lm_head.weight")
    with pytest.raises(ValueError, match=r"version 3 .*missing \['lm_head.weight'\], unexpected \['extra.weight'\]"):
        load(engine, weights, version=3)
    assert engine.version == 0


def adapters_of(model, scale: float, *, seed: int = 0) -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)
    rows, columns = model.get_submodule(ADAPTED).weight.shape
    return {
        f"{ADAPTED}.lora_A": torch.randn(2, columns, generator=chance),
        f"{ADAPTED}.lora_B": torch.randn(rows, 2, generator=chance),
        "lora_scale": torch.tensor(scale),
    }


def with_adapters(model, adapters: dict[str, torch.Tensor]) -> Any:
    """The library's model with the product of the adapters added to its weights."""
    layer = model.get_submodule(ADAPTED)
    product = adapters[f"{ADAPTED}.lora_B"] @ adapters[f"{ADAPTED}.lora_A"]
    layer.weight.data += adapters["lora_scale"] * product
    return model


def test_adapters_take_the_place_of_those_before_them_and_whole_weights_are_a_new_base(make_model, tokens) -> None:
    model, prompt = make_model(), tuple(tokens(7).tolist())
    engine = engine_of(model, end_token=NEVER)
    first, second = adapters_of(model, 0.5), adapters_of(model, 2.0, seed=1)
    other = dict(make_model(seed=1).named_parameters())
    versions = [
        (first, with_adapters(make_model(), first)),
        (second, with_adapters(make_model(), second)),
        (first, with_adapters(make_model(), first)),
        (other, make_model(seed=1)),
        (second, with_adapters(make_model(seed=1), second)),
        (adapters_of(model, 0.0), make_model(seed=1)),
    ]
    for version, (weights, expected) in enumerate(versions, 1):
        load(engine, weights, version)
        assert engine.version == version
        engine.submit(samples_of(version, prompt, 1, 12))
        [completed] = run(engine).values()
        by_hand = teacher_forced(expected, prompt, completed.tokens.ids)
        np.testing.assert_allclose(completed.tokens.log_probs, by_hand, atol=1e-4)


def test_adapters_change_what_a_bfloat16_model_computes_however_small_they_are(make_model) -> None:
    """Added to the weights, such a change would be lost: half of the spacing of their neighbours is above it."""
    model = make_model().bfloat16()
    adapters = adapters_of(model, 2.0**-11)
    weight = model.get_submodule(ADAPTED).weight
    product = adapters["lora_scale"] * adapters[f"{ADAPTED}.lora_B"] @ adapters[f"{ADAPTED}.lora_A"]
    lost = (weight.float() + product).to(torch.bfloat16) == weight
    assert lost.float().mean() > 0.5
    load(engine_of(model), adapters, 1)
    layer = model.get_submodule(ADAPTED)
    x = torch.randn(64, layer.in_features, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        plain = torch.nn.functional.linear(x, layer.weight)
        change, expected = (layer(x) - plain).float(), x.float() @ product.T
    assert (change.flatten() @ expected.flatten() / expected.square().sum()).item() == pytest.approx(1, abs=0.1)


def test_adapters_that_do_not_fit_are_refused_by_name_and_nothing_is_loaded(make_model) -> None:
    model = make_model()
    engine, adapters = engine_of(model), adapters_of(model, 1.0)
    adapters["model.layers.0.gone.lora_A"] = adapters["model.layers.3.self_attn.q_proj.lora_A"]
    with pytest.raises(ValueError, match=r"adapters of version 3 do not fit .*model.layers.0.gone.weight None with"):
        load(engine, adapters, version=3)
    assert engine.version == 0


def test_a_tensor_of_another_shape_is_refused_even_where_a_copy_would_stretch_it(make_model) -> None:
    engine = engine_of(make_model())
    weights = dict(make_model(seed=1).state_dict())
    weights["model.norm.weight"] = weights["model.norm.weight"][:1]
    with pytest.raises(ValueError, match=r"of another shape \['model.norm.weight'\]"):
        load(engine, weights, version=3)
    assert engine.version == 0


def request_of(prompt: Sequence[int], limit: int, kept: GeneratedTokens = NO_TOKENS) -> SequenceRequest:
    return SequenceRequest((7, 0), np.array(prompt, np.int32), limit, kept=kept)


PREFIX = GeneratedTokens(np.array([5, 6], np.int32), np.array([-1, -2], np.float32), VersionRuns.of([0, 3]))


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (
            request_of((3, 4, 5), 94),
            "prompt 3 + response 94 tokens exceed the engine's 96; lower data.maxPromptTokens or",
        ),
        (request_of((), 9), "the prompt is empty"),
        (request_of((3,), 2, PREFIX), "the response has 2 tokens already, and its limit is 2"),
        (
            request_of((3, 999), 9),
            "token 999 is not one of the model's 23; the tokenizer and the model do not fit together",
        ),
        (request_of((3, -1), 9), "token -1 is not one of the model's 23"),
        (
            request_of((3,), 9, dataclasses.replace(PREFIX, ids=np.array([5, 23], np.int32))),
            "token 23 is not one of",
        ),
    ],
    ids=["too long", "empty", "complete", "outside", "negative", "kept outside"],
)
def test_a_request_that_cannot_be_generated_is_refused_by_name_and_the_others_are_generated(
    make_model, request_: SequenceRequest, why: str
) -> None:
    engine = engine_of(make_model())
    [refused] = engine.submit([*samples_of(8, (3, 4), 2, 9), request_, *samples_of(9, (3, 4), 1, 9)])
    assert (refused.sequence, refused.reason, refused.truncated) == ((7, 0), EndReason.ERROR, False)
    assert refused.error.startswith(f"group 7: {why}")
    assert_same(refused.tokens, request_.kept)
    assert run(engine).keys() == {(8, 0), (8, 1), (9, 0)}


def test_a_stop_token_of_a_request_ends_its_sequence_and_no_other(make_model) -> None:
    """Sequences have their own stop tokens, wherever their slots move, and the end token besides."""
    engine = engine_of(make_model(), slots=4)
    stops = [(), (5,), (6, 7, 8), (), (9, 10)]
    names = {(index, sample): stops[index] for index in range(5) for sample in range(6)}
    engine.submit([SequenceRequest(name, (3, 4), 30, Sampling(stop=stop)) for name, stop in names.items()])
    finished = run(engine)
    ended = Counter[int]()
    for name, completed in finished.items():
        ids = completed.tokens.ids.tolist()
        ends = {END, *names[name]}
        assert not ends & set(ids[:-1])
        assert completed.reason == (EndReason.STOP if ids[-1] in ends else EndReason.LENGTH)
        ended[ids[-1]] += 1
    assert ended[5]
    assert ended.keys() & {6, 7, 8}
    assert ended.keys() & {9, 10}
    without_stop = [completed.tokens.ids.tolist() for name, completed in finished.items() if not names[name]]
    assert any({5, 6, 7, 8, 9, 10} & set(ids) for ids in without_stop)


def test_tokens_of_the_environment_are_continued_and_never_changed(make_model, tokens) -> None:
    prompt = tuple(tokens(7).tolist())
    engine = engine_of(make_model(), end_token=NEVER)
    load(engine, make_model(seed=1).state_dict(), 4)
    versions = VersionRuns.of([0, 0, ENVIRONMENT_VERSION, ENVIRONMENT_VERSION])
    kept = GeneratedTokens(np.array([5, 6, 7, 8], np.int32), np.array([-1, -2, 0, 0], np.float32), versions)
    engine.submit([SequenceRequest((0, 0), prompt, 12, kept=kept)])
    assert engine.step().started == {}
    [completed] = run(engine).values()
    assert_same(completed.tokens[:4], kept)
    assert completed.tokens.versions[4:].tolist() == [4] * 8
    by_hand = teacher_forced(make_model(seed=1), prompt, completed.tokens.ids)
    np.testing.assert_allclose(completed.tokens.log_probs[4:], by_hand[4:], atol=1e-4)


def test_the_token_room_is_that_of_the_free_slots(make_model) -> None:
    engine = engine_of(make_model(), slots=3, end_token=NEVER)
    assert engine.token_room == 3 * 96
    engine.submit(samples_of(0, (3,), 2, 2))
    assert engine.token_room == 96
    engine.submit(samples_of(1, (3,), 2, 2))
    assert engine.token_room == 0
    run(engine)
    assert engine.token_room == 3 * 96


def test_a_received_version_is_not_used_before_its_commit(make_model) -> None:
    engine = engine_of(make_model(), end_token=NEVER)
    weights = make_model(seed=1).state_dict()
    engine.receive(weights, 1)
    engine.submit(samples_of(0, (3, 4), 1, 4, GREEDY))
    [before] = run(engine).values()
    assert before.tokens.versions.tolist() == [0] * 4
    old = teacher_forced(make_model(), (3, 4), before.tokens.ids)
    np.testing.assert_allclose(before.tokens.log_probs, old, atol=1e-4)
    engine.discard()
    with pytest.raises(ValueError, match="version 1 was not received"):
        engine.commit(1)
    engine.receive(weights, 2)
    with pytest.raises(ValueError, match="version 1 was not received"):
        engine.commit(1)
    assert engine.version == 0
    engine.commit(2)
    assert engine.version == 2


def test_weights_of_another_type_are_refused_by_name_and_nothing_is_loaded(make_model) -> None:
    engine = engine_of(make_model())
    weights = dict(make_model(seed=1).state_dict())
    weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.int8)
    with pytest.raises(ValueError, match=r"version 3 .*no floating-point numbers \['model.norm.weight'\]"):
        engine.receive(weights, 3)
    with pytest.raises(ValueError, match="version 3 was not received"):
        engine.commit(3)


class History:
    """Two engines, and what has happened to every sequence on either of them."""

    def __init__(self, engines: Sequence[TorchEngine]) -> None:
        self.engines = engines
        self.requests: dict[SequenceId, SequenceRequest] = {}
        self.dropped: set[SequenceId] = set()
        self.kept: dict[SequenceId, GeneratedTokens] = {}
        self.started: Counter[SequenceId] = Counter()
        self.finished: dict[SequenceId, Completed] = {}

    def submit(self, engine: TorchEngine, requests: Sequence[SequenceRequest]) -> None:
        self.requests |= {request.sequence: request for request in requests}
        engine.submit(requests)

    def drop(self, engine: TorchEngine, name: SequenceId) -> None:
        self.dropped |= engine.take([name, (999, 0)]).keys()

    def hand_over(self, source: TorchEngine, target: TorchEngine, names: Sequence[SequenceId]) -> None:
        taken = source.take(names)
        self.kept |= taken
        target.submit([dataclasses.replace(self.requests[name], kept=tokens) for name, tokens in taken.items()])

    def step(self, engine: TorchEngine) -> None:
        output = engine.step()
        self.started.update(output.started.keys())
        for completed in output.finished:
            assert completed.sequence not in self.finished
            self.finished[completed.sequence] = completed

    def end(self) -> None:
        while any(engine.busy for engine in self.engines):
            for engine in self.engines:
                self.step(engine)


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_sequence_finishes_exactly_once_whatever_happens_around_it(make_model, data: st.DataObject) -> None:
    """On two engines: sequences are submitted, dropped, and moved from either to the other."""
    history = History([engine_of(make_model(), slots=data.draw(st.integers(1, 6))) for _ in range(2)])
    weights = make_model(seed=1).state_dict()
    moves = st.sampled_from(["submit", "step", "step", "step", "drop", "move", "move", "load", "progress"])
    for group, move in enumerate(data.draw(st.lists(moves, max_size=30))):
        here, there = data.draw(st.permutations(history.engines))
        under_way = sorted(history.requests)
        match move:
            case "submit":
                prompt = data.draw(st.lists(st.integers(3, 20), min_size=1, max_size=5))
                samples, limit = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 6)))
                history.submit(
                    here, samples_of(group, prompt, samples, limit, TRUNCATED if group % 2 else AS_THE_MODEL_SAYS)
                )
            case "drop" if under_way:
                history.drop(here, data.draw(st.sampled_from(under_way)))
            case "move" if under_way:
                names = data.draw(st.lists(st.sampled_from(under_way), unique=True, max_size=4))
                history.hand_over(here, there, names)
            case "load":
                load(here, weights, here.version + 1)
            case "progress":
                assert not here.progress().keys() & history.finished.keys()
            case "step":
                history.step(here)
    history.end()
    assert history.finished.keys() == history.requests.keys() - history.dropped
    assert history.started.keys() >= history.finished.keys()
    assert set(history.started.values()) <= {1}
    for name, completed in history.finished.items():
        tokens, kept = completed.tokens, history.kept.get(name)
        assert 1 <= len(tokens) <= history.requests[name].max_tokens
        assert len(tokens.ids) == len(tokens.log_probs) == len(tokens.versions)
        assert (tokens.log_probs <= 0).all()
        assert END not in tokens.ids[:-1]
        assert_candidates(tokens, history.requests[name].sampling)
        if kept is None:
            assert (np.diff(tokens.versions) >= 0).all()
        else:
            assert_same(tokens[: len(kept)], kept)
    for engine in history.engines:
        assert engine.step() == StepOutput()
        assert engine.progress() == {}


def test_a_probe_computes_the_log_probs_of_its_tokens_next_to_sequences_that_run(make_model) -> None:
    model, probe = make_model(), [np.array(ids, np.int32) for ids in ((3, 4, 5, 6, 7), (9, 8))]
    alone, engine = engine_of(make_model(), end_token=NEVER), engine_of(make_model(), end_token=NEVER)
    for each in (alone, engine):
        each.submit(samples_of(0, (3, 4, 5), 2, 6, GREEDY))
        each.step()
    engine.probe(probe)
    result = engine.step().probed
    assert result is not None
    for ids, log_probs in zip(probe, result, strict=True):
        tokens = torch.from_numpy(ids.astype(np.int64))
        with torch.no_grad():
            logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
        expected = logits.log_softmax(-1).gather(1, tokens[1:, None]).squeeze(1)
        np.testing.assert_allclose(log_probs, expected, atol=1e-4)
    alone.step()
    expected_tokens, tokens = run(alone), run(engine)
    for name, completed in expected_tokens.items():
        assert_same(tokens[name].tokens, completed.tokens)


def test_a_commit_drops_a_probe_that_has_not_ended(make_model) -> None:
    engine = engine_of(make_model())
    engine.probe([np.array([3, 4, 5], np.int32)])
    assert engine.busy
    load(engine, make_model(seed=1).state_dict(), 1)
    assert not engine.busy
    assert engine.step().probed is None


def test_checksums_show_which_parameter_differs(make_model) -> None:
    engine, same = engine_of(make_model()), engine_of(make_model())
    name = "model.layers.0.mlp.up_proj.weight"
    before = engine.checksums()
    assert before == same.checksums()
    with torch.no_grad():
        engine._parameters[name][0, 0] += 1e-3
    after = engine.checksums()
    assert {each for each in before if before[each] != after[each]} == {name}


# Sleep.


def generated_by(engine: TorchEngine) -> list[list[int]]:
    """The greedy tokens of some responses."""
    engine.submit([*samples_of(0, (3, 4, 5), 2, 6, GREEDY), *samples_of(1, (6, 7), 1, 9, GREEDY)])
    return [completed.tokens.ids.tolist() for _, completed in sorted(run(engine).items())]


def test_a_sleeping_engine_holds_a_tenth_of_its_memory_at_most_and_generates_as_before_with_the_next_version(
    make_model,
):
    weights = {name: values.clone() for name, values in make_model(seed=1).named_parameters()}
    engine, rested = engine_of(make_model(), end_token=NEVER), engine_of(make_model(), end_token=NEVER)
    assert generated_by(rested) == generated_by(engine)
    change = rested.sleep()
    assert change.after <= 0.1 * change.before, f"{change.after} of {change.before} bytes"
    rested.wake()
    for each in (engine, rested):
        load(each, {name: values.clone() for name, values in weights.items()}, 1)
    assert generated_by(rested) == generated_by(engine)


def test_weights_of_another_shape_do_not_fit_an_engine_that_slept(make_model):
    engine = engine_of(make_model())
    engine.sleep()
    engine.wake()
    weights = dict(make_model().named_parameters())
    name = next(iter(weights))
    with pytest.raises(ValueError, match=name):
        engine.receive(weights | {name: weights[name][:1]}, 1)


def test_an_engine_whose_adapters_train_has_its_base_weights_after_sleep(make_model):
    random = torch.Generator().manual_seed(0)
    model = make_model()
    layer = model.get_submodule(ADAPTED)
    adapters = {
        f"{ADAPTED}.{DOWN}": torch.randn(2, layer.in_features, generator=random),
        f"{ADAPTED}.{UP}": torch.randn(layer.out_features, 2, generator=random),
        SCALE: torch.tensor(2.0, dtype=torch.float64),
    }
    engine, rested = engine_of(make_model(), end_token=NEVER), engine_of(model, end_token=NEVER)
    for each in (engine, rested):
        load(each, adapters, 1)
    change = rested.sleep()
    assert change.after <= 0.1 * change.before, f"{change.after} of {change.before} bytes"
    rested.wake()
    load(rested, adapters, 1)
    assert generated_by(rested) == generated_by(engine)

"""The experts that the Torch engine records: those that the routers of the library's model choose for the same inputs."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from qwen35_trainer.data.expert_choices import replayed
from qwen35_trainer.pipeline.events import SequenceId
from qwen35_trainer.rollout.rollout_engine import Completed, GeneratedTokens, SequenceRequest
from qwen35_trainer.rollout.torch import TorchEngine
from tests.models import qwen3_moe
from tests.rollout.laws import Replay
from tests.rollout.loading import load

EXPERTS, NEVER = 4, 10_000
MIN_GAP = 1e-5
"""Difference of the probabilities of the last chosen expert and the next one, below which rounding may choose either."""


def engine_of(model: Any, *, slots: int = 8) -> TorchEngine:
    return TorchEngine(model, end_token=NEVER, slots=slots, max_length=96, seed=0, records_choices=True)


def run(engine: TorchEngine) -> dict[SequenceId, Completed]:
    finished: dict[SequenceId, Completed] = {}
    while engine.busy:
        finished |= {completed.sequence: completed for completed in engine.step().finished}
    return finished


def routed(model: Any, inputs: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """The experts that the library's model chooses for each input, (inputs, layers, k), ascending, and whether rounding cannot
    change them, (inputs, layers)."""
    probabilities: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _gate, _inputs, out: probabilities.append(out[0].softmax(-1)))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(input_ids=torch.tensor([list(inputs)]), use_cache=False)
    for hook in hooks:
        hook.remove()
    best = torch.stack(probabilities, dim=1).sort(dim=-1, descending=True)
    sure = (best.values[..., 1] - best.values[..., 2]) > MIN_GAP
    return best.indices[..., :2].sort(dim=-1).values.numpy(), sure.numpy()


def assert_routed(choices: np.ndarray | None, model: Any, inputs: Sequence[int]) -> None:
    expected, sure = routed(model, inputs)
    assert choices is not None
    assert choices.shape == expected.shape
    assert sure.mean() > 0.99
    np.testing.assert_array_equal(np.sort(choices, axis=-1)[sure], expected[sure])


@pytest.mark.parametrize("family", ["Qwen3.5", "Qwen3"])
def test_every_sequence_has_the_experts_of_its_own_inputs_wherever_its_slot_moves(make_model, family) -> None:
    """Samples that share a prefill, sequences of other lengths that end before others, and some that wait for slots."""
    model, library = (make_model(experts=EXPERTS) if family == "Qwen3.5" else qwen3_moe.model() for _ in range(2))
    engine, random = engine_of(model, slots=4), np.random.default_rng(0)
    requests = [
        SequenceRequest((group, index), random_prompt, int(random.integers(1, 20)))
        for group in range(3)
        for random_prompt in [random.integers(3, 20, 1 + 4 * group).astype(np.int32)]
        for index in range(3)
    ]
    engine.submit(requests)
    finished = run(engine)
    assert len(finished) == len(requests)
    for request in requests:
        tokens = finished[request.sequence].tokens
        assert tokens.choices is not None
        assert tokens.choices.dtype == np.uint8
        assert_routed(tokens.choices, library, [*request.prompt.tolist(), *tokens.ids.tolist()[:-1]])


def test_each_token_has_the_experts_of_the_weights_that_computed_it(make_model) -> None:
    """Weights change twice on the way. The states that earlier weights have left stay."""
    models = {seed: make_model(experts=EXPERTS, seed=seed) for seed in range(3)}
    engine, prompt = engine_of(make_model(experts=EXPERTS)), [5, 9, 3, 7]
    engine.submit([SequenceRequest((0, 0), np.array(prompt, np.int32), 12)])
    for version in (1, 2):
        for _ in range(4):
            engine.step()
        load(engine, models[version].state_dict(), version)
    [completed] = run(engine).values()
    tokens, replay, seen = completed.tokens, Replay(models, 32), list[list[torch.Tensor]]()
    for layer in replay._model.model.layers:
        rows = list[torch.Tensor]()
        layer.mlp.gate.register_forward_hook(lambda _gate, _inputs, out, rows=rows: rows.append(out[-1]))
        seen.append(rows)
    seeds = tokens.versions.tolist()
    assert set(seeds) == {0, 1, 2}
    replay.logits(seeds, prompt, tokens.ids.tolist())
    expected = torch.stack([torch.cat(rows) for rows in seen], dim=1).numpy()
    np.testing.assert_array_equal(np.sort(tokens.choices, axis=-1), np.sort(expected, axis=-1))
    alone, _ = routed(make_model(experts=EXPERTS), [*prompt, *tokens.ids.tolist()[:-1]])
    first = len(prompt) + seeds.index(1) - 1
    assert (np.sort(tokens.choices, axis=-1)[first:] != alone[first:]).any(), "the first weights would pass, too"


def rows_of(parts: Sequence[tuple[np.ndarray | None, int]], prompt: int, response: int) -> np.ndarray:
    """What the trainer replays for a sequence."""
    return replayed([(table, end) for table, end in parts if table is not None], prompt=prompt, response=response)


def test_a_sequence_that_continues_elsewhere_keeps_the_experts_with_which_its_tokens_were_computed(make_model) -> None:
    """The last of its tokens are cut off before it continues with other weights."""
    source, target = (engine_of(make_model(experts=EXPERTS)) for _ in range(2))
    prompt = [5, 9, 3]
    request = SequenceRequest((0, 0), np.array(prompt, np.int32), 14)
    source.submit([request, dataclasses.replace(request, sequence=(0, 1), max_tokens=3)])
    for _ in range(8):
        source.step()
    taken = source.take([(0, 0)])[0, 0]
    kept = dataclasses.replace(taken[:6], choices=None)
    load(target, make_model(experts=EXPERTS, seed=1).state_dict(), 1)
    target.submit([dataclasses.replace(request, kept=kept)])
    [completed] = run(target).values()
    tokens, first_new = completed.tokens, len(prompt) + 6 - 1
    inputs = [*prompt, *tokens.ids.tolist()[:-1]]
    rows = rows_of([(taken[:6].choices, 6), (tokens[6:].choices, len(tokens))], len(prompt), len(tokens))
    before, _ = routed(make_model(experts=EXPERTS), inputs)
    after, _ = routed(make_model(experts=EXPERTS, seed=1), inputs)
    np.testing.assert_array_equal(np.sort(rows[:first_new], axis=-1), before[:first_new])
    np.testing.assert_array_equal(np.sort(rows[first_new:], axis=-1), after[first_new:])
    assert (before[:first_new] != after[:first_new]).any()


def test_what_the_engine_reports_on_the_way_are_parts_of_the_whole(make_model) -> None:
    engine = engine_of(make_model(experts=EXPERTS))
    engine.submit([SequenceRequest((0, index), np.array([5, 9, 3], np.int32), 9 + index) for index in range(3)])
    parts: dict[SequenceId, list[GeneratedTokens]] = {(0, index): [] for index in range(3)}
    for _ in range(8):
        engine.step()
        for name, tokens in engine.progress().items():
            parts[name].append(tokens)
    for name, completed in run(engine).items():
        reported = GeneratedTokens.join(parts[name])
        assert completed.tokens.choices is not None
        np.testing.assert_array_equal(reported.choices, completed.tokens[: len(reported)].choices)


def test_nothing_is_recorded_unless_it_is_wanted(make_model) -> None:
    engine = TorchEngine(make_model(experts=EXPERTS), end_token=NEVER, slots=2, max_length=32, seed=0)
    engine.submit([SequenceRequest((0, 0), np.array([4, 5], np.int32), 4)])
    [completed] = run(engine).values()
    assert completed.tokens.choices is None

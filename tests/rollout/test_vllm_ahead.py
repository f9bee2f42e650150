"""The engine on vLLM that schedules ahead, with vLLM itself on the CPU (`ahead.py`): a mixture of experts whose choices are recorded."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from qwen35_trainer.manifest import VLLMSpec
from qwen35_trainer.pipeline.events import SequenceId
from qwen35_trainer.rollout.rollout_engine import (
    Completed,
    EndReason,
    Sampling,
    StepOutput,
)
from qwen35_trainer.rollout.vllm_versions import may_schedule_ahead
from tests.rollout.ahead import scheduling_ahead
from tests.rollout.laws import UnderTest, check_histories, check_versions
from tests.rollout.routed import Compared, library_logits
from tests.rollout.test_vllm import (
    FIRST_HISTORY,
    GREEDY,
    HISTORIES,
    MAX_LENGTH,
    SLOTS,
    Replica,
    engine_of,
    laws_of,
    library_model,
    prompt_of,
)
from tests.rollout.test_vllm_replay import (
    WITH_EXPERTS,
    assert_complete,
    assert_like_the_library,
    choices_of,
    inputs_of,
    lasting_prompt,
)

STEP_TOKENS = 512
LONG = 600
"""Tokens of a prompt that takes two steps. Its first block can come from the prefix cache."""


@pytest.fixture(scope="module")
def built() -> Iterator[Replica]:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    if not may_schedule_ahead():
        pytest.skip("with this version vLLM does not schedule ahead")
    models = {seed: library_model(seed, WITH_EXPERTS) for seed in (0, 1)}
    options = VLLMSpec(maxBatchedTokens=STEP_TOKENS)
    with (
        scheduling_ahead(),
        engine_of(models[0].config, records_choices=True, options=options) as (engine, core),
    ):
        yield Replica(engine, core, models, set())


@pytest.fixture
def replica(built: Replica) -> Iterator[Replica]:
    """The engine with the weights of seed 0, and afterwards without sequences."""
    built.load(0)
    yield built
    built.clear()


@pytest.fixture
def under_test(replica: Replica) -> Iterator[UnderTest]:
    """Log-probs differ more than without experts: where two are almost equally likely, rounding chooses another one."""
    test = replace(laws_of(replica), starts_ahead=1, mean_difference=0.04, history_difference=0.3, near_tie=0.4)
    yield test
    replica.loaded, replica.submitted = max(test.seeds), test.groups


def in_flight(replica: Replica) -> int:
    """The number of tokens that vLLM computes in steps whose output it has not processed."""
    return sum(
        scheduled.total_num_scheduled_tokens for _, scheduled, _ in replica.core.engine_core.engine_core.batch_queue
    )


def test_random_histories_keep_the_laws(under_test: UnderTest) -> None:
    assert check_histories(under_test, range(FIRST_HISTORY, FIRST_HISTORY + HISTORIES)) > 3 * HISTORIES


def test_a_sequence_that_spans_three_versions_has_the_log_probs_of_its_replay(under_test: UnderTest) -> None:
    check_versions(under_test)


def test_a_step_is_in_flight_between_two_calls_and_no_other_weights_are_loaded_before_it_ends(replica: Replica) -> None:
    version, prompt = replica.engine.version, lasting_prompt(replica, 5, 12)
    [name] = replica.submit(prompt, 12, GREEDY)
    assert replica.engine.step().tokens == 1
    assert in_flight(replica) == 1
    replica.engine.receive(replica.weights(1), version + 1)
    with pytest.raises(RuntimeError, match="a step of vLLM is in flight"):
        replica.engine.commit(version + 1)
    with pytest.raises(RuntimeError, match="a step of vLLM is in flight"):
        replica.engine.load_base(replica.weights(1))
    assert replica.engine.version == version
    assert replica.engine.settle().tokens == 1
    assert in_flight(replica) == 0
    assert replica.engine.settle() == StepOutput()
    assert replica.finish()[name].tokens.versions.runs == ((version, 12),)
    assert in_flight(replica) == 0, "nothing is computed for sequences that have ended"


def test_tokens_in_flight_at_a_commit_have_the_version_that_computed_them(replica: Replica) -> None:
    """Those of a running sequence, and the first one of a sequence whose prefill is in flight."""
    old, prompt = replica.engine.version, lasting_prompt(replica, 5, 12)
    [running] = replica.submit(prompt, 12, GREEDY)
    replica.steps(2)
    [starting] = replica.submit(prompt, 12, GREEDY)
    assert not replica.engine.step().started, "its first token is in flight"
    settled = replica.engine.settle()
    assert (settled.started, settled.tokens, settled.prefilled) == ({starting: old}, 2, len(prompt))
    new = replica.load(1)
    assert replica.engine.step().tokens == 2
    taken = replica.engine.take([running, starting])
    assert taken[running].versions.tolist() == [old] * 4 + [new]
    assert taken[starting].versions.tolist() == [old, new]


@pytest.mark.parametrize(("settles", "count"), [(True, 4), (False, 3)])
def test_a_taken_sequence_has_each_token_once(replica: Replica, settles: bool, count: int) -> None:
    """The token in flight is among them if the step was settled; otherwise it is computed again."""
    prompt = lasting_prompt(replica, 5, 12)
    [whole] = replica.generate(prompt, 12, GREEDY)
    [name] = replica.submit(prompt, 12, GREEDY)
    replica.steps(3)
    if settles:
        replica.engine.settle()
    taken = replica.engine.take([name])[name]
    assert taken.ids.tolist() == whole.tokens.ids[:count].tolist()
    [continued] = replica.generate(prompt, 12, GREEDY, kept=taken)
    assert continued.tokens.ids[:6].tolist() == whole.tokens.ids[:6].tolist(), "rounding may decide about later ones"


@pytest.mark.parametrize("act", ["take", "commit"])
def test_a_sequence_that_the_step_in_flight_ends_is_returned_once(replica: Replica, act: str) -> None:
    prompt, room = lasting_prompt(replica, 5, 12), replica.engine.token_room
    [name] = replica.submit(prompt, 3, GREEDY)
    assert replica.steps(2) == {}
    version = replica.engine.version
    [completed] = replica.engine.settle().finished
    assert (completed.sequence, completed.reason) == (name, EndReason.LENGTH)
    assert completed.tokens.versions.runs == ((version, 3),)
    if act == "take":
        assert replica.engine.take([name]) == {}
    else:
        replica.load(1)
    assert not replica.engine.busy
    assert replica.engine.step() == StepOutput()
    assert replica.engine.token_room == room


def test_a_sequence_that_is_taken_before_its_last_step_is_settled_has_not_ended(replica: Replica) -> None:
    prompt = lasting_prompt(replica, 5, 12)
    [name] = replica.submit(prompt, 3, GREEDY)
    replica.steps(2)
    assert len(replica.engine.take([name])[name]) == 2
    assert replica.engine.settle() == StepOutput()
    assert not replica.engine.busy


def test_a_probe_in_flight_is_dropped_by_a_commit_and_by_the_next_probe(replica: Replica) -> None:
    sequences = [np.array(prompt_of(LONG), np.int32)]
    replica.engine.probe(sequences)
    assert replica.engine.step().probing, "a part of it has been computed"
    assert in_flight(replica) == LONG - STEP_TOKENS
    replica.engine.probe(sequences)
    outputs = [replica.engine.step() for _ in range(3)]
    assert [output.probed is None for output in outputs] == [True, True, False], "the first is what was in flight"
    assert [output.probing for output in outputs] == [False, True, False]
    replica.engine.probe(sequences)
    replica.engine.step()
    replica.engine.probe(())
    assert replica.engine.settle() == StepOutput()
    replica.load(1)
    assert not replica.engine.busy


def test_a_step_counts_the_prefill_that_it_computed_and_not_the_one_in_flight(replica: Replica) -> None:
    replica.submit(prompt_of(LONG), 3)
    outputs = [replica.engine.step() for _ in range(3)]
    assert [output.prefilled for output in outputs] == [0, LONG, 0]
    assert [output.prefills for output in outputs] == [True, True, False]


def test_choices_are_those_of_the_librarys_routers_where_sequences_are_taken_in_flight(replica: Replica) -> None:
    """Their blocks are given to other sequences, which begin with cached blocks that they have filled, or fill them again."""
    random, prompts = np.random.default_rng(0), [prompt_of(LONG, seed) for seed in (6, 7)]
    owners: dict[SequenceId, int] = {}
    finished: dict[SequenceId, Completed] = {}
    for number in range(8):
        which = number % 2
        names = replica.submit(prompts[which], 6, Sampling(), samples=4)
        owners |= dict.fromkeys(names, which)
        finished |= replica.steps(int(random.integers(1, 4)))
        replica.engine.take(names[::2])
    finished |= replica.finish()
    for which, prompt in enumerate(prompts):
        responses = [completed.tokens for name, completed in finished.items() if owners[name] == which]
        assert len(responses) >= 8
        assert_like_the_library(replica, prompt, responses, 0)


def test_what_vllm_computes_again_changes_no_row_of_earlier_tokens(replica: Replica) -> None:
    """vLLM preempts all sequences and gives up their blocks while a step is in flight."""
    prompt = prompt_of(200)
    replica.submit(prompt, 12, samples=6)
    replica.steps(6)
    before = replica.engine.progress()
    assert in_flight(replica)
    assert replica.core.engine_core.reset_prefix_cache(True)
    finished = replica.finish()
    assert before.keys() == finished.keys()
    compared = Compared()
    for name, part in before.items():
        tokens = finished[name].tokens
        assert_complete(replica, prompt, tokens)
        np.testing.assert_array_equal(choices_of(tokens)[: len(choices_of(part))], choices_of(part))
        assert tokens.ids[: len(part)].tolist() == part.ids.tolist()
        compared.add(choices_of(tokens), library_logits(replica.models[0], inputs_of(prompt, tokens)))
    assert compared.equal_share > 0.9, compared


def test_vllm_decides_whether_it_schedules_ahead_and_a_manifest_can_switch_it_off(replica: Replica) -> None:
    from qwen35_trainer.rollout.vllm_core import CoreSettings, core_arguments

    arguments: list[dict[str, Any]] = []
    for extra in ({}, {"async_scheduling": False}):
        options = VLLMSpec(extraArguments=extra)
        settings = CoreSettings(
            slots=SLOTS, max_length=MAX_LENGTH, seed=5, memory_fraction=0.1, on_cpu=True, options=options
        )
        arguments.append(core_arguments(None, replica.models[0].config, settings))
    assert [each.get("async_scheduling") for each in arguments] == [None, False]

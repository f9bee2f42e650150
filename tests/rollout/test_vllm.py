"""The engine on vLLM, with vLLM itself: one engine for all tests of this file, on a tiny model with random weights."""

import contextlib
import copy
import gc
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from qwen35_trainer.manifest import LoRASpec, ModelSpec, VLLMSpec
from qwen35_trainer.manifest.rollout import MIN_VLLM_TEMPERATURE
from qwen35_trainer.models.qwen3_5 import classes
from qwen35_trainer.models.qwen3_5.build_model import configuration
from qwen35_trainer.pipeline.events import SequenceId
from qwen35_trainer.rollout import vllm
from qwen35_trainer.rollout.rollout_engine import (
    ENVIRONMENT_VERSION,
    NO_TOKENS,
    Completed,
    EndReason,
    GeneratedTokens,
    Sampling,
    SequenceRequest,
)
from qwen35_trainer.rollout.version_runs import VersionRuns
from qwen35_trainer.rollout.vllm import MIN_CPU_PREFILL, VLLMEngine
from qwen35_trainer.rollout.vllm_candidates import TIED_TOKENS
from qwen35_trainer.rollout.vllm_core import CoreSettings, build_core, replace_weights
from qwen35_trainer.rollout.vllm_environment import VARIABLES
from tests.profiles import ORDER, SOAK
from tests.rollout.laws import Replay, UnderTest, check_histories, check_versions
from tests.rollout.loading import load
from tests.rollout.older_processor import remove_instructions

remove_instructions(torch.cpu)  # the programs that import this module load no plugins

VOCABULARY, END, MAX_LENGTH, SLOTS = 23, 2, 640, 16
HISTORIES = 1000 if SOAK else 60
FIRST_HISTORY = 10_000 * int(ORDER or 0)
SHAPE = {"hiddenSize": 64, "headDim": 32, "linearHeadDim": 64, "initializerRange": 0.06}
GREEDY, AS_THE_MODEL_SAYS = Sampling(0.0), Sampling()


@dataclass
class Replica:
    """The engine, and a model of the library with the weights of the version that it has."""

    engine: VLLMEngine
    core: Any
    models: dict[int, Any]
    """Float32 models of the library by seed."""
    processes: set[int]
    """Processes that were started with it."""
    loaded: int = 0
    submitted: int = 0

    def weights(self, seed: int) -> dict[str, Any]:
        """Return the version of a seed's model."""
        return dict(self.models[seed].named_parameters())

    def load(self, seed: int) -> int:
        """Load the model of a seed as the next version."""
        self.loaded += 1
        load(self.engine, self.weights(seed), self.loaded)
        return self.loaded

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        sampling: Sampling = AS_THE_MODEL_SAYS,
        *,
        samples: int = 1,
        kept: GeneratedTokens = NO_TOKENS,
    ) -> list[SequenceId]:
        """Submit a group."""
        self.submitted += 1
        names = [(self.submitted, index) for index in range(samples)]
        ids = np.array(prompt, np.int32)
        self.engine.submit([SequenceRequest(name, ids, max_tokens, sampling, kept) for name in names])
        return names

    def steps(self, count: int) -> dict[SequenceId, Completed]:
        """Return what finishes in this number of steps."""
        outputs = [self.engine.step() for _ in range(count)]
        return {completed.sequence: completed for output in outputs for completed in output.finished}

    def finish(self, limit: int = 1000) -> dict[SequenceId, Completed]:
        """Step until nothing is left. Every sequence finishes once."""
        finished: dict[SequenceId, Completed] = {}
        for _ in range(limit):
            if not self.engine.busy:
                return finished
            for completed in self.engine.step().finished:
                assert completed.sequence not in finished
                finished[completed.sequence] = completed
        raise AssertionError(f"still busy after {limit} steps")

    def clear(self) -> None:
        self.engine.take([(group, index) for group in range(self.submitted + 1) for index in range(SLOTS + 2)])
        self.finish()

    def generate(
        self, prompt: Sequence[int], max_tokens: int, sampling: Sampling = AS_THE_MODEL_SAYS, **options: Any
    ) -> list[Completed]:
        names = self.submit(prompt, max_tokens, sampling, **options)
        finished = self.finish()
        return [finished[name] for name in names]


def text_model_name(name: str) -> str:
    """The name of a parameter or layer of vLLM as part of the text model. vLLM 0.23 has it inside a vision-language model."""
    return name.removeprefix("language_model.")


def library_model(seed: int, shape: Mapping[str, Any]) -> Any:
    spec = ModelSpec.model_validate({"name": "tiny", "source": {"random": shape}})
    config = configuration(spec, vocabulary=VOCABULARY, max_length=MAX_LENGTH, base=Path())
    torch.manual_seed(seed)
    model = classes.construct(config)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):  # fresh weights forget within a few positions, which would hide a lost state
            parameter.data.fill_(-3.0)
    return model.eval()


@contextlib.contextmanager
def process_restored() -> Iterator[None]:
    """vLLM changes functions of torch, the environment and the garbage collector of its process, which here is pytest's."""
    environment, threads, random = os.environ.copy(), torch.set_num_threads, torch.get_rng_state()
    kind = torch.get_default_dtype()  # the oldest version does not restore it if a model cannot be built
    synchronize, empty_cache = torch.accelerator.synchronize, torch.accelerator.empty_cache
    os.environ.update(VARIABLES)
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    _end_groups()  # another engine of this process has no group of experts if its model has none
    try:
        yield
    finally:
        _end_groups()
        torch.set_default_dtype(kind)
        torch.set_num_threads = threads
        torch.set_num_threads(count)
        torch.accelerator.synchronize, torch.accelerator.empty_cache = synchronize, empty_cache
        torch.set_rng_state(random)
        os.environ.clear()
        os.environ.update(environment)
        gc.unfreeze()


def _end_groups() -> None:
    """End the process groups of vLLM. An engine on one device works without them."""
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

    destroy_model_parallel()
    destroy_distributed_environment()


@contextlib.contextmanager
def running(shape: Mapping[str, Any], seeds: Sequence[int]) -> Iterator[Replica]:
    """An engine of a random model, and models of the library by seed."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    models = {seed: library_model(seed, SHAPE | shape) for seed in seeds}
    with engine_of(models[0].config) as (engine, core):
        after = {child.pid for child in psutil.Process().children(recursive=True)}
        yield Replica(engine, core, models, after - before)


@contextlib.contextmanager
def engine_of(
    config: Any,
    lora: LoRASpec | None = None,
    *,
    picture_tokens: int = 0,
    records_choices: bool = False,
    options: VLLMSpec | None = None,
) -> Iterator[tuple[VLLMEngine, Any]]:
    """An engine without weights, and its engine core. picture_tokens: of a prompt, at most; 0: it reads no pictures."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    settings = CoreSettings(
        slots=SLOTS,
        max_length=MAX_LENGTH,
        seed=5,
        memory_fraction=0.1,
        on_cpu=True,
        options=options or VLLMSpec(),
        lora=lora,
        picture_tokens=picture_tokens,
        records_choices=records_choices,
    )
    with process_restored():
        # vLLM shares tables of positions between models. Those of a tower that was left out have no values.
        from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT

        _ROPE_DICT.clear()
        core = build_core(config, settings)
        try:
            engine = VLLMEngine(
                core,
                config,
                end_token=END,
                max_length=MAX_LENGTH,
                on_cpu=True,
                lora=lora,
                reads_pictures=picture_tokens > 0,
                records_choices=records_choices,
            )
            yield engine, core
        finally:
            core.engine_core.shutdown()


@pytest.fixture(scope="module")
def built() -> Iterator[Replica]:
    with running({}, (0, 1)) as replica:
        yield replica


@pytest.fixture
def replica(built: Replica) -> Iterator[Replica]:
    """The engine with the weights of seed 0, and afterwards without sequences."""
    built.load(0)
    yield built
    built.clear()


def logits_of(model: Any, prompt: Sequence[int], response: np.ndarray) -> torch.Tensor:
    """(T, V) logits of the library's forward pass in float32, from which each token of a response is drawn."""
    ids = torch.tensor([*prompt, *response.tolist()])
    with torch.no_grad():
        return model(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1]


def log_probs_of(model: Any, prompt: Sequence[int], response: np.ndarray) -> np.ndarray:
    chosen = torch.from_numpy(response.astype(np.int64))[:, None]
    return logits_of(model, prompt, response).float().log_softmax(-1).gather(1, chosen).squeeze(1).numpy()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCABULARY, length).tolist()


def assert_greedy(model: Any, prompt: Sequence[int], ids: np.ndarray) -> float:
    """Each token is the library's most likely one, unless bfloat16 could decide otherwise.

    The two best logits are apart if the library's own logits change by at most a quarter of their difference when it
    computes in bfloat16. Returns the share of tokens for which they are.
    """
    logits = logits_of(model, prompt, ids)
    rounded = logits_of(copy.deepcopy(model).bfloat16(), prompt, ids).float()
    (best, second), chosen = logits.topk(2).values.T, torch.from_numpy(ids.astype(np.int64))
    apart = best - second > 4 * (rounded - logits).abs().amax(-1)
    assert torch.equal(logits.argmax(-1)[apart], chosen[apart])
    return float(apart.float().mean())


def assert_like_the_library(replica: Replica, model: Any, limit: float = 0.02) -> None:
    """Greedy tokens, and log-probabilities of sampled ones: in the mean they differ by at most `limit`."""
    differences, decided = [], []
    for length in (2, 7, 300):
        prompt = prompt_of(length)
        sampled, greedy = replica.submit(prompt, 24, samples=4), replica.submit(prompt, 24, GREEDY)
        finished = replica.finish()
        for name in sampled + greedy:
            tokens = finished[name].tokens
            differences.append(np.abs(tokens.log_probs - log_probs_of(model, prompt, tokens.ids)))
        decided.append(assert_greedy(model, prompt, finished[greedy[0]].tokens.ids))
    assert np.concatenate(differences).mean() <= limit
    assert np.mean(decided) > 0.4


def test_tokens_and_log_probabilities_are_those_of_the_trainers_forward_pass(replica: Replica) -> None:
    assert_like_the_library(replica, replica.models[0])


def test_the_engine_runs_in_the_workers_process(replica: Replica) -> None:
    """So nothing of a replica is left when its process is killed."""
    assert replica.processes == set()


def test_a_step_counts_the_tokens_that_it_prefills(replica: Replica) -> None:
    def counted() -> tuple[int, int, bool]:
        step = replica.engine.step()
        return step.tokens, step.prefilled, step.prefills

    [name] = replica.submit(prompt_of(5, seed=325), 30, GREEDY)
    assert [counted(), counted()] == [(1, 5, True), (1, 0, False)]
    taken = replica.engine.take([name])[name]
    replica.submit(prompt_of(5, seed=325), 30, GREEDY, kept=taken)
    assert [counted(), counted()] == [(1, 5 + 2, True), (1, 0, False)]


def test_a_continuation_from_any_prefix_is_the_uninterrupted_run(replica: Replica) -> None:
    prompt = prompt_of(5, seed=325)  # no token of its response is a matter of rounding
    [whole] = replica.generate(prompt, 30, GREEDY)
    assert assert_greedy(replica.models[0], prompt, whole.tokens.ids) == 1.0
    assert len(whole.tokens) > 10
    names = {cut: replica.submit(prompt, 30, GREEDY, kept=whole.tokens[:cut])[0] for cut in range(len(whole.tokens))}
    finished = replica.finish()
    for cut, name in names.items():
        np.testing.assert_array_equal(finished[name].tokens.ids, whole.tokens.ids)
        np.testing.assert_array_equal(finished[name].tokens.log_probs[:cut], whole.tokens.log_probs[:cut])
        assert finished[name].truncated == whole.truncated


@pytest.fixture
def under_test(replica: Replica) -> Iterator[UnderTest]:
    """The engine for the suite of laws that `test_laws.py` runs on the Torch engine."""
    test = laws_of(replica)
    yield test
    replica.loaded, replica.submitted = max(test.seeds), test.groups


def laws_of(replica: Replica, kind: type[UnderTest] = UnderTest) -> UnderTest:
    """The laws of an engine that has loaded the weights of seed 0."""
    return kind(
        replica.engine,
        replica.models,
        Replay(replica.models, MAX_LENGTH),
        end_token=END,
        vocabulary=VOCABULARY,
        max_length=MAX_LENGTH,
        computes_ahead=0,
        mean_difference=0.02,
        history_difference=0.15,
        near_tie=0.2,
        min_prompt=MIN_CPU_PREFILL,
        seeds={replica.engine.version: 0},
        groups=replica.submitted,
    )


def test_random_histories_keep_the_laws(under_test: UnderTest) -> None:
    assert check_histories(under_test, range(FIRST_HISTORY, FIRST_HISTORY + HISTORIES)) > 3 * HISTORIES


def test_a_sequence_that_spans_three_versions_has_the_log_probs_of_its_replay(under_test: UnderTest) -> None:
    check_versions(under_test)


def test_a_sequence_ends_at_the_end_token_or_at_its_limit(replica: Replica) -> None:
    finished = replica.generate((3, 4, 5), 12, samples=40)  # through 16 slots
    assert 0 < sum(not completed.truncated for completed in finished) < 40
    for completed in finished:
        ids = completed.tokens.ids
        assert END not in ids[:-1]
        assert completed.truncated == (ids[-1] != END)
        assert len(ids) == 12 if completed.truncated else len(ids) <= 12


def test_progress_returns_each_new_token_once_and_first_tokens_start_sequences(replica: Replica) -> None:
    [kept] = replica.generate(prompt_of(4), 2, GREEDY)
    names = replica.submit(prompt_of(4), 10, samples=SLOTS + 2)
    continued = replica.submit(prompt_of(4), 10, kept=kept.tokens)
    grown: dict[SequenceId, list[GeneratedTokens]] = {name: [] for name in names + continued}
    started: dict[SequenceId, int] = {}
    finished: dict[SequenceId, Completed] = {}
    while replica.engine.busy:
        output = replica.engine.step()
        assert not started.keys() & output.started.keys()
        started |= output.started
        for name, tokens in replica.engine.progress().items():
            grown[name].append(tokens)
        finished |= {completed.sequence: completed for completed in output.finished}
    assert finished.keys() >= set(names)
    assert not started.keys() & set(continued)  # its first token was generated before
    assert sum(map(len, grown[continued[0]])) == len(finished[continued[0]].tokens) - 2 - 1
    for name in names:
        new, whole = GeneratedTokens.join(grown[name]), finished[name].tokens
        assert new.ids.tolist() == whole.ids[: len(new)].tolist()
        assert len(whole) - len(new) == 1  # the last one came with the end
        assert started[name] == whole.versions.runs[0][0]


def test_taken_sequences_return_their_tokens_and_get_no_more(replica: Replica) -> None:
    prompt, unknown = prompt_of(6), (10_000, 0)
    names = replica.submit(prompt, 400, GREEDY, samples=SLOTS + 1)
    for _ in range(3):
        replica.engine.step()
    taken = replica.engine.take([names[0], names[-1], unknown])
    assert {name: len(tokens) for name, tokens in taken.items()} == {names[0]: 3, names[-1]: 0}  # one had no slot
    for _ in range(3):
        assert not {names[0], names[-1]} & replica.engine.progress().keys()
        assert not replica.engine.step().finished
    again = SequenceRequest(names[0], np.array(prompt, np.int32), 9, GREEDY, taken[names[0]])
    replica.engine.submit([again])  # it returns under the same name
    replica.engine.take(names[1:])
    assert replica.finish()[names[0]].tokens.ids[:3].tolist() == taken[names[0]].ids.tolist()
    assert not replica.engine.busy


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(0.7),
        Sampling(0.7, top_k=3),
        Sampling(1.3, top_p=0.6),
        Sampling(1.0, top_p=0.8, top_k=4),
        Sampling(1.0, top_p=0.9, top_k=9, min_p=0.4),
    ],
    ids=str,
)
def test_log_probabilities_are_of_the_distribution_that_was_drawn_from(replica: Replica, sampling: Sampling) -> None:
    """All tokens that can be drawn have together the probability 1, and are drawn as often as their log-probability says."""
    prompt, draws = prompt_of(7, seed=4), 800
    firsts = [completed.tokens[:1] for completed in replica.generate(prompt, 1, sampling, samples=draws)]
    drawn = Counter(int(first.ids[0]) for first in firsts)
    probability = {int(first.ids[0]): float(np.exp(first.log_probs[0])) for first in firsts}
    logits = logits_of(replica.models[0], prompt, np.array([0]))[0] / sampling.temperature
    expected = truncated(logits, sampling)
    possible = {token for token in range(VOCABULARY) if expected[token] > 0}
    assert drawn.keys() <= possible
    assert sum(probability.values()) > 0.99
    for token, count in drawn.items():
        assert probability[token] == pytest.approx(float(expected[token]), abs=0.02)
        assert count / draws == pytest.approx(probability[token], abs=0.06)  # more than three standard deviations


def truncated(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """(V,) probabilities by their definition: tokens of at least min-p's share of the maximum, the k most likely of them, then the
    minimum of these that reaches top-p."""
    weights = logits.softmax(-1)
    order = [
        token for token in logits.argsort(descending=True).tolist() if weights[token] >= sampling.min_p * weights.max()
    ]
    kept = order[: sampling.top_k or None]
    total, nucleus = sum(float(weights[token]) for token in kept), []
    for token in kept:
        if sum(float(weights[other]) for other in nucleus) < sampling.top_p * total:
            nucleus.append(token)
    probabilities = torch.zeros_like(weights)
    probabilities[nucleus] = weights[nucleus] / weights[nucleus].sum()
    return probabilities


TRUNCATED = [Sampling(0.7, top_p=0.75, top_k=20), Sampling(1.0, top_p=0.9, top_k=5), Sampling(1.2, top_k=12, min_p=0.1)]


@pytest.mark.parametrize("sampling", TRUNCATED, ids=str)
def test_over_the_tokens_that_were_kept_the_ratio_of_an_unchanged_policy_is_1(
    replica: Replica, sampling: Sampling
) -> None:
    """vLLM in bfloat16, next to greedy and untruncated sequences, against logits in float32."""
    prompt = prompt_of(7, seed=6)
    names = replica.submit(prompt, 30, sampling, samples=SLOTS - 2)
    others = replica.submit(prompt, 30, GREEDY) + replica.submit(prompt, 30, Sampling(0.7))
    finished = replica.finish()
    assert all(finished[name].tokens.candidates is None for name in others)
    kept, whole = [], []
    for tokens in (finished[name].tokens for name in names):
        logits = logits_of(replica.models[0], prompt, tokens.ids) / sampling.temperature
        candidates = tokens.candidates
        assert candidates is not None
        assert len(candidates) == len(tokens)
        for row, (start, count) in enumerate(zip(candidates.starts, candidates.counts, strict=True)):
            ids, token = candidates.ids[start : start + count].tolist(), int(tokens.ids[row])
            assert token in ids
            assert len(ids) <= sampling.top_k + TIED_TOKENS  # vLLM keeps all tokens with the logit of the k-th
            kept.append(float(logits[row, ids].log_softmax(-1)[ids.index(token)]) - tokens.log_probs[row])
            whole.append(float(logits[row].log_softmax(-1)[token]) - tokens.log_probs[row])
    assert len(kept) > 100
    print(
        f"{sampling}: mean |log ratio| {np.abs(kept).mean():.4f}, over the whole vocabulary {np.abs(whole).mean():.4f}"
    )
    assert np.abs(kept).mean() <= 0.02
    assert np.mean(whole) < -0.05


def test_candidates_follow_a_sequence_that_is_reported_and_continued(replica: Replica) -> None:
    prompt, sampling = prompt_of(7, seed=7), TRUNCATED[0]
    names = replica.submit(prompt, 20, sampling, samples=4)
    grown: dict[SequenceId, list[GeneratedTokens]] = {name: [] for name in names}
    done = replica.steps(5)
    for name, tokens in replica.engine.progress().items():
        grown[name].append(tokens)
    done |= replica.steps(3)
    running = [name for name in names if name not in done]
    assert running
    taken = replica.engine.take(running)
    ids = np.array(prompt, np.int32)
    replica.engine.submit([SequenceRequest(name, ids, 20, sampling, taken[name]) for name in running])
    finished = replica.finish()
    for name in running:
        whole, before = finished[name].tokens, GeneratedTokens.join([*grown[name]])
        for part in (before, taken[name]):
            assert whole.candidates is not None
            assert part.candidates is not None
            assert part.candidates.counts.tolist() == whole.candidates[: len(part)].counts.tolist()
            assert part.candidates.ids.tolist() == whole.candidates[: len(part)].ids.tolist()
        assert len(whole.candidates) == len(whole) > len(taken[name]) > len(before) > 0


def test_greedy_sequences_next_to_sampled_ones_have_log_probabilities_at_temperature_1(replica: Replica) -> None:
    prompt = prompt_of(7, seed=5)
    replica.submit(prompt, 8, Sampling(0.5), samples=3)
    [greedy] = replica.submit(prompt, 8, GREEDY)
    tokens = replica.finish()[greedy].tokens
    assert np.abs(tokens.log_probs - log_probs_of(replica.models[0], prompt, tokens.ids)).mean() <= 0.02


def test_vllm_raises_the_temperatures_that_the_manifest_refuses(replica: Replica) -> None:
    from vllm import SamplingParams

    assert SamplingParams(temperature=MIN_VLLM_TEMPERATURE / 2).temperature == MIN_VLLM_TEMPERATURE
    assert SamplingParams(temperature=MIN_VLLM_TEMPERATURE).temperature == MIN_VLLM_TEMPERATURE


def test_samples_of_a_prompt_share_its_prefill_but_versions_do_not(replica: Replica, monkeypatch) -> None:
    cached: dict[str, int] = {}
    client = replica.core.engine_core
    get_output = client.get_output

    def watched() -> Any:
        outputs = get_output()
        for output in outputs.outputs:
            if output.prefill_stats is not None:
                cached[output.request_id.rpartition("-")[0]] = output.prefill_stats.num_cached_tokens
        return outputs

    monkeypatch.setattr(client, "get_output", watched)
    prompt = prompt_of(600, seed=6)
    of_group = []
    for seed in (0, 1):
        replica.load(seed)
        [group, *_] = {group for group, _ in replica.submit(prompt, 2, samples=3)}
        replica.finish()
        of_group.append([cached[f"{group}-{index}"] for index in range(3)])
    for first, *others in of_group:
        assert first == 0
        assert all(other >= 256 for other in others)


def mean_difference(replica: Replica, finished: Iterable[Completed], prompt: Sequence[int], seed: int) -> float:
    """The mean difference of the sequences' log-probs from those of the weights of `seed`, computed from the beginning."""
    model, tokens = replica.models[seed], [completed.tokens for completed in finished]
    differences = [np.abs(each.log_probs - log_probs_of(model, prompt, each.ids)) for each in tokens]
    return float(np.concatenate(differences).mean())


def test_a_stale_prefix_block_would_change_log_probs_and_is_never_used(replica: Replica, monkeypatch) -> None:
    from vllm.inputs import engine as engine_inputs

    prompt = prompt_of(600, seed=9)
    differences = {}
    for salted in (False, True):
        with monkeypatch.context() as patch:
            if not salted:
                patch.setattr(engine_inputs, "tokens_input", partial(unsalted, engine_inputs.tokens_input))
            replica.load(0)
            replica.generate(prompt, 2)
            replica.load(1)
            differences[salted] = mean_difference(replica, replica.generate(prompt, 4, samples=4), prompt, 1)
    assert differences[True] <= 0.02
    assert differences[False] > 4 * differences[True]


def unsalted(make: Callable[..., Any], prompt: list[int], *, cache_salt: str) -> Any:
    """vLLM's input without the version, but apart from that of other tests."""
    return make(prompt, cache_salt="none")


def test_a_sequence_that_waits_for_a_slot_during_a_commit_starts_from_the_new_weights(replica: Replica) -> None:
    """Blocks of its prompt, by the weights with which it was submitted, are in the cache when it starts."""
    prompt = prompt_of(600, seed=10)
    running = replica.submit(prompt, 6, Sampling(), samples=SLOTS)
    waiting = replica.submit(prompt, 4, samples=SLOTS)
    finished = replica.steps(3)
    version = replica.load(1)
    finished |= replica.finish()
    new = [finished[name] for name in waiting if finished[name].tokens.versions.runs[0][0] == version]
    assert len(new) > 2, "most have waited"
    assert any(len(set(finished[name].tokens.versions.tolist())) == 2 for name in running), "those with tokens continue"
    assert mean_difference(replica, new, prompt, 1) <= 0.02


def test_a_sequence_that_cannot_be_generated_is_refused_alone(replica: Replica) -> None:
    """By this project's checks, or by those of vLLM, which here refuses a negative temperature."""
    prompt = np.array(prompt_of(8), np.int32)
    wrong = {
        (9001, 0): SequenceRequest((9001, 0), prompt, MAX_LENGTH),
        (9002, 0): SequenceRequest((9002, 0), np.array([3, VOCABULARY], np.int32), 5),
        (9003, 0): SequenceRequest((9003, 0), prompt, 5, Sampling(-1.0)),
        (9004, 0): SequenceRequest((9004, 0), prompt[:1], 5),
    }
    good = [SequenceRequest((9000, index), prompt, 5) for index in range(2)]
    refused = {each.sequence: each for each in replica.engine.submit([good[0], *wrong.values(), good[1]])}
    assert refused.keys() == wrong.keys()
    assert {each.reason for each in refused.values()} == {EndReason.ERROR}
    too_long = f"group 9001: prompt 8 + response {MAX_LENGTH} tokens exceed the engine's {MAX_LENGTH}"
    assert refused[9001, 0].error.startswith(too_long)
    assert refused[9002, 0].error.startswith(f"group 9002: token {VOCABULARY} is not one of")
    assert refused[9003, 0].error.startswith("vLLM refused the sequence:")
    assert refused[9004, 0].error == "group 9004: the prompt has 1 token, and the engine needs at least 2"
    assert replica.finish().keys() == {(9000, 0), (9000, 1)}
    [longest] = replica.generate(prompt_of(MAX_LENGTH - 3), 3)
    assert len(longest.tokens) == 3 or not longest.truncated


def test_a_sequence_that_vllm_adds_in_part_or_gives_up_fails_alone(replica: Replica, monkeypatch) -> None:
    from vllm.v1.engine import FinishReason

    prompt = prompt_of(5, seed=325)  # the greedy response does not end within these steps
    add = replica.core.engine_core.add_request

    def refuse(request: Any) -> None:
        if request.external_req_id == "9001-0":
            raise RuntimeError("no room in the queue")
        add(request)

    monkeypatch.setattr(replica.core.engine_core, "add_request", refuse)
    ids = np.array(prompt, np.int32)
    requests = [SequenceRequest((group, 0), ids, 30, GREEDY) for group in (9000, 9001, 9002)]
    [refused] = replica.engine.submit(requests)
    assert (refused.sequence, refused.reason) == ((9001, 0), EndReason.ERROR)
    assert refused.error == "vLLM refused the sequence: RuntimeError: no room in the queue"
    replica.engine.step()
    client = replica.core.engine_core
    get_output = client.get_output

    def give_up() -> Any:
        outputs = get_output()
        for output in outputs.outputs:
            if output.request_id.startswith("9002-0-"):
                client.abort_requests([output.request_id])
                output.finish_reason, output.new_token_ids, output.new_logprobs = FinishReason.ERROR, [], None
        return outputs

    monkeypatch.setattr(client, "get_output", give_up)
    [gone] = replica.engine.step().finished
    monkeypatch.undo()
    assert (gone.sequence, gone.reason, len(gone.tokens)) == ((9002, 0), EndReason.ERROR, 1)
    assert gone.error == "vLLM ended the sequence with the reason error"
    [completed] = replica.finish().values()
    assert completed.sequence == (9000, 0)
    assert (
        np.abs(completed.tokens.log_probs - log_probs_of(replica.models[0], prompt, completed.tokens.ids)).mean() < 0.02
    )


def test_a_stop_token_of_a_request_ends_its_sequence_and_no_other(replica: Replica) -> None:
    stopping = replica.submit((3, 4, 5), 20, Sampling(stop=(6, 7)), samples=12)
    others = replica.submit((3, 4, 5), 20, samples=12)
    finished = replica.finish()
    for name in stopping:
        ids = finished[name].tokens.ids.tolist()
        assert not {END, 6, 7} & set(ids[:-1])
        assert finished[name].reason == (EndReason.STOP if ids[-1] in (END, 6, 7) else EndReason.LENGTH)
    assert any(finished[name].tokens.ids[-1] in (6, 7) for name in stopping)
    assert any({6, 7} & set(finished[name].tokens.ids.tolist()[:-1]) for name in others)


def test_tokens_of_the_environment_are_continued_and_never_changed(replica: Replica) -> None:
    prompt = prompt_of(9)
    versions = VersionRuns.of([0, ENVIRONMENT_VERSION, ENVIRONMENT_VERSION])
    kept = GeneratedTokens(np.array([5, 6, END], np.int32), np.array([-1, 0, 0], np.float32), versions)
    [completed] = replica.generate(prompt, 12, kept=kept)
    for part in ("ids", "log_probs", "versions"):
        np.testing.assert_array_equal(getattr(completed.tokens, part)[:3], getattr(kept, part))
    assert set(completed.tokens.versions[3:].tolist()) == {replica.engine.version}
    expected = log_probs_of(replica.models[0], prompt, completed.tokens.ids)
    assert np.abs(completed.tokens.log_probs - expected)[3:].mean() <= 0.02


def test_the_token_room_shrinks_with_running_sequences_and_returns(replica: Replica) -> None:
    room = replica.engine.token_room
    assert room >= SLOTS * MAX_LENGTH, "the caches were sized for all slots"
    replica.submit(prompt_of(300), 4, samples=8)
    replica.steps(1)
    assert room - 8 * MAX_LENGTH <= replica.engine.token_room < room
    replica.finish()
    assert replica.engine.token_room == room


def probed(replica: Replica, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The result of a probe, whose steps also continue all sequences."""
    replica.engine.probe(sequences)
    for _ in range(20):
        if (result := replica.engine.step().probed) is not None:
            return list(result)
    raise AssertionError("no probe ended within 20 steps")


def probe_difference(replica: Replica, sequences: Sequence[np.ndarray], seed: int) -> float:
    """The mean difference of the log-probs of a probe from those of the library."""
    results = probed(replica, sequences)
    expected = [log_probs_of(replica.models[seed], ids[:1].tolist(), ids[1:]) for ids in sequences]
    assert [len(result) for result in results] == [len(ids) - 1 for ids in sequences]
    return float(np.abs(np.concatenate(results) - np.concatenate(expected)).mean())


def test_a_probe_takes_the_next_free_slots_and_computes_as_the_trainer_does(replica: Replica) -> None:
    """Twice with the same tokens, which fill whole blocks of the prefix cache, and between sequences that run and wait."""
    sequences = [np.array(prompt_of(length, seed=length), np.int32) for length in (2, 9, 600)]
    assert probe_difference(replica, sequences, 0) <= 0.02
    assert not replica.engine.busy
    replica.submit(prompt_of(5), 4, samples=4 * SLOTS)
    replica.steps(1)
    assert probe_difference(replica, sequences, 0) <= 0.02
    assert replica.engine.busy, "the probe does not wait for all sequences that wait"
    replica.finish()
    replica.submit(prompt_of(5), 30, samples=4 * SLOTS)
    while replica.engine.step().finished:
        pass  # a sequence may end at any token, and leaves a free slot to the next step
    replica.engine.probe(sequences)
    steps = [replica.engine.step()]
    while steps[-1].probed is None:
        steps.append(replica.engine.step())
    assert not steps[0].probing, "all slots are taken"
    assert not steps[-1].probing, "it has ended"
    replica.finish()
    replica.load(1)
    assert probe_difference(replica, sequences, 1) <= 0.02
    assert probe_difference(replica, sequences, 0) > 0.1


def test_a_commit_drops_a_probe_that_has_not_ended(replica: Replica) -> None:
    replica.engine.probe([np.array(prompt_of(9), np.int32)])
    replica.load(1)
    assert not replica.engine.busy
    assert replica.engine.step().probed is None
    assert probe_difference(replica, [np.array(prompt_of(9), np.int32)], 1) <= 0.02


@pytest.mark.parametrize(
    ("wrong", "own"),
    [
        ("model.layers.1.mlp.down_proj.weight", "model.layers.1.mlp.down_proj.weight"),
        ("model.layers.3.self_attn.v_proj.weight", "model.layers.3.self_attn.qkv_proj.weight"),
    ],
)
def test_a_wrong_parameter_fails_the_probe_and_is_named(replica: Replica, monkeypatch, wrong: str, own: str) -> None:
    def damaging(core: Any, weights: Mapping[str, torch.Tensor], **options: Any) -> None:
        replace_weights(core, dict(weights) | {wrong: weights[wrong] * -20}, **options)

    sequences = [np.array(prompt_of(200, seed=3), np.int32)]
    monkeypatch.setattr(vllm, "replace_weights", damaging)
    replica.load(0)
    monkeypatch.undo()
    assert probe_difference(replica, sequences, 0) > 0.1
    before = replica.engine.checksums()
    replica.load(0)
    after = replica.engine.checksums()
    assert [text_model_name(name) for name in before if before[name] != after[name]] == [own]


def test_a_commit_that_fails_midway_leaves_no_mixture_in_service(replica: Replica, monkeypatch) -> None:
    monkeypatch.setattr(
        vllm, "replace_weights", lambda *_, **__: (_ for _ in ()).throw(MemoryError("no room for the copy"))
    )
    with pytest.raises(MemoryError):
        replica.load(1)
    monkeypatch.undo()
    replica.submit(prompt_of(4), 3)
    with pytest.raises(RuntimeError, match="no complete weights"):
        replica.engine.step()


def test_weights_that_do_not_fit_are_named_and_change_nothing(replica: Replica) -> None:
    version, weights = replica.engine.version, dict(replica.models[1].named_parameters())
    del weights["model.norm.weight"]
    weights |= {"model.other": torch.zeros(1), "lm_head.weight": torch.zeros(1, 2)}
    with pytest.raises(
        ValueError, match=r"missing \['model.norm.weight'\], unexpected \['model.other'\], .*\['lm_head.weight'\]"
    ):
        load(replica.engine, weights, version + 1)
    with pytest.raises(ValueError, match="are adapters, but the engine was built without"):
        load(replica.engine, {"lora_scale": torch.ones(())}, version + 1)
    assert replica.engine.version == version
    assert_like_the_library(replica, replica.models[0])


def test_loading_replaces_all_weights_and_holds_no_tensor(replica: Replica) -> None:
    weights = {name: parameter.detach().clone() for name, parameter in replica.models[1].named_parameters()}
    held = [weakref.ref(tensor) for tensor in weights.values()]
    load(replica.engine, weights, replica.engine.version + 1)
    del weights
    gc.collect()
    assert all(reference() is None for reference in held)
    assert_like_the_library(replica, replica.models[1])


@pytest.mark.soak
@pytest.mark.parametrize("shape", [{"tieEmbeddings": True}, {"vision": {}}], ids=["tied", "vision"])
def test_other_shapes_generate_and_load(shape: dict[str, Any]) -> None:
    with running(shape, (0, 1)) as replica:
        for seed in (0, 1):
            replica.load(seed)
            assert_like_the_library(replica, replica.models[seed])


@pytest.mark.soak
def test_experts_generate_as_close_to_float32_as_the_library_in_bfloat16() -> None:
    """Where two experts are almost equally likely, rounding to bfloat16 chooses another one, in the library as in vLLM.

    This happens at different tokens, so vLLM is compared with the library over all tokens of a model, not token by token.
    """
    with running({"experts": 4, "expertsPerToken": 2}, range(6)) as replica:
        for seed, model in replica.models.items():
            replica.load(seed)
            of_vllm, of_library, change = distances(replica, model)
            print(
                f"seed {seed}: vLLM {of_vllm}, the library in bfloat16 {of_library}, which changes logits by {change:.2f}"
            )
            assert of_vllm.mean_difference <= 2 * of_library.mean_difference
            assert of_vllm.greedy_share >= of_library.greedy_share - 0.1
            assert of_vllm.largest_loss <= 2 * change


@dataclass(frozen=True)
class Distance:
    """How far generation in bfloat16 is from the library in float32."""

    mean_difference: float
    """Mean absolute difference of the log-probs of the sampled and greedy tokens."""
    greedy_share: float
    """Share of greedy tokens that are the most likely ones."""
    largest_loss: float
    """The largest difference of the logits of the most likely token and of the greedy token."""


def distances(replica: Replica, model: Any) -> tuple[Distance, Distance, float]:
    """Return the distances of vLLM and of the library in bfloat16, for the tokens that vLLM generates.

    The third value is the largest change of a logit of the library. Two changes can swap two tokens.
    """
    prompts = {length: prompt_of(length) for length in (2, 7, 60, 300)}
    names = {length: replica.submit(prompt, 24, samples=3) for length, prompt in prompts.items()}
    greedy = {length: replica.submit(prompt, 24, GREEDY) for length, prompt in prompts.items()}
    finished = replica.finish()
    rounded_model = copy.deepcopy(model).bfloat16()
    differences: list[torch.Tensor] = []  # (2, T): of vLLM and of the library
    losses: list[torch.Tensor] = []  # (2, T)
    changes: list[torch.Tensor] = []
    for length, prompt in prompts.items():
        for name in names[length] + greedy[length]:
            tokens = finished[name].tokens
            ids = torch.from_numpy(tokens.ids.astype(np.int64))[:, None]
            exact = logits_of(model, prompt, tokens.ids)
            rounded = logits_of(rounded_model, prompt, tokens.ids).float()
            expected = exact.log_softmax(-1).gather(1, ids).squeeze(1)
            others = (torch.from_numpy(tokens.log_probs), rounded.log_softmax(-1).gather(1, ids).squeeze(1))
            differences.append(torch.stack([(other - expected).abs() for other in others]))
            if name in greedy[length]:
                chosen = (ids, rounded.argmax(-1, keepdim=True))
                losses.append(torch.stack([exact.amax(-1) - exact.gather(1, each).squeeze(1) for each in chosen]))
            changes.append((rounded - exact).abs().flatten())
    means = torch.cat(differences, 1).mean(1).tolist()
    shares = (torch.cat(losses, 1) == 0).float().mean(1).tolist()
    largest = torch.cat(losses, 1).amax(1).tolist()
    of_vllm, of_library = map(Distance, means, shares, largest)
    return of_vllm, of_library, float(torch.cat(changes).max())

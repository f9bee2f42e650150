"""Under top-p, top-k and min-p, the trainer's log-probabilities of an unchanged policy are those of the sampler.

Torch engine ─► tokens with candidates ─► reports ─► assembled batch ─► micro-batch ─► head ─► log-probabilities
    compared with the sampler's, and with those of transformers' model and processors
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from qwen35_trainer.data.encode import EncodedPrompt
from qwen35_trainer.data.prompt import Prompt
from qwen35_trainer.engines.fsdp.engine import FSDPEngine
from qwen35_trainer.engines.micro_batch import Offsets, micro_batch, response_scores
from qwen35_trainer.engines.origin import Origin
from qwen35_trainer.engines.train_batch import TrainBatch
from qwen35_trainer.models.qwen3_5.adapter import adapt
from qwen35_trainer.rewards.reward import CombinedScore
from qwen35_trainer.rollout.rollout_engine import Completed, Sampling, SequenceRequest
from qwen35_trainer.rollout.torch import TorchEngine
from qwen35_trainer.runtime.assembly import ScoredGroup, assemble
from qwen35_trainer.runtime.reported_tokens import TokenBlock
from tests.conftest import SHAPE

CPU = torch.device("cpu")
VOCABULARY, LIMIT, SAMPLES, SLOTS = 211, 80, 2, 24
AS_REQUIRED = Sampling(0.7, top_p=0.75, top_k=20)
EVERY_KIND = [
    AS_REQUIRED,
    *(
        Sampling(*each)
        for each in itertools.product([0.7, 1.0, 1.6], [1.0, 0.75, 0.95], [0, 20], [0.0, 0.05])
        if each[1:] != (1.0, 0, 0.0)
    ),
]


def make() -> Any:
    torch.manual_seed(3)
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(intermediate_size=48, **SHAPE | {"vocab_size": VOCABULARY}))
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            layer.linear_attn.A_log.data.fill_(-4.0)
    return model.eval()


def replica() -> TorchEngine:
    return TorchEngine(make(), end_token=2, slots=SLOTS, max_length=LIMIT + 8, seed=0)


def prompt_of(group: int) -> np.ndarray:
    return np.random.default_rng(group).integers(3, VOCABULARY, 1 + group % 7).astype(np.int32)


def finish(engine: TorchEngine) -> Iterator[Completed]:
    while engine.busy:
        yield from engine.step().finished


def generated(kinds: list[Sampling], samples: int = SAMPLES) -> list[ScoredGroup]:
    """A group for each kind of sampling. Every second sequence moves to another replica on the way, by way of the driver."""
    first, second = replica(), replica()
    names = list(itertools.product(range(len(kinds)), range(samples)))

    def request(name: tuple[int, int]) -> SequenceRequest:
        return SequenceRequest(name, prompt_of(name[0]), LIMIT, kinds[name[0]])

    first.submit([request(name) for name in names])
    done: dict[tuple[int, int], Completed] = {}
    for _ in range(20):
        done |= {completed.sequence: completed for completed in first.step().finished}
    moving = first.take([name for name in names if name[1] % 2])
    for name, tokens in moving.items():
        second.submit([replace(request(name), kept=TokenBlock({name: [tokens[:7], tokens[7:]]})[name])])
    done |= {completed.sequence: completed for engine in (first, second) for completed in finish(engine)}
    assert moving
    return [
        ScoredGroup(
            group,
            EncodedPrompt(Prompt("s/0", "s", "question"), prompt_of(group)),
            tuple(done[group, index] for index in range(samples)),
            tuple(CombinedScore(float(index), {}, {}) for index in range(samples)),
        )
        for group in range(len(kinds))
    ]


@pytest.fixture(scope="module")
def groups() -> list[tuple[Sampling, ScoredGroup]]:
    return list(zip(EVERY_KIND, generated(EVERY_KIND), strict=True))


def batch_of(groups: list[ScoredGroup]) -> TrainBatch:
    return assemble(groups, version=0, max_lag=0, mask_old=False, updates=1)[0]


def log_ratios(batch: TrainBatch, temperature: float, *, packed: bool) -> torch.Tensor:
    """The trainer's log-probabilities minus those of the sampler, of all tokens."""
    everything = micro_batch(batch, Offsets.of(batch), np.arange(batch.samples), None, packed=packed, device=CPU)
    with torch.no_grad():
        scores = response_scores(adapt(make()), everything, temperature, with_entropy=False)
    assert everything.responses.log_probs is not None
    return (scores.log_probs - everything.responses.log_probs)[everything.responses.mask]


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_the_ratio_of_an_unchanged_policy_is_1_for_every_token(groups, packed) -> None:
    tokens = 0
    for temperature in (0.7, 1.0, 1.6):
        batch = batch_of([group for kind, group in groups if kind.temperature == temperature])
        ratios = log_ratios(batch, temperature, packed=packed)
        print(f"temperature {temperature}: |log ratio| at most {float(ratios.abs().max()):.1e} in {len(ratios)} tokens")
        assert float(ratios.abs().max()) <= 1e-4
        tokens += len(ratios)
    assert tokens >= 3000


def test_over_the_whole_vocabulary_the_ratio_would_be_the_probability_that_the_sampler_kept(groups) -> None:
    """What the trainer would compute without candidates: log S for each token, huggingface/trl#6789."""
    batch = batch_of([group for kind, group in groups if kind == AS_REQUIRED])
    ratios = log_ratios(replace(batch, candidates=None), AS_REQUIRED.temperature, packed=False)
    assert float(ratios.max()) <= 1e-4
    assert float(ratios.mean()) < np.log(0.95)
    assert float(ratios.min()) >= np.log(0.2)


def test_log_probabilities_and_candidates_are_those_of_transformers(groups) -> None:
    """Its logits in float32, and its processors in the order of vLLM."""
    model, tokens, equal = make(), 0, 0
    for kind, group in groups:
        prompt = prompt_of(group.group).tolist()
        for ids, log_probs, candidates in (
            (each.tokens.ids, each.tokens.log_probs, each.tokens.candidates) for each in group.sequences
        ):
            sequence = torch.tensor([*prompt, *ids.tolist()])
            with torch.no_grad():
                logits = model(input_ids=sequence[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
            expected = logits / kind.temperature
            for wanted, warper, setting in (
                (kind.min_p > 0, MinPLogitsWarper, kind.min_p),
                (kind.top_k > 0, TopKLogitsWarper, kind.top_k),
                (kind.top_p < 1, TopPLogitsWarper, kind.top_p),
            ):
                expected = warper(setting)(None, expected) if wanted else expected
            chosen = torch.from_numpy(ids.astype(np.int64))[:, None]
            own = expected.log_softmax(-1).gather(1, chosen).squeeze(1).numpy()
            assert candidates is not None
            starts = candidates.starts
            same = np.array(
                [
                    candidates.ids[start : start + count].tolist() == row.nonzero().squeeze(1).tolist()
                    for start, count, row in zip(starts, candidates.counts, expected > -torch.inf, strict=True)
                ]
            )
            # Where the probabilities reach top-p within rounding, one token more or less may be kept.
            np.testing.assert_allclose(log_probs[same], own[same], atol=1e-4)
            tokens, equal = tokens + len(same), equal + int(same.sum())
    assert equal >= 0.999 * tokens > 3000


def test_a_sampled_token_is_among_its_candidates(groups) -> None:
    for _, group in groups:
        for ids, candidates in ((each.tokens.ids, each.tokens.candidates) for each in group.sequences):
            for token in range(len(ids)):
                assert ids[token] in candidates[token : token + 1].ids


def test_sequences_without_truncation_carry_nothing() -> None:
    [plain, greedy, truncated] = generated([Sampling(0.7), Sampling(0.0, 0.5, 3, 0.1), AS_REQUIRED])
    assert all(each.tokens.candidates is None for group in (plain, greedy) for each in group.sequences)
    assert batch_of([plain, greedy]).candidates is None
    mixed = batch_of([plain, truncated])
    assert mixed.candidates is not None
    assert not mixed.candidates.counts[: int(mixed.response_lengths[:SAMPLES].sum())].any()
    # Next to truncated samples, the others are still compared over the whole vocabulary.
    assert float(log_ratios(mixed, 0.7, packed=True).abs().max()) <= 1e-4


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("correction", ["None", "TokenTIS"])
def test_the_first_update_after_truncated_sampling_has_ratio_1(make_spec, groups, correction) -> None:
    """In the metrics of the engine, in every term that compares two policies: ratio, correction, KL to both other policies."""
    batch = batch_of([group for kind, group in groups if kind == AS_REQUIRED])
    changes = {
        "rollout.temperature": AS_REQUIRED.temperature,
        "rollout.topP": AS_REQUIRED.top_p,
        "rollout.topK": AS_REQUIRED.top_k,
        "algorithm.groupSize": SAMPLES,
        "algorithm.correction.type": correction,
        "algorithm.kl": {"placement": "Loss", "coefficient": 0.1},
        "train.batch.promptsPerUpdate": 1,
        "train.batch.microBatchSequences": 1,
        "data.maxResponseTokens": LIMIT,
    }
    with_candidates, without = (
        FSDPEngine(Origin(make), make_spec(changes), CPU).train(each, [1e-3])[0].means
        for each in (batch, replace(batch, candidates=None))
    )
    assert with_candidates["ratio"] == pytest.approx(1, abs=1e-5)
    assert with_candidates["correction_weight"] == pytest.approx(1, abs=1e-5)
    assert with_candidates["behaviour_kl"] == pytest.approx(0, abs=1e-6)
    assert with_candidates["kl"] == pytest.approx(0, abs=1e-6)
    assert with_candidates["entropy"] < without["entropy"]
    assert without["behaviour_kl"] > 1e-2
    assert without["ratio" if correction == "None" else "correction_weight"] < 0.95

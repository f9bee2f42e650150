"""A process group of one, a small spec, and batches of random samples."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from qwen35_trainer.data.candidates import Candidates
from qwen35_trainer.engines.train_batch import TrainBatch
from qwen35_trainer.manifest import TrainingSpec, parse_spec
from tests.distributed.samples import candidates_around

LIMIT = 12


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """This process is the whole group. Not for longer: each group has a thread that wakes a hundred times a second."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    gc.collect()


@pytest.fixture
def make_spec() -> Callable[..., TrainingSpec]:
    """make_spec({"algorithm.kl.placement": "Loss"}): a small spec with fields changed by path."""

    def make(changes: dict[str, Any] | None = None) -> TrainingSpec:
        document: dict[str, Any] = {
            "accelerator": {"profile": "CPU", "devicesPerNode": 1},
            "model": {"name": "tiny", "precision": "FP32", "source": {"random": {}}},
            "data": {"train": [{"name": "t", "files": {"paths": ["t.jsonl"]}}], "maxResponseTokens": LIMIT},
            "rewards": [{"type": "ExactMatch"}],
            "algorithm": {"groupSize": 4, "correction": {"type": "None"}},
            "rollout": {"engine": "Torch"},
            "train": {
                "batch": {"promptsPerUpdate": 3, "microBatchSequences": 12},
                "optimizer": {"learningRate": 1e-3, "weightDecay": 0.0, "gradientClip": 1000.0},
            },
        }
        for path, value in (changes or {}).items():
            *parents, last = path.split(".")
            section = document
            for name in parents:
                section = section.setdefault(name, {})
            if value is None:
                section.pop(last, None)
            else:
                section[last] = value
        spec, problems = parse_spec(document)
        assert spec is not None, problems
        assert not problems
        return spec

    return make


@pytest.fixture
def make_batch(make_model) -> Callable[..., TrainBatch]:
    """make_batch(groups=3, samples=4): random prompts and responses, with log-probs close to those of the model.

    truncated: each token was drawn from a few candidates.
    """

    def make(
        groups: int = 3, samples: int = 4, *, seed: int = 0, updates: int = 1, truncated: bool = False
    ) -> TrainBatch:
        random = np.random.default_rng(seed)
        count = groups * samples
        prompts = [random.integers(3, 20, random.integers(1, 9)) for _ in range(groups)]
        responses = [random.integers(3, 20, random.integers(1, LIMIT + 1)) for _ in range(count)]
        return TrainBatch(
            prompts=np.concatenate([prompts[i // samples] for i in range(count)]).astype(np.int32),
            prompt_lengths=np.array([len(prompts[i // samples]) for i in range(count)]),
            responses=np.concatenate(responses).astype(np.int32),
            response_lengths=np.array([len(response) for response in responses]),
            trainable=random.random(sum(map(len, responses))) < 0.9,
            log_probs=random.normal(-1.0 if truncated else -3.0, 0.3, sum(map(len, responses))).astype(np.float32),
            candidates=candidates_around(np.concatenate(responses), seed) if truncated else None,
            rewards=random.normal(size=count).astype(np.float32),
            group=np.repeat(np.arange(groups), samples),
            updates=updates,
        )

    return make


def over_candidates(logits: torch.Tensor, candidates: Candidates) -> torch.Tensor:
    """(T, V) logits, -inf for all tokens except the candidates."""
    removed, start = torch.zeros(logits.shape, dtype=torch.bool), 0
    for row, count in enumerate(candidates.counts.tolist()):
        removed[row] = count > 0
        removed[row, candidates.ids[start : start + count].astype(np.int64)] = False
        start += count
    return logits.masked_fill(removed, -torch.inf)


@pytest.fixture
def log_probs_of(make_model) -> Callable[..., list[torch.Tensor]]:
    """Log-probs (T,) of each response under the library's model, one sample at a time, with gradient."""

    def compute(model: Any, batch: TrainBatch) -> list[torch.Tensor]:
        sequences, p, r = [], 0, 0
        for prompt_length, length in zip(batch.prompt_lengths, batch.response_lengths, strict=True):
            ids = torch.from_numpy(
                np.concatenate([batch.prompts[p : p + prompt_length], batch.responses[r : r + length]]).astype(np.int64)
            )
            logits = model(input_ids=ids[None], use_cache=False).logits[0, prompt_length - 1 : -1]
            if batch.candidates is not None:
                logits = over_candidates(logits, batch.candidates[r : r + length])
            sequences.append(logits.log_softmax(-1).gather(1, ids[prompt_length:, None]).squeeze(1))
            p, r = p + prompt_length, r + length
        return sequences

    return compute

"""Batches and specs that tests of several ranks share."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from qwen35_trainer.data.candidates import Candidates
from qwen35_trainer.engines.train_batch import TrainBatch
from tests.models.scenes import START, show

RANDOM = {"hiddenSize": 32, "intermediateSize": 48, "headDim": 8, "linearHeadDim": 8, "initializerRange": 0.2}


def candidates_around(tokens: np.ndarray, seed: int) -> Candidates:
    """Each token and one to four others; every fifth token was drawn from the whole vocabulary."""
    random, sets = np.random.default_rng(seed), []
    for number, token in enumerate(tokens.tolist()):
        others = random.choice(20, random.integers(1, 5), replace=False).tolist()
        sets.append(sorted({token, *others}) if number % 5 else [])
    ids = [each for kept in sets for each in kept]
    return Candidates(np.array([len(kept) for kept in sets], np.int32), np.array(ids, np.int32))


def batch_of(samples: int, seed: int, *, supervised: bool = False, truncated: bool = False) -> TrainBatch:
    """truncated: each token was drawn from a few candidates."""
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 12, samples)
    prompts = random.integers(1, 7, samples)
    total = int(lengths.sum())
    of_prompts, responses = (random.integers(3, 20, int(count)).astype(np.int32) for count in (prompts.sum(), total))
    return TrainBatch(
        prompts=of_prompts,
        prompt_lengths=prompts,
        responses=responses,
        response_lengths=lengths,
        trainable=random.random(total) < 0.9,
        candidates=candidates_around(responses, seed) if truncated else None,
        log_probs=None if supervised else random.normal(-3.0, 0.3, total).astype(np.float32),
        rewards=None if supervised else random.normal(size=samples).astype(np.float32),
        group=None if supervised else np.arange(samples) // 4,
    )


def batch_of_lengths(lengths: Sequence[tuple[int, int]], seed: int = 0) -> TrainBatch:
    """Supervised samples of these tokens in prompt and response; nine in ten train."""
    random, (prompts, responses) = np.random.default_rng(seed), np.array(lengths).T
    total = int(responses.sum())
    return TrainBatch(
        prompts=random.integers(3, 20, int(prompts.sum())).astype(np.int32),
        prompt_lengths=prompts,
        responses=random.integers(3, 20, total).astype(np.int32),
        response_lengths=responses,
        trainable=random.random(total) < 0.9,
    )


SCENES: list[list[Any]] = [
    *([2, (1, 4, 6), 1], [4], [1, (1, 2, 2), 2, (1, 4, 2), 1], [3, ("video", (2, 4, 2)), 1]),
    *([2], [1, (1, 2, 4)], [5], [2, ("video", (1, 2, 2)), (1, 4, 4), 1]),
]


def with_scenes(batch: TrainBatch, seed: int = 0) -> TrainBatch:
    """The same responses to prompts of which most show pictures."""
    scenes = [SCENES[number % len(SCENES)] for number in range(batch.samples)]
    shown = [show(scene, 10 * seed + number) for number, scene in enumerate(scenes)]
    return replace(
        batch,
        prompts=np.concatenate([tokens.numpy() for tokens, _ in shown]).astype(np.int32),
        prompt_lengths=np.array([len(tokens) for tokens, _ in shown]),
        pictures=tuple(
            pictures if len(scene) > 1 else None for scene, (_, pictures) in zip(scenes, shown, strict=True)
        ),
    )


def scenes_of(seed: int) -> TrainBatch:
    """Eight supervised samples whose prompts show images, a video, both, or nothing."""
    shown = [show(scene, 10 * seed + number) for number, scene in enumerate(SCENES)]
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 8, len(SCENES))
    return TrainBatch(
        prompts=np.concatenate([tokens.numpy() for tokens, _ in shown]).astype(np.int32),
        prompt_lengths=np.array([len(tokens) for tokens, _ in shown]),
        responses=random.integers(0, START, int(lengths.sum())).astype(np.int32),
        response_lengths=lengths,
        trainable=random.random(int(lengths.sum())) < 0.9,
        pictures=tuple(
            pictures if len(scene) > 1 else None for scene, (_, pictures) in zip(SCENES, shown, strict=True)
        ),
    )


def spec_of(ranks: int, *, random: dict[str, Any] | None = None, **train: Any) -> dict[str, Any]:
    """A supervised training of a tiny model on as many ranks; `train` are sections of spec.train."""
    optimizer = {"weightDecay": 0.1, "gradientClip": 1.0} | train.pop("optimizer", {})
    return {
        "mode": "SFT",
        "accelerator": {"profile": "CPU", "devicesPerNode": ranks},
        "model": {"name": "tiny", "precision": "FP32", "source": {"random": RANDOM | (random or {})}},
        "data": {
            "train": [{"name": "t", "files": {"paths": ["t.jsonl"]}}],
            "maxPromptTokens": 8,
            "maxResponseTokens": 12,
        },
        "train": {"optimizer": optimizer} | {"batch": {"promptsPerUpdate": 8} | train.pop("batch", {})} | train,
    }


def policy_spec_of(
    ranks: int, kl: str = "None", *, algorithm: dict[str, Any] | None = None, **sections: Any
) -> dict[str, Any]:
    """A policy's training, groups of four; `algorithm` are fields of spec.algorithm."""
    spec = spec_of(ranks, **sections)
    spec["train"]["batch"]["promptsPerUpdate"] = 2
    del spec["mode"]
    return spec | {
        "rewards": [{"type": "ExactMatch"}],
        "algorithm": {"groupSize": 4, "correction": {"type": "None"}, "kl": {"placement": kl, "coefficient": 0.1}}
        | (algorithm or {}),
        "rollout": {"engine": "Torch"},
    }

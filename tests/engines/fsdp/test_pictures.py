"""The embedded engine with pictures in its prompts, against the library's model and against the trainer."""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from qwen35_trainer.data.data_errors import DataError
from qwen35_trainer.data.picture_arrays import PictureArrays
from qwen35_trainer.engines.fsdp.engine import FSDPEngine
from qwen35_trainer.engines.origin import Origin
from qwen35_trainer.engines.train_batch import TrainBatch
from qwen35_trainer.models.qwen3_5.adapter import adapt
from qwen35_trainer.rollout.rollout_engine import (
    Completed,
    EndReason,
    GeneratedTokens,
    Sampling,
    SequenceRequest,
)
from qwen35_trainer.rollout.torch import TorchEngine
from qwen35_trainer.rollout.version_runs import VersionRuns
from tests.models.scenes import IMAGE, VIDEO, vision_language
from tests.publications import published_by
from tests.rollout.loading import load
from tests.rollout.shown import LIMIT, scored_by_the_library, shown_scenes

NEVER = 10_000
"""A token that the vocabulary does not have: sequences end at their limit."""
SETTINGS = {"train.batch.promptsPerUpdate": 4, "train.batch.microBatchSequences": 4, "algorithm.groupSize": 2}
EXACT = 1e-5
"""Allowed difference of log-probs in float32."""


def engine_of(model: Any, slots: int = 8) -> TorchEngine:
    return TorchEngine(adapt(model), end_token=NEVER, slots=slots, max_length=64, seed=0)


def run(engine: TorchEngine, *requests: SequenceRequest) -> dict[tuple[int, int], Completed]:
    finished = {each.sequence: each for each in engine.submit(requests)}
    for _ in range(100):
        if not engine.busy:
            return finished
        finished |= {each.sequence: each for each in engine.step().finished}
    raise AssertionError("still busy")


@pytest.mark.parametrize(
    ("experts", "allowed"), [pytest.param(0, EXACT, id="dense"), pytest.param(4, 3 * EXACT, id="mixture of experts")]
)
def test_log_probs_of_sequences_with_pictures_are_those_of_the_library_and_of_the_trainer(
    alone: None, make_spec: Any, experts: int, allowed: float
) -> None:
    """The trainer computes a sequence in one pass, as the library does, and the engine token by token, so it rounds in other places.

    In these random models float32 itself is 1e-5 to 4e-5 away from float64, in the library too. No token changes its experts.
    """
    model = vision_language(experts=experts)
    reference, scenes = copy.deepcopy(model), shown_scenes()
    requests = [each.request(group, index) for group, each in enumerate(scenes) for index in range(2)]
    finished = run(engine_of(model, slots=5), *requests)
    sequences = [finished[request.sequence].tokens for request in requests]
    assert sum(IMAGE in tokens.ids or VIDEO in tokens.ids for tokens in sequences) >= 2  # which the model drew itself
    batch = batch_of(requests, sequences)
    expected = np.concatenate(
        [
            scored_by_the_library(reference, scenes[request.sequence[0]], tokens.ids)
            for request, tokens in zip(requests, sequences, strict=True)
        ]
    )
    np.testing.assert_allclose(batch.log_probs, expected, rtol=0, atol=allowed)
    for packed in (False, True):
        spec = make_spec(SETTINGS | {"train.batch.removePadding": packed})
        trainer = FSDPEngine(Origin(lambda: copy.deepcopy(reference)), spec, torch.device("cpu"))
        np.testing.assert_allclose(trainer.log_probs(batch), expected, rtol=0, atol=EXACT)


def batch_of(requests: list[SequenceRequest], sequences: list[GeneratedTokens]) -> TrainBatch:
    """The batch of these sequences, every second of which has a reward. One sample has none, so it does not train."""
    lengths = [len(tokens) for tokens in sequences]
    return TrainBatch(
        prompts=np.concatenate([request.prompt for request in requests]),
        prompt_lengths=np.array([len(request.prompt) for request in requests]),
        responses=np.concatenate([tokens.ids for tokens in sequences]),
        response_lengths=np.array(lengths),
        trainable=np.ones(sum(lengths), np.bool_),
        log_probs=np.concatenate([tokens.log_probs for tokens in sequences]),
        rewards=np.array([index % 2 for index in range(len(lengths))], np.float32),
        group=np.array([request.sequence[0] for request in requests]),
        pictures=tuple(request.pictures for request in requests),
    )


def test_a_batch_with_pictures_trains_the_tower_and_replicas_compute_with_the_new_one(
    alone: None, make_spec: Any
) -> None:
    model = vision_language()
    replica = engine_of(copy.deepcopy(model))
    requests = [each.request(group, index) for group, each in enumerate(shown_scenes()) for index in range(2)]
    finished = run(replica, *requests)
    sequences = [finished[request.sequence].tokens for request in requests]
    batch = batch_of(requests, sequences)
    batch = replace(
        batch, trainable=batch.trainable & (np.arange(batch.responses.size) >= LIMIT)
    )  # the first sample does not train
    spec = make_spec(SETTINGS | {"algorithm.kl.placement": "Loss", "train.batch.microBatchSequences": 2})
    trainer = FSDPEngine(Origin(lambda: copy.deepcopy(model)), spec, torch.device("cpu"))
    [metrics] = trainer.train(batch, [1e-2])
    assert metrics.means["behaviour_kl"] == pytest.approx(0.0, abs=1e-8)
    assert metrics.means["kl"] == pytest.approx(0.0, abs=1e-8)  # the reference model computes with pictures, too
    published = published_by(trainer)
    before = dict(model.named_parameters())
    moved = [name for name in before if "visual" in name and not torch.equal(before[name], published[name])]
    assert len(moved) == sum("visual" in name for name in before)
    load(replica, published, 1)
    again = run(replica, *(each.request(10 + group) for group, each in enumerate(shown_scenes())))
    reference = copy.deepcopy(model)
    reference.load_state_dict(published, strict=False)
    library = vision_language()
    library.load_state_dict(reference.state_dict())
    for group, each in enumerate(shown_scenes()):
        tokens = again[10 + group, 0].tokens
        assert set(tokens.versions.tolist()) == {1}
        np.testing.assert_allclose(tokens.log_probs, scored_by_the_library(library, each, tokens.ids), atol=EXACT)


def test_a_sequence_that_moves_to_another_replica_continues_with_its_pictures() -> None:
    model = vision_language()
    for group, each in enumerate(shown_scenes()):
        greedy = Sampling(0.0)
        whole = run(engine_of(copy.deepcopy(model)), each.request(group, sampling=greedy))[group, 0].tokens
        for length in (1, 4, LIMIT - 1):
            first, second = engine_of(copy.deepcopy(model)), engine_of(copy.deepcopy(model))
            first.submit([each.request(group, sampling=greedy)])
            for _ in range(length):
                first.step()
            kept = first.take([(group, 0)])[group, 0]
            np.testing.assert_array_equal(kept.ids, whole.ids[:length])
            moved = run(second, each.request(group, sampling=greedy, kept=kept))[group, 0].tokens
            np.testing.assert_array_equal(moved.ids, whole.ids)
            np.testing.assert_allclose(moved.log_probs, whole.log_probs, atol=EXACT)


def test_a_kept_placeholder_that_the_model_drew_stands_for_no_picture() -> None:
    model = vision_language()
    reference = copy.deepcopy(model)
    for group, each in enumerate(shown_scenes()):
        kept = GeneratedTokens(np.array([IMAGE, VIDEO], np.int32), np.zeros(2, np.float32), VersionRuns.of([0, 0]))
        tokens = run(engine_of(copy.deepcopy(model)), each.request(group, kept=kept))[group, 0].tokens
        expected = scored_by_the_library(reference, each, tokens.ids)
        np.testing.assert_allclose(tokens.log_probs[2:], expected[2:], atol=EXACT)


class Damaged:
    """Pictures of a row that cannot be read."""

    def read(self) -> PictureArrays:
        raise DataError(["prompt s/3 (train.jsonl, line 4): cat.png: the image is damaged"])


def test_a_sequence_whose_pictures_cannot_be_used_ends_alone_with_the_reason() -> None:
    scene = shown_scenes()[0]
    text = shown_scenes()[1]
    damaged = replace(scene.request(0), pictures=Damaged())
    fewer = replace(scene.request(1), prompt=scene.tokens.numpy()[:-3].astype(np.int32))
    finished = run(engine_of(vision_language()), damaged, fewer, text.request(2), scene.request(3))
    assert finished[0, 0].reason is EndReason.ERROR
    assert "prompt s/3 (train.jsonl, line 4): cat.png: the image is damaged" in finished[0, 0].error
    assert finished[1, 0].reason is EndReason.ERROR
    assert "5 image placeholders, the images take 6" in finished[1, 0].error
    assert [finished[group, 0].reason for group in (2, 3)] == [EndReason.LENGTH] * 2


def test_all_sequences_of_a_step_may_have_pictures_that_cannot_be_read() -> None:
    engine = engine_of(vision_language())
    engine.submit([replace(shown_scenes()[0].request(0), pictures=Damaged())])
    [completed] = engine.step().finished
    assert completed.reason is EndReason.ERROR
    assert not engine.busy


def test_a_text_model_refuses_prompts_with_pictures(make_model: Any) -> None:
    engine = TorchEngine(make_model(), end_token=NEVER, slots=2, max_length=64, seed=0)
    [refused] = engine.submit([shown_scenes()[0].request(0)])
    assert "the prompt has pictures, and the engine or its model reads text only" in refused.error

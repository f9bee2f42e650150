"""Updates in which the samples of a group share their prompt, against updates in which each has its own copy."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from qwen35_trainer.engines.fsdp.engine import FSDPEngine
from qwen35_trainer.engines.origin import Origin
from qwen35_trainer.engines.train_batch import TrainBatch
from qwen35_trainer.models.qwen3_5.shared_prompts import SharedPrompts
from tests.distributed.distance import distance, moved
from tests.engines.fsdp.test_engine import MOVED_APART, copies_of
from tests.models.scenes import vision_language
from tests.publications import published_by
from tests.rollout.shown import shown_scenes

pytestmark = pytest.mark.usefixtures("alone")
CPU = torch.device("cpu")
PACKED = {"train.batch.removePadding": True}
SHARED = PACKED | {"train.batch.sharePrompts": True}
BUDGET = {"train.batch.dynamicMicroBatches": True, "data.maxPromptTokens": 8}
PROPORTIONAL = 1e-3
"""Epsilon of Adam. Below this size of a gradient, a step is proportional to it. Otherwise rounding would decide the sign of some steps."""
KL = {"algorithm.kl.placement": "Loss", "algorithm.kl.coefficient": 0.5, "algorithm.entropyCoefficient": 0.3}


def agree(make_model: Any, make_spec: Any, settings: dict[str, Any], batches: list[TrainBatch]) -> list[float]:
    """Both engines train every batch alike. Returns the shares of tokens that one of them saved."""
    plain, sharing = (FSDPEngine(Origin(make_model), make_spec(settings | each), CPU) for each in (PACKED, SHARED))
    before, saved = copies_of(published_by(plain)), []
    for number, batch in enumerate(batches):
        np.testing.assert_allclose(sharing.log_probs(batch), plain.log_probs(batch), atol=1e-5 if number == 0 else 1e-4)
        rates = [1e-3] * batch.updates
        for expected, actual in zip(plain.train(batch, rates), sharing.train(batch, rates), strict=True):
            # Adam amplifies the rounding of the updates before.
            tolerance = 2e-5 if number == 0 and not saved else 2e-4
            assert actual.loss == pytest.approx(expected.loss, rel=tolerance, abs=1e-6)
            assert actual.gradient_norm == pytest.approx(expected.gradient_norm, rel=tolerance)
            assert actual.tokens == expected.tokens
            saved.append(actual.means["saved_token_share"])
            means = {name: value for name, value in actual.means.items() if name != "saved_token_share"}
            assert means == pytest.approx(dict(expected.means), rel=1e-3, abs=1e-5)
    after = published_by(plain)
    assert distance(published_by(sharing), after, moved(before, after)) <= MOVED_APART
    return saved


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="three groups in a row"),
        pytest.param({"train.batch.microBatchSequences": 2}, id="groups in two parts"),
        pytest.param(KL | BUDGET | {"train.batch.maxTokensPerDevice": 30}, id="thirty tokens, kl and entropy"),
        pytest.param({"train.activationCheckpointing": True} | KL, id="recomputed activations"),
    ],
)
def test_shared_prompts_change_no_update(make_model, make_spec, make_batch, settings) -> None:
    # The second batch starts from a model that has left its reference.
    saved = agree(make_model, make_spec, settings, [make_batch(seed=0), make_batch(seed=1)])
    assert all(0 < share < 1 for share in saved)


def test_the_proximal_policy_of_a_batch_of_two_updates_is_scored_alike(make_model, make_spec, make_batch) -> None:
    settings = {
        "algorithm.correction.type": "DecoupledPPO",
        "async.updatesPerBatch": 2,
        "train.batch.promptsPerUpdate": 2,
        "train.batch.microBatchSequences": 4,
        "train.optimizer.epsilon": PROPORTIONAL,
    }
    agree(make_model, make_spec, settings, [make_batch(groups=4, updates=2, truncated=True)])


def test_routers_and_their_losses_train_alike(make_model, make_spec, make_batch) -> None:
    settings: dict[str, Any] = {
        "train.router": {"loadBalancingLoss": 0.5, "zLoss": 0.1},
        "train.batch.microBatchSequences": 6,
    }
    settings |= {"train.optimizer.epsilon": PROPORTIONAL}
    agree(partial(make_model, experts=4), make_spec, settings, [make_batch()])


def test_the_saved_share_is_that_of_the_copies_which_the_row_lacks(make_model, make_spec, make_batch) -> None:
    batch = make_batch()
    [share] = agree(make_model, make_spec, {}, [batch])
    copies = batch.prompt_lengths.reshape(3, 4)[:, 1:].sum()
    assert share == pytest.approx(copies / (batch.lengths - 1).sum())


def shown_batch(*, samples: int = 3) -> TrainBatch:
    random, scenes = np.random.default_rng(0), shown_scenes()
    shown = [each for each in scenes for _ in range(samples)]
    responses = [random.integers(0, 19, random.integers(1, 9)) for _ in shown]
    lengths = np.array([len(each) for each in responses])
    return TrainBatch(
        prompts=np.concatenate([each.tokens.numpy() for each in shown]).astype(np.int32),
        prompt_lengths=np.array([len(each.tokens) for each in shown]),
        responses=np.concatenate(responses).astype(np.int32),
        response_lengths=lengths,
        trainable=np.ones(lengths.sum(), dtype=np.bool_),
        log_probs=random.normal(-3.0, 0.3, lengths.sum()).astype(np.float32),
        rewards=random.normal(size=len(shown)).astype(np.float32),
        group=np.repeat(np.arange(len(scenes)), samples),
        pictures=tuple(each.pictures for each in shown),
    )


@pytest.mark.parametrize("experts", [pytest.param(0, id="dense"), pytest.param(4, id="mixture of experts")])
def test_pictures_of_a_shared_prompt_are_read_once_and_train_the_tower_alike(make_spec, experts) -> None:
    class Counted:
        """A source that counts how often it is read."""

        reads = 0

        def __init__(self, pictures: Any) -> None:
            self._pictures = pictures

        def read(self) -> Any:
            Counted.reads += 1
            return self._pictures

    batch = shown_batch()
    settings = {"algorithm.groupSize": 3, "train.batch.promptsPerUpdate": 4}
    agree(partial(vision_language, experts=experts), make_spec, settings, [batch])
    batch = replace(batch, pictures=tuple(each and Counted(each) for each in batch.pictures or ()))
    engine = FSDPEngine(Origin(partial(vision_language, experts=experts)), make_spec(settings | SHARED), CPU)
    engine.log_probs(batch)
    assert Counted.reads == 3


def test_a_row_that_loses_the_prompt_is_refused_at_start(make_model, make_spec, monkeypatch) -> None:
    """As if responses did not continue their prompts."""
    contained = SharedPrompts.of

    def apart(*arguments: Any) -> SharedPrompts | None:
        shared = contained(*arguments)
        return shared and replace(shared, prompts=(None,) * len(shared.prompts[:-1]) + (0,))

    monkeypatch.setattr(SharedPrompts, "of", apart)
    with pytest.raises(RuntimeError, match=r"set train\.batch\.sharePrompts to false"):
        FSDPEngine(Origin(make_model), make_spec(SHARED), CPU)

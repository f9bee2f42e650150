"""Updates that look at a second policy: the reference model, or the weights at the batch's start.

Each is compared after the weights have left that policy, with the formula on the library's model.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from qwen35_trainer.engines.fsdp.engine import FSDPEngine
from qwen35_trainer.engines.origin import Origin
from qwen35_trainer.engines.train_batch import TrainBatch
from tests.distributed.masters import masters
from tests.publications import published_by

pytestmark = pytest.mark.usefixtures("alone")
CPU = torch.device("cpu")


def by_sample(batch: TrainBatch, values: Any) -> list[Tensor]:
    return [torch.from_numpy(part) for part in np.split(values, np.cumsum(batch.response_lengths)[:-1])]


def advantages(scores: np.ndarray, group: np.ndarray) -> list[float]:
    scaled = []
    for score, own in zip(scores, group, strict=True):
        members = scores[group == own].astype(np.float64)
        scaled.append(float((score - members.mean()) / (members.std(ddof=1) + 1e-6)))
    return scaled


def k3(new: Tensor, reference: Tensor) -> Tensor:
    return (reference - new).exp() - 1 - (reference - new)


def clipped(ratio: Tensor, advantage: float) -> Tensor:
    """The loss of each token: PPO, with the dual clip at 3."""
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.28))
    return loss.clamp(max=-advantage * 3.0) if advantage < 0 else loss


def moved(make_model, engine: FSDPEngine) -> Any:
    """The library's model with the engine's weights."""
    model = make_model()
    model.load_state_dict(published_by(engine))
    return model


def agree(metrics, loss: Tensor, model) -> None:
    loss.backward()
    norm = torch.sqrt(sum(p.grad.double().square().sum() for p in model.parameters() if p.grad is not None))
    assert metrics.loss == pytest.approx(loss.item(), rel=1e-5)
    # The exponentials of ratio and divergence amplify the rounding of log-probabilities.
    assert metrics.gradient_norm == pytest.approx(norm.item(), rel=1e-4)


def fixed(log_probs: list[Tensor]) -> list[Tensor]:
    return [each.detach() for each in log_probs]


def pulled_back(batch, log_probs: list[Tensor], initial: list[Tensor], scores: np.ndarray | None = None) -> Tensor:
    """PPO's loss with KL to the initial model in it, mean over trained tokens. scores: by default, the rewards."""
    total = torch.zeros(())
    for new, reference, old, mask, advantage in zip(
        log_probs,
        fixed(initial),
        by_sample(batch, batch.log_probs),
        by_sample(batch, batch.trainable),
        advantages(batch.rewards if scores is None else scores, batch.group),
        strict=True,
    ):
        total = total + (clipped((new - old).exp(), advantage) + 0.5 * k3(new, reference))[mask].sum()
    return total / int(batch.trainable.sum())


OVER_CANDIDATES = pytest.mark.parametrize("truncated", [False, True], ids=["", "over candidates"])
"""All policies are compared over the tokens that could have been drawn."""


@OVER_CANDIDATES
def test_kl_in_the_loss_pulls_back_to_the_initial_model(
    make_model, make_spec, make_batch, log_probs_of, truncated
) -> None:
    spec = make_spec({"algorithm.kl.placement": "Loss", "algorithm.kl.coefficient": 0.5})
    engine = FSDPEngine(Origin(make_model), spec, CPU)
    engine.train(make_batch(seed=0), [5e-3])
    batch, current = make_batch(seed=1, truncated=truncated), moved(make_model, engine)
    [metrics] = engine.train(batch, [1e-3])
    agree(metrics, pulled_back(batch, log_probs_of(current, batch), log_probs_of(make_model(), batch)), current)


def test_with_adapters_the_initial_model_is_the_one_without_them(
    make_model, make_spec, make_batch, log_probs_of
) -> None:
    changes = {"algorithm.kl.placement": "Loss", "algorithm.kl.coefficient": 0.5, "train.lora": {"rank": 4}}
    engine = FSDPEngine(Origin(make_model), make_spec(changes), CPU)
    assert engine._reference is None, "a second copy of the weights"
    for seed in range(2):  # the first update moves one of each adapter's two factors only
        engine.train(make_batch(seed=seed), [1e-2])
    batch, current = make_batch(seed=2), make_model()
    current.load_state_dict(masters(engine))
    [metrics] = engine.train(batch, [1e-3])
    expected = pulled_back(batch, log_probs_of(current, batch), log_probs_of(make_model(), batch))
    assert metrics.loss == pytest.approx(expected.item(), rel=1e-4)
    assert metrics.means["kl"] > 1e-3


@OVER_CANDIDATES
def test_kl_in_the_reward_is_that_of_the_policy_that_generated(
    make_model, make_spec, make_batch, log_probs_of, truncated
) -> None:
    spec = make_spec({"algorithm.kl.placement": "Reward", "algorithm.kl.coefficient": 0.5})
    engine = FSDPEngine(Origin(make_model), spec, CPU)
    engine.train(make_batch(seed=0), [5e-3])
    batch, current = make_batch(seed=1, truncated=truncated), moved(make_model, engine)
    [metrics] = engine.train(batch, [1e-3])

    olds, masks = by_sample(batch, batch.log_probs), by_sample(batch, batch.trainable)
    references = fixed(log_probs_of(make_model(), batch))
    penalties = [
        float(k3(old, reference).clamp(max=10.0)[mask].sum())
        for old, reference, mask in zip(olds, references, masks, strict=True)
    ]
    scores = batch.rewards - 0.5 * np.array(penalties, dtype=np.float32)
    total = torch.zeros(())
    for new, old, mask, advantage in zip(
        log_probs_of(current, batch), olds, masks, advantages(scores, batch.group), strict=True
    ):
        total = total + clipped((new - old).exp(), advantage)[mask].sum()
    agree(metrics, total / int(batch.trainable.sum()), current)


@pytest.mark.parametrize("adapted", [None, 0.3])
def test_kl_in_loss_and_reward_has_a_coefficient_and_an_estimator_each(
    make_model, make_spec, make_batch, log_probs_of, adapted
) -> None:
    """The coefficient in the reward is the one that adapts."""
    kl = {"placement": "LossAndReward", "coefficient": 0.5, "rewardCoefficient": 0.1, "rewardEstimator": "K1"}
    engine = FSDPEngine(Origin(make_model), make_spec({"algorithm.kl": kl}), CPU)
    engine.train(make_batch(seed=0), [5e-3])
    batch, current = replace(make_batch(seed=1), kl_coefficient=adapted), moved(make_model, engine)
    [metrics] = engine.train(batch, [1e-3])
    olds, masks = by_sample(batch, batch.log_probs), by_sample(batch, batch.trainable)
    initial = log_probs_of(make_model(), batch)
    penalties = [float((q - p)[mask].sum()) for q, p, mask in zip(olds, fixed(initial), masks, strict=True)]
    scores = batch.rewards - (adapted or 0.1) * np.array(penalties, dtype=np.float32)
    agree(metrics, pulled_back(batch, log_probs_of(current, batch), initial, scores), current)


@pytest.mark.parametrize("correction", ["DecoupledPPO", "Recomputed"])
@OVER_CANDIDATES
def test_the_second_update_of_a_batch_is_clipped_around_the_weights_at_its_start(
    make_model, make_spec, make_batch, log_probs_of, truncated, correction
) -> None:
    spec = make_spec(
        {
            "algorithm.correction.type": correction,
            "train.batch.promptsPerUpdate": 2,
            "train.batch.microBatchSequences": 8,
            "async.updatesPerBatch": 2,
        }
    )
    batch = make_batch(groups=4, updates=2, truncated=truncated)
    halfway, engine = (FSDPEngine(Origin(make_model), spec, CPU) for _ in range(2))
    halfway.train(batch, [5e-3, 0.0])  # the weights after the first update
    [_, metrics] = engine.train(batch, [5e-3, 1e-3])

    current = moved(make_model, halfway)
    total, tokens = torch.zeros(()), 0
    rows = list(
        zip(
            log_probs_of(current, batch),
            fixed(log_probs_of(make_model(), batch)),
            by_sample(batch, batch.log_probs),
            by_sample(batch, batch.trainable),
            advantages(batch.rewards, batch.group),
            strict=True,
        )
    )
    for new, proximal, old, mask, advantage in rows[8:]:
        weight = (proximal - old).exp().clamp(max=2.0) if correction == "DecoupledPPO" else 1.0
        total = total + (weight * clipped((new - proximal).exp(), advantage))[mask].sum()
        tokens += int(mask.sum())
    agree(metrics, total / tokens, current)
    assert metrics.tokens == tokens

"""What an optimizer step does to the weights: by clipped gradients, with the spec's decay, in float32."""

import dataclasses

import pytest
import torch
from torch import nn

from qwen35_trainer.engines.fsdp.engine import FSDPEngine
from qwen35_trainer.engines.origin import Origin
from tests.distributed.masters import masters
from tests.publications import published_by

pytestmark = pytest.mark.usefixtures("alone")
CPU = torch.device("cpu")
SUPERVISED = {"mode": "SFT", "rollout": None, "rewards": None, "train.batch.microBatchSequences": 3}
DECAY, CLIP = 0.5, 2.0


def supervised(batch):
    return dataclasses.replace(batch, log_probs=None, rewards=None, group=None)


def is_spared(name: str) -> bool:
    return name.endswith(("norm.weight", "A_log", "dt_bias", "conv1d.weight"))


@pytest.mark.parametrize("all_decay", [False, True])
def test_two_steps_are_those_of_clipped_adamw_with_its_decay(
    make_model, make_spec, make_batch, log_probs_of, all_decay: bool
) -> None:
    batches, rates = [supervised(make_batch(seed=seed)) for seed in (0, 1)], [2e-3, 1e-3]
    model, norms = make_model().train(), []
    named = dict(model.named_parameters())
    spared = [parameter for name, parameter in named.items() if is_spared(name) and not all_decay]
    decayed = [parameter for name, parameter in named.items() if all_decay or not is_spared(name)]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": spared, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95))
    for batch, rate in zip(batches, rates, strict=True):
        chosen = torch.cat(log_probs_of(model, batch))[torch.from_numpy(batch.trainable)]
        (-chosen.mean()).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
    optimizing = {"weightDecay": DECAY, "gradientClip": CLIP, "decayAll": all_decay}
    settings = {f"train.optimizer.{name}": value for name, value in optimizing.items()}
    engine = FSDPEngine(Origin(make_model), make_spec(SUPERVISED | settings), CPU)
    metrics = [engine.train(batch, [rate])[0] for batch, rate in zip(batches, rates, strict=True)]
    assert [step.gradient_norm for step in metrics] == pytest.approx(norms, rel=1e-3)
    trained = published_by(engine)
    for name, expected in model.state_dict().items():
        # Adam divides by the gradient's size: where that is near zero, rounding decides the sign of a step.
        near = (trained[name] - expected).abs() <= 1e-5
        assert near.float().mean() > 0.98, name


def test_steps_too_small_for_bfloat16_add_up_in_a_bfloat16_model(make_model, make_spec, make_batch) -> None:
    """Neighbours of a weight of 0.2 are 1e-3 apart in bfloat16: it would never move by steps of 1e-6."""
    engine = FSDPEngine(Origin(make_model), make_spec(SUPERVISED | {"model.precision": "BF16"}), CPU)
    batch, rate = supervised(make_batch()), 1e-6
    before = {name: tensor.clone() for name, tensor in masters(engine).items()}
    for _ in range(4):
        engine.train(batch, [rate])
    for name, tensor in masters(engine).items():
        moved = (tensor - before[name]).abs()
        assert moved.max() <= 4.2 * rate, name
        # Of the embeddings only those of tokens in the batch have a gradient.
        assert (moved > rate).float().mean() > 0.7, name

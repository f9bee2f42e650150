"""One rank of FSDP2 training against the library's model and the formula, written out here."""

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import load_balancing_loss_func

from qwen35_trainer.engines.fsdp import sharding
from qwen35_trainer.engines.fsdp.engine import FSDPEngine
from qwen35_trainer.engines.micro_batch import Offsets
from qwen35_trainer.engines.origin import Origin
from qwen35_trainer.engines.skipped_updates import MAX_SKIPPED_UPDATES, NotFinite
from qwen35_trainer.engines.train_batch import TrainBatch
from qwen35_trainer.models.qwen3_5.precision import keeps_float32
from tests.distributed.distance import distance, moved
from tests.distributed.masters import masters
from tests.distributed.samples import scenes_of
from tests.distributed.test_parity import scores_of
from tests.models.scenes import vision_language
from tests.publications import published_by

pytestmark = pytest.mark.usefixtures("alone")
CPU = torch.device("cpu")
MOVED_APART = 5e-3
"""Allowed distance of two trainings of some updates, as a share of what they changed: Adam divides by the size of the gradient, and
where that is near zero, rounding decides the sign of a step."""


def group_advantages(batch) -> list[float]:
    advantages = []
    for sample, group in enumerate(batch.group):
        rewards = batch.rewards[batch.group == group].astype(np.float64)
        advantages.append((batch.rewards[sample] - rewards.mean()) / (rewards.std(ddof=1) + 1e-6))
    return advantages


def split(batch, values) -> list[torch.Tensor]:
    return [torch.from_numpy(part) for part in np.split(values, np.cumsum(batch.response_lengths)[:-1])]


def cut(batch, samples: slice) -> TrainBatch:
    """A batch of one update of those samples, which have the group numbers that they had."""
    ends = np.concatenate([[0], np.cumsum(batch.response_lengths)])
    tokens = slice(ends[samples.start], ends[samples.stop])
    starts = np.concatenate([[0], np.cumsum(batch.prompt_lengths)])
    return TrainBatch(
        prompts=batch.prompts[starts[samples.start] : starts[samples.stop]],
        prompt_lengths=batch.prompt_lengths[samples],
        responses=batch.responses[tokens],
        response_lengths=batch.response_lengths[samples],
        trainable=batch.trainable[tokens],
        log_probs=batch.log_probs[tokens],
        rewards=batch.rewards[samples],
        group=batch.group[samples],
    )


def copies_of(weights) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in weights.items()}


def gradient_norm(model) -> float:
    return float(torch.sqrt(sum((p.grad.double() ** 2).sum() for p in model.parameters() if p.grad is not None)))


def clipped_policy_loss(model, batch, log_probs_of) -> torch.Tensor:
    """PPO with dual clip against the behaviour policy, mean over trained tokens."""
    total = torch.zeros(())
    parts = zip(
        log_probs_of(model, batch), split(batch, batch.log_probs), split(batch, batch.trainable), group_advantages(batch),
        strict=True,
    )  # fmt: skip
    for new, old, mask, advantage in parts:
        ratio = (new - old).exp()
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
        if advantage < 0:
            surrogate = torch.maximum(surrogate, torch.tensor(3.0 * advantage))
        total = total - surrogate[mask].sum()
    return total / int(batch.trainable.sum())


@pytest.mark.parametrize(
    ("experts", "truncated"),
    [
        pytest.param(0, False, id="dense"),
        pytest.param(4, False, id="mixture of experts"),
        pytest.param(0, True, id="over candidates"),
    ],
)
def test_the_first_update_is_the_formulas(make_model, make_spec, make_batch, log_probs_of, experts, truncated) -> None:
    batch, reference = make_batch(truncated=truncated), make_model(experts=experts).train()
    loss = clipped_policy_loss(reference, batch, log_probs_of)
    loss.backward()
    engine = FSDPEngine(Origin(partial(make_model, experts=experts)), make_spec(), CPU)
    [metrics] = engine.train(batch, [1e-3])
    assert metrics.loss == pytest.approx(loss.item(), rel=1e-5)
    assert metrics.gradient_norm == pytest.approx(gradient_norm(reference), rel=1e-5)
    assert metrics.tokens == batch.trainable.sum()
    torch.optim.AdamW(reference.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0).step()
    trained = published_by(engine)
    for name, expected in reference.state_dict().items():
        # Adam divides by the gradient's size: where that is near zero, rounding decides the sign of a step of 1e-3.
        near = (trained[name] - expected).abs() <= 1e-5
        assert near.float().mean() > 0.98, name


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"train.batch.microBatchSequences": 1}, id="one sample at a time"),
        pytest.param({"train.batch.microBatchSequences": 4}, id="four at a time"),
        pytest.param(
            {"train.batch.dynamicMicroBatches": True, "train.batch.maxTokensPerDevice": 40, "data.maxPromptTokens": 8},
            id="forty tokens at a time",
        ),
        pytest.param({"train.activationCheckpointing": True}, id="recomputed activations"),
    ],
)
@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param({}, id="ppo"),
        pytest.param({"algorithm.loss.type": "GSPO", "algorithm.correction.type": "TokenTIS"}, id="gspo"),
        pytest.param({"algorithm.loss.aggregation": "SequenceMeanTokenMean"}, id="mean of means"),
        pytest.param({"algorithm.kl.placement": "Loss", "algorithm.kl.coefficient": 0.5}, id="kl in the loss"),
        pytest.param({"algorithm.kl.placement": "Reward", "algorithm.kl.coefficient": 0.5}, id="kl in the reward"),
        pytest.param({"algorithm.entropyCoefficient": 0.3}, id="entropy bonus"),
    ],
)
def test_no_layout_changes_the_updates(make_model, make_spec, make_batch, algorithm, layout) -> None:
    no_layout_changes_the_updates(make_model, make_spec, make_batch, algorithm, layout)


def test_inputs_of_layers_are_in_host_memory_between_their_passes(
    make_model, make_spec, make_batch, monkeypatch
) -> None:
    """And nothing else is. Here host memory is a copy, which a CPU would not make."""
    saved: list[torch.Size] = []

    class Copying(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self, **_: object) -> None:
            super().__init__(self.pack, torch.clone)

        def pack(self, tensor: torch.Tensor) -> torch.Tensor:
            saved.append(tensor.shape)
            return tensor.detach().clone()

    monkeypatch.setattr(sharding, "save_on_cpu", Copying)
    recomputed = {"train.activationCheckpointing": True, "train.batch.microBatchSequences": 4}
    settings = (recomputed, recomputed | {"train.offload.activations": True})
    engines = [FSDPEngine(Origin(make_model), make_spec(each), CPU) for each in settings]
    batch = make_batch()
    assert engines[0].train(batch, [1e-3]) == engines[1].train(batch, [1e-3])
    assert len(saved) == len(make_model().model.layers) * batch.samples // 4
    assert {(len(shape), shape[-1]) for shape in saved} == {(3, make_model().config.hidden_size)}
    expected, published = (published_by(engine) for engine in engines)
    assert all(torch.equal(published[name], values) for name, values in expected.items())


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_no_layout_changes_the_updates_over_candidates(make_model, make_spec, make_batch, packed) -> None:
    algorithm = {"algorithm.kl.placement": "Loss", "algorithm.kl.coefficient": 0.5, "algorithm.entropyCoefficient": 0.3}
    layout = {
        "train.batch.dynamicMicroBatches": True,
        "train.batch.maxTokensPerDevice": 40,
        "data.maxPromptTokens": 8,
        "train.batch.removePadding": packed,
    }
    no_layout_changes_the_updates(make_model, make_spec, make_batch, algorithm, layout, truncated=True)


def no_layout_changes_the_updates(make_model, make_spec, make_batch, algorithm, layout, **batches) -> None:
    plain, other = (FSDPEngine(Origin(make_model), make_spec(algorithm | cut), CPU) for cut in ({}, layout))
    before = copies_of(published_by(plain))
    # The second update starts from a model that has left its reference, so that a KL term has something to say. Adam
    # has amplified the first one's rounding by then.
    for batch, tolerance in ((make_batch(seed=0, **batches), 1e-5), (make_batch(seed=1, **batches), 1e-4)):
        [expected], [actual] = plain.train(batch, [1e-3]), other.train(batch, [1e-3])
        assert actual.loss == pytest.approx(expected.loss, rel=tolerance)
        assert actual.gradient_norm == pytest.approx(expected.gradient_norm, rel=tolerance)
        assert actual.tokens == expected.tokens
    after = published_by(plain)
    assert distance(published_by(other), after, moved(before, after)) <= MOVED_APART


@pytest.mark.parametrize("coefficient", [0.0, 0.3])
def test_entropy_is_computed_where_the_loss_has_it_or_the_metrics_want_it(
    make_model, make_spec, make_batch, coefficient
) -> None:
    log_probs = []
    for wanted in (True, False):
        spec = make_spec({"algorithm.entropyCoefficient": coefficient, "algorithm.reportEntropy": wanted})
        [metrics] = FSDPEngine(Origin(make_model), spec, CPU).train(make_batch(), [1e-3])
        log_probs.append((metrics.loss, metrics.gradient_norm, "entropy" in metrics.means))
    (with_it, without) = log_probs
    assert with_it[:2] == pytest.approx(without[:2], rel=1e-6)
    assert (with_it[2], without[2]) == (True, coefficient != 0)


def test_a_batch_of_several_updates_steps_once_for_each_part(make_model, make_spec, make_batch, log_probs_of) -> None:
    """By the formula: the second part's gradient is that of the weights that the first part's step left."""
    batch, reference = make_batch(groups=4, updates=2), make_model().train()
    before = copies_of(reference.state_dict())
    optimizer = torch.optim.AdamW(reference.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    losses, norms = [], []
    for part, rate in ((slice(0, 8), 1e-3), (slice(8, 16), 5e-4)):
        optimizer.zero_grad()
        loss = clipped_policy_loss(reference, cut(batch, part), log_probs_of)
        loss.backward()
        losses.append(loss.item())
        norms.append(gradient_norm(reference))
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    spec = make_spec(
        {"train.batch.promptsPerUpdate": 2, "train.batch.microBatchSequences": 8, "async.updatesPerBatch": 2}
    )
    engine = FSDPEngine(Origin(make_model), spec, CPU)
    metrics = engine.train(batch, [1e-3, 5e-4])
    assert [step.learning_rate for step in metrics] == [1e-3, 5e-4]
    assert [step.loss for step in metrics] == pytest.approx(losses, rel=1e-5)
    assert [step.gradient_norm for step in metrics] == pytest.approx(norms, rel=1e-5)
    assert sum(step.tokens for step in metrics) == batch.trainable.sum()
    after = reference.state_dict()
    assert distance(published_by(engine), after, moved(before, after)) <= MOVED_APART


@contextmanager
def overflowing(engine: FSDPEngine) -> Iterator[None]:
    """The backward pass overflows, as it may in a precision with few exponents."""

    def spoil(_: object, __: object, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * float("inf"))

    hook = engine._model.model.norm.register_forward_hook(spoil)
    yield
    hook.remove()


def test_an_update_whose_gradient_is_not_finite_is_left_out(make_model, make_spec, make_batch) -> None:
    engine = FSDPEngine(Origin(make_model), make_spec(), CPU)
    engine.train(make_batch(), [1e-3])
    before = published_by(engine)
    good = make_batch(seed=1)
    with overflowing(engine):
        [metrics] = engine.train(good, [1e-3])
    assert not np.isfinite(metrics.gradient_norm)
    assert all(torch.equal(tensor, before[name]) for name, tensor in published_by(engine).items())
    [metrics] = engine.train(good, [1e-3])
    assert np.isfinite(metrics.gradient_norm)
    assert all(tensor.isfinite().all() for tensor in published_by(engine).values())


def test_a_run_ends_when_no_gradient_in_a_row_is_finite(make_model, make_spec, make_batch) -> None:
    engine, batch = FSDPEngine(Origin(make_model), make_spec(), CPU), make_batch()
    for _ in range(2):
        with overflowing(engine):
            for _ in range(MAX_SKIPPED_UPDATES - 1):
                engine.train(batch, [1e-3])
        engine.train(batch, [1e-3])
    with overflowing(engine):
        for _ in range(MAX_SKIPPED_UPDATES - 1):
            engine.train(batch, [1e-3])
        with pytest.raises(NotFinite, match=r"for the 5th step in a row.*learningRate"):
            engine.train(batch, [1e-3])


def test_gradients_are_added_to_the_shards_after_every_micro_batch(make_model, make_spec, make_batch) -> None:
    """Whole ones would take as much memory on every rank as the whole model."""
    engine = FSDPEngine(Origin(make_model), make_spec({"train.batch.microBatchSequences": 4}), CPU)
    layers, there = engine._model.model.layers, []

    def look(*_: object) -> None:
        there.append({parameter.grad is not None for parameter in layers.parameters()})

    engine._model.register_forward_pre_hook(look)
    engine.train(make_batch(), [1e-3])
    assert there == [{False}, {True}, {True}]


def test_rotary_tables_of_the_vision_tower_stay_float32_in_a_bfloat16_model(make_spec) -> None:
    """As in the library without FSDP2, whose policy would cast what comes into a block."""
    engine = FSDPEngine(Origin(vision_language), make_spec({"model.precision": "BF16"}), CPU)
    seen = []

    def look(_: object, inputs: tuple[torch.Tensor], named: dict[str, Any]) -> None:
        seen.append((inputs[0].dtype, *(table.dtype for table in named["position_embeddings"])))

    engine._model.model.visual.blocks[0].register_forward_pre_hook(look, with_kwargs=True)
    engine.negative_log_likelihood(scenes_of(0))
    assert set(seen) == {(torch.bfloat16, torch.float32, torch.float32)}


@pytest.mark.parametrize(
    "train",
    [
        pytest.param({"algorithm.kl.placement": "Loss"}, id="policy and reference"),
        pytest.param({"train.lora": {"rank": 2}}, id="frozen below adapters"),
        pytest.param({"train.offload.parameters": True}, id="on the host"),
        pytest.param({"train.activationCheckpointing": True}, id="recomputed activations"),
    ],
)
def test_what_is_published_in_float32_computes_in_float32_in_a_bfloat16_model(
    make_model, make_spec, make_batch, train
) -> None:
    engine = FSDPEngine(Origin(make_model), make_spec({"model.precision": "BF16"} | train), CPU)
    seen = []
    for model in (engine._model, engine._reference):
        for net in (
            [layer.linear_attn for layer in model.model.layers if hasattr(layer, "linear_attn")] if model else []
        ):
            vectors = (net.A_log, net.norm.weight, net.dt_bias, net.conv1d.weight)  # sharded, as they rest
            assert all(each.dtype == torch.float32 for each in vectors if each.requires_grad)

            def look(_: object, __: object, net=net) -> None:
                seen.append(tuple(x.dtype for x in (net.A_log, net.norm.weight, net.dt_bias, net.conv1d.weight)))

            net.norm.register_forward_pre_hook(look)
    before = copies_of(masters(engine))
    engine.train(make_batch(), [1e-3])
    assert set(seen) == {(torch.float32, torch.float32, torch.bfloat16, torch.bfloat16)}
    trains = {name for name, tensor in masters(engine).items() if not torch.equal(tensor, before[name])}
    assert ("model.layers.0.linear_attn.A_log" in trains) == ("train.lora" not in train)


@pytest.mark.parametrize("experts", [0, 4], ids=["dense", "mixture of experts"])
def test_scores_in_bfloat16_are_nearer_to_exact_ones_than_the_librarys(
    make_model, make_spec, make_batch, experts
) -> None:
    """All three have the weights that a published folder would hold. The library's model is all bfloat16."""

    def published() -> Any:
        model = make_model(experts=experts)
        for name, parameter in model.named_parameters():
            if not keeps_float32(name):
                parameter.data = parameter.data.bfloat16().float()
            elif name.endswith("A_log"):
                parameter.data.uniform_(-7, 0, generator=torch.Generator().manual_seed(1))
        return model

    batch = make_batch(groups=8)
    engine = FSDPEngine(Origin(published), make_spec({"model.precision": "BF16"}), CPU)
    scores = engine._table(engine._model, batch, Offsets.of(batch), temperature=1.0)

    def error(values: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
        return float(torch.cat([a - b for a, b in zip(values, exact, strict=True)]).square().mean().sqrt())

    with torch.no_grad():
        exact, theirs = (list(scores_of(model, batch)) for model in (published(), published().bfloat16()))
    ours = split(batch, scores.values.numpy())
    assert error(ours, exact) < error(theirs, exact) < 0.5


def test_logits_are_rounded_to_the_models_precision_unless_float32_is_asked_for(
    make_model, make_spec, make_batch
) -> None:
    """The hidden states of both are the same: what differs is the rounding of the logits alone."""
    batch, results = make_batch(groups=1, samples=1), {}
    for head in ("BF16", "FP32"):
        spec = make_spec({"model.precision": "BF16", "train.headPrecision": head})
        engine = FSDPEngine(Origin(make_model), spec, CPU)
        hidden: list[torch.Tensor] = []
        engine._model.model.norm.register_forward_hook(lambda _, __, output, hidden=hidden: hidden.append(output))
        scores = engine._table(engine._model, batch, Offsets.of(batch), temperature=1.0)
        logits = hidden[0].float() @ published_by(engine)["lm_head.weight"].float().T
        targets = torch.from_numpy(batch.responses[batch.trainable].astype(np.int64))
        exact = logits.log_softmax(-1).gather(1, targets.unsqueeze(1)).squeeze(1)
        results[head] = float((scores.values[batch.trainable] - exact).abs().max())
    assert results["FP32"] < 1e-5 < 1e-4 < results["BF16"]


def test_a_batch_without_a_token_to_train_changes_nothing(make_model, make_spec, make_batch) -> None:
    engine = FSDPEngine(Origin(make_model), make_spec(), CPU)
    engine.train(make_batch(), [1e-3])  # Adam has momentum now
    before = published_by(engine)
    batch = make_batch(seed=1)
    [metrics] = engine.train(dataclasses.replace(batch, trainable=np.zeros_like(batch.trainable)), [1e-3])
    assert (metrics.tokens, metrics.gradient_norm) == (0, 0.0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in published_by(engine).items())


def test_equal_rewards_leave_the_weights_alone(make_model, make_spec, make_batch) -> None:
    engine = FSDPEngine(Origin(make_model), make_spec(), CPU)
    batch = make_batch()
    [metrics] = engine.train(dataclasses.replace(batch, rewards=np.ones_like(batch.rewards)), [1e-3])
    assert metrics.gradient_norm == 0.0


def test_samples_that_could_not_be_scored_do_not_count(make_model, make_spec, make_batch, log_probs_of) -> None:
    """The whole batch with one sample marked equals the batch without it."""
    batch = make_batch(groups=1, samples=4)
    valid = np.array([True, True, True, False])
    mask = batch.trainable & np.repeat(valid, batch.response_lengths)
    marked = dataclasses.replace(batch, valid=valid, trainable=mask, rewards=np.array([1, 0, 0, 9], dtype=np.float32))
    without = dataclasses.replace(cut(batch, slice(0, 3)), rewards=np.array([1, 0, 0], dtype=np.float32))
    results = [FSDPEngine(Origin(make_model), make_spec(), CPU).train(each, [1e-3])[0] for each in (marked, without)]
    assert results[0].loss == pytest.approx(results[1].loss, rel=1e-5, abs=1e-7)
    assert results[0].gradient_norm == pytest.approx(results[1].gradient_norm, rel=1e-4)


def test_supervised_loss_is_the_mean_negative_log_likelihood(make_model, make_spec, make_batch, log_probs_of) -> None:
    spec = make_spec({"mode": "SFT", "rollout": None, "rewards": None, "train.batch.microBatchSequences": 3})
    batch = dataclasses.replace(make_batch(), log_probs=None, rewards=None, group=None)
    reference = make_model()
    chosen = torch.cat(
        [new[mask] for new, mask in zip(log_probs_of(reference, batch), split(batch, batch.trainable), strict=True)]
    )
    engine = FSDPEngine(Origin(make_model), spec, CPU)
    assert engine.negative_log_likelihood(batch) == pytest.approx(-chosen.mean().item(), rel=1e-5)
    [metrics] = engine.train(batch, [1e-2])
    assert metrics.loss == pytest.approx(-chosen.mean().item(), rel=1e-5)
    assert engine.negative_log_likelihood(batch) < metrics.loss


def test_router_losses_are_added_to_the_objective(make_model, make_spec, make_batch, log_probs_of) -> None:
    """Of each sequence without its last token, by the library's formulas; averages over tokens, sums over layers."""
    batch = make_batch()
    batch = dataclasses.replace(batch, log_probs=None, rewards=None, group=None)
    router = {"loadBalancingLoss": 0.5, "zLoss": 0.1}
    settings = {
        "mode": "SFT",
        "rollout": None,
        "rewards": None,
        "train.router": router,
        "train.batch.microBatchSequences": 3,
    }
    [metrics] = FSDPEngine(Origin(partial(make_model, experts=4)), make_spec(settings), CPU).train(batch, [1e-3])

    model, seen = make_model(experts=4).train(), []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, __, output: seen.append(output[0]))
    log_probs = log_probs_of(model, batch)
    nll = -torch.cat(log_probs)[torch.from_numpy(batch.trainable)].mean()
    layers, top_k, read = len(model.model.layers), model.config.num_experts_per_tok, int((batch.lengths - 1).sum())
    balance = z = torch.zeros(())
    for number, length in enumerate(batch.lengths):
        for routed in seen[number * layers : (number + 1) * layers]:
            logits = routed[: length - 1]
            balance = balance + (length - 1) / top_k * load_balancing_loss_func((logits,), 4, top_k) / read
            z = z + logits.logsumexp(-1).square().sum() / read
    loss = nll + 0.5 * balance + 0.1 * z
    loss.backward()
    assert metrics.loss == pytest.approx(loss.item(), rel=1e-5)
    assert metrics.gradient_norm == pytest.approx(gradient_norm(model), rel=1e-4)
    assert metrics.means["router_load_balancing"] == pytest.approx(balance.item() / layers, rel=1e-5)
    assert metrics.means["router_z"] == pytest.approx(z.item() / layers, rel=1e-5)


def recorded_passes(model: Any) -> int:
    """How many forward passes of units FSDP remembers for a backward pass."""
    states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [state._fsdp_param_group for state in states if state._fsdp_param_group is not None]
    return len(states[0]._comm_ctx.post_forward_order) + sum(len(group._post_forward_indices) for group in groups)


def test_fsdp_remembers_no_forward_pass_that_only_scored(make_model, make_spec, make_batch) -> None:
    engine = FSDPEngine(Origin(make_model), make_spec({"algorithm.kl.placement": "Loss"}), CPU)
    sharding.free_gathered(engine._reference)  # which has not run yet
    for seed in range(2):
        engine.train(make_batch(seed=seed), [1e-3])
        assert recorded_passes(engine._reference) == 0
    engine.log_probs(make_batch())
    assert recorded_passes(engine._model) == 0
    assert math.isfinite(engine.train(make_batch(), [1e-3])[0].loss)


def test_router_losses_of_a_dense_model_are_refused(make_model, make_spec) -> None:
    with pytest.raises(ValueError, match=r"spec\.train\.router: .* has no router; remove its losses"):
        FSDPEngine(Origin(make_model), make_spec({"train.router": {"zLoss": 0.1}}), CPU)


def test_a_restored_engine_makes_the_update_that_the_saved_one_would(
    make_model, make_spec, make_batch, tmp_path
) -> None:
    saved = FSDPEngine(Origin(make_model), make_spec(), CPU)
    saved.train(make_batch(), [1e-3])
    saved.save(tmp_path)
    assert saved.saved(wait=True)
    random = torch.rand(3)
    restored = FSDPEngine(Origin(partial(make_model, seed=9)), make_spec(), CPU)
    restored.restore(tmp_path)
    assert torch.equal(torch.rand(3), random)
    [expected], [actual] = saved.train(make_batch(seed=2), [1e-3]), restored.train(make_batch(seed=2), [1e-3])
    assert actual == expected
    weights = published_by(saved)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in published_by(restored).items())

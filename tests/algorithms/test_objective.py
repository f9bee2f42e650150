import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from qwen35_trainer.algorithms.aggregation import AGGREGATIONS, GlobalCounts, aggregate
from qwen35_trainer.algorithms.corrections import CORRECTIONS
from qwen35_trainer.algorithms.losses import LOSSES
from qwen35_trainer.algorithms.objective import Objective, needs_proximal, policy_objective, supervised_objective
from tests.algorithms.whole_batch import counts_of

PLAIN = Objective(
    loss="PPOClip",
    clip_low=0.2,
    clip_high=0.28,
    dual_clip=3.0,
    aggregation="TokenMean",
    kl_placement="None",
    kl_coefficient=0.0,
    kl_estimator="K3",
    entropy_coefficient=0.0,
    correction="TokenTIS",
    cap=2.0,
    floor=0.5,
)


def one_token(objective, *, current=0.5, behaviour=0.5, proximal=None, reference=None, entropy=None, advantage=1.0):
    """Loss, gradient with respect to the log-prob, and metrics of one token with these probabilities."""

    def tensor(value):
        return None if value is None else torch.tensor([[value]])

    log_probs = torch.tensor([[math.log(current)]], requires_grad=True)
    loss, metrics = policy_objective(
        objective,
        log_probs=log_probs,
        entropy=tensor(entropy),
        behaviour_log_probs=tensor(behaviour).log(),
        proximal_log_probs=None if proximal is None else tensor(proximal).log(),
        reference_log_probs=None if reference is None else tensor(reference).log(),
        advantages=tensor(advantage),
        mask=torch.ones(1, 1),
        counts=GlobalCounts(tokens=1, sequences=1, max_tokens=1),
    )
    (gradient,) = torch.autograd.grad(loss, log_probs)
    return loss.item(), gradient.item(), {name: value.item() for name, value in metrics.items()}


def test_policy_kl_and_entropy_add_up():
    # Behaviour 0.3 → current 0.5: weight 5/3, ratio 1 to the policy itself, so the policy term is -5/3 with that slope.
    # K2 with d = ln(0.5/0.25) = ln 2: 0.1·ln²2/2 with slope 0.1·ln 2. Entropy 1.5 at 0.01.
    objective = replace(PLAIN, kl_placement="Loss", kl_coefficient=0.1, kl_estimator="K2", entropy_coefficient=0.01)
    loss, gradient, metrics = one_token(objective, behaviour=0.3, reference=0.25, entropy=1.5)
    assert loss == pytest.approx(-5 / 3 + 0.05 * math.log(2) ** 2 - 0.015)
    assert gradient == pytest.approx(-5 / 3 + 0.1 * math.log(2))
    assert metrics == pytest.approx(
        {
            "tokens": 1,
            "policy_loss": -5 / 3,
            "correction_weight": 5 / 3,
            "kept_tokens": 1,
            # r = current/behaviour = 5/3: r - 1 - ln r.
            "behaviour_kl": 2 / 3 - math.log(5 / 3),
            "entropy": 1.5,
            "kl": math.log(2) ** 2 / 2,
            "ratio": 1,
            "clip_fraction_low": 0,
            "clip_fraction_high": 0,
            "clip_fraction_dual": 0,
        },
        rel=1e-5,
    )


@pytest.mark.parametrize(
    ("correction", "proximal", "loss", "gradient"),
    [
        # Behaviour 0.25, proximal 0.4, current 0.5, A = 1: current/behaviour 2, proximal/behaviour 1.6, ratio 1.25.
        ("None", None, -1.28, 0.0),  # the ratio is 2, clipped at 1.28
        ("None", 0.4, -1.28, 0.0),  # proximal is not used
        ("Recomputed", 0.4, -1.25, -1.25),  # weight 1, ratio 1.25
        ("Recomputed", 0.2, -1.28, 0.0),  # ratio 2.5 clipped at 1.28
        ("TokenTIS", None, -2.0, -2.0),  # weight 2, ratio 1
        ("TokenTIS", 0.4, -2.0, -2.0),  # weight 1.6, ratio 1.25
        ("SequenceTIS", 0.4, -2.0, -2.0),
        ("IcePop", 0.4, -2.0, -2.0),
        ("SequenceMask", 0.4, -1.25, -1.25),  # weight 1, ratio 1.25
        ("SequenceMask", None, -1.0, -1.0),  # weight 1, ratio 1
        ("DecoupledPPO", 0.4, -2.0, -2.0),
        ("DecoupledPPO", 0.2, -1.024, 0.0),  # weight 0.8, ratio 2.5 clipped at 1.28
    ],
)
def test_the_correction_decides_what_weighs_and_what_clips(correction, proximal, loss, gradient):
    objective = replace(PLAIN, correction=correction, cap=2.1)
    got = one_token(objective, behaviour=0.25, proximal=proximal)
    assert got[:2] == pytest.approx((loss, gradient), rel=1e-5)


@given(
    probabilities=st.tuples(*[st.floats(0.3, 0.5)] * 3),
    correction=st.sampled_from(["TokenTIS", "SequenceTIS", "IcePop", "DecoupledPPO"]),
)
def test_behaviour_to_current_is_covered_exactly_once(probabilities, correction):
    current, behaviour, proximal = probabilities
    unclipped = replace(PLAIN, clip_low=0.99, clip_high=9.0, cap=9.0, floor=0.01, correction=correction)
    corrected = one_token(unclipped, current=current, behaviour=behaviour, proximal=proximal)
    bypass = one_token(replace(unclipped, correction="None"), current=current, behaviour=behaviour)
    assert corrected[:2] == pytest.approx(bypass[:2], rel=1e-4)
    assert bypass[1] == pytest.approx(-current / behaviour, rel=1e-4)


def test_a_token_that_icepop_drops_has_no_gradient_and_stays_in_the_count():
    log_probs = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    loss, metrics = policy_objective(
        replace(PLAIN, correction="IcePop"),
        log_probs=log_probs,
        entropy=None,
        behaviour_log_probs=torch.tensor([[-1.0, -2.0]]),  # ratios 1 and e > 2
        proximal_log_probs=None,
        reference_log_probs=None,
        advantages=torch.ones(1, 2),
        mask=torch.ones(1, 2),
        counts=GlobalCounts(tokens=2, sequences=1, max_tokens=2),
    )
    loss.backward()
    assert log_probs.grad.tolist() == [[-0.5, 0.0]]
    assert metrics["kept_tokens"].item() == 1
    assert metrics["tokens"].item() == 2


def test_kl_in_the_reward_is_reported_and_not_added():
    in_reward = replace(PLAIN, kl_placement="Reward", kl_coefficient=0.5)
    loss, gradient, metrics = one_token(in_reward, reference=0.25)
    assert (loss, gradient) == pytest.approx((-1.0, -1.0))
    assert metrics["kl"] == pytest.approx(math.log(2) - 0.5)


MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]])


def batch(mask=MASK, seed=0, dtype=torch.float64):
    """Random log-probs near each other, advantages and entropies, everything the objective can be given."""
    generator = torch.Generator().manual_seed(seed)

    def random(scale, offset=0.0):
        return offset + scale * torch.randn(mask.shape, generator=generator, dtype=torch.float64).to(dtype)

    log_probs = random(0.3, -1.0)
    return {
        "log_probs": log_probs.requires_grad_(),
        "entropy": random(0.2, 1.0).requires_grad_(),
        "behaviour_log_probs": log_probs.detach() + random(0.4),
        "proximal_log_probs": log_probs.detach() + random(0.3),
        "reference_log_probs": log_probs.detach() + random(0.5),
        "advantages": random(1.0),
        "mask": mask,
    }


COMPLETE = replace(PLAIN, kl_placement="Loss", kl_coefficient=0.1, entropy_coefficient=0.01)


@pytest.mark.parametrize("loss", LOSSES.names)
@pytest.mark.parametrize("correction", CORRECTIONS.names)
@pytest.mark.parametrize("aggregation", AGGREGATIONS.names)
def test_on_policy_everything_is_the_policy_gradient(loss, correction, aggregation):
    inputs = batch()
    log_probs, counts = inputs["log_probs"], counts_of(MASK, max_tokens=4)
    same = {name: log_probs.detach() for name in ("behaviour_log_probs", "proximal_log_probs", "reference_log_probs")}
    objective = replace(PLAIN, loss=loss, correction=correction, aggregation=aggregation)
    value, _ = policy_objective(objective, **{**inputs, **same}, counts=counts)
    by = aggregate("SequenceMeanTokenMean" if loss == "GSPO" else aggregation)
    (exact,) = torch.autograd.grad(by(-inputs["advantages"] * log_probs, MASK, counts), log_probs)
    (got,) = torch.autograd.grad(value, log_probs)
    assert_close(got, exact)


@pytest.mark.parametrize("aggregation", AGGREGATIONS.names)
def test_gspo_is_aggregated_over_sequences_whatever_is_asked(aggregation):
    inputs, counts = batch(), counts_of(MASK, max_tokens=4)
    actual, _ = policy_objective(replace(COMPLETE, loss="GSPO", aggregation=aggregation), **inputs, counts=counts)
    fixed = replace(COMPLETE, loss="GSPO", aggregation="SequenceMeanTokenMean")
    assert torch.equal(actual, policy_objective(fixed, **inputs, counts=counts)[0])


objectives = st.builds(
    lambda loss, correction, aggregation, estimator: replace(
        COMPLETE, loss=loss, correction=correction, aggregation=aggregation, kl_estimator=estimator
    ),
    st.sampled_from(LOSSES.names),
    st.sampled_from(CORRECTIONS.names),
    st.sampled_from(AGGREGATIONS.names),
    st.sampled_from(["K1", "K2", "K3"]),
)


@given(
    objective=objectives,
    seed=st.integers(0, 999),
    rows=st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=6).filter(
        lambda rows: any(map(any, rows))
    ),
    cuts=st.sets(st.integers(1, 5)),
)
def test_micro_batches_add_up_to_the_batch_in_loss_gradient_and_metrics(objective, seed, rows, cuts):
    whole = batch(torch.tensor(rows), seed)
    counts = counts_of(whole["mask"], max_tokens=5)
    loss, metrics = policy_objective(objective, **whole, counts=counts)
    gradients = torch.autograd.grad(loss, [whole["log_probs"], whole["entropy"]])
    edges = [0, *sorted(cut for cut in cuts if cut < len(rows)), len(rows)]
    shares = [
        policy_objective(objective, **{name: value[start:end] for name, value in whole.items()}, counts=counts)
        for start, end in itertools.pairwise(edges)
    ]
    summed = torch.stack([share for share, _ in shares]).sum()
    assert_close(summed, loss)
    assert_close(torch.autograd.grad(summed, [whole["log_probs"], whole["entropy"]]), gradients)
    assert_close({name: torch.stack([m[name] for _, m in shares]).sum() for name in metrics}, metrics)


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
@given(objective=objectives, recomputed=st.booleans())
def test_what_stands_on_padding_reaches_nothing(junk, objective, recomputed):
    clean = batch()
    if not recomputed and not needs_proximal(objective.correction):
        clean["proximal_log_probs"] = None
    dirty = {}
    for name, value in clean.items():
        trained = value is None or name == "mask"
        dirty[name] = value if trained else torch.where(MASK.bool(), value.detach(), junk)
    dirty["log_probs"].requires_grad_()
    dirty["entropy"].requires_grad_()
    counts = counts_of(MASK, max_tokens=4)
    expected, expected_metrics = policy_objective(objective, **clean, counts=counts)
    loss, metrics = policy_objective(objective, **dirty, counts=counts)
    assert torch.equal(loss, expected)
    assert_close(metrics, expected_metrics, rtol=0, atol=0)
    for got, exact in zip(
        torch.autograd.grad(loss, [dirty["log_probs"], dirty["entropy"]]),
        torch.autograd.grad(expected, [clean["log_probs"], clean["entropy"]]),
        strict=True,
    ):
        assert torch.equal(got, exact)
        assert (got[~MASK.bool()] == 0).all()


def test_half_precision_log_probs_are_widened_first():
    loss, metrics = policy_objective(COMPLETE, **batch(dtype=torch.bfloat16), counts=counts_of(MASK, max_tokens=4))
    assert loss.dtype == torch.float32
    assert {value.dtype for value in metrics.values()} == {torch.float32}


def test_metrics_are_scalars_without_gradient():
    _, metrics = policy_objective(COMPLETE, **batch(), counts=counts_of(MASK, max_tokens=4))
    assert all(value.dim() == 0 and not value.requires_grad for value in metrics.values())
    assert metrics["tokens"].item() == 7


def test_two_corrections_need_recomputed_log_probs():
    assert {name for name in CORRECTIONS.names if needs_proximal(name)} == {"DecoupledPPO", "Recomputed"}
    with pytest.raises(ValueError, match="unknown correction 'TIS'"):
        needs_proximal("TIS")


def test_all_missing_inputs_are_named_together():
    objective = replace(COMPLETE, correction="DecoupledPPO")
    with pytest.raises(ValueError, match="policy objective: ") as refused:
        one_token(objective)
    assert str(refused.value) == (
        "policy objective: proximal_log_probs is None, but DecoupledPPO needs them recomputed with the weights at the "
        "batch's start; pass them or use TokenTIS; entropy is None, but entropy_coefficient is 0.01; pass it or use 0; "
        "reference_log_probs is None, but kl_placement is Loss; pass them or use None."
    )


@pytest.mark.parametrize(
    ("placement", "coefficient"),
    # With a penalty in the reward, the one in the loss stays as it is.
    [("None", 0), ("Reward", 0), ("Loss", 0.3), ("LossAndReward", 0.1)],
)
def test_an_adapted_coefficient_is_that_of_the_loss_only_if_the_reward_has_none(placement, coefficient):
    objective = replace(PLAIN, kl_placement=placement, kl_coefficient=0.1, kl_estimator="K1")
    plain = one_token(objective.adapted(None), reference=0.25)[0]
    adapted = one_token(objective.adapted(0.3), reference=0.25)[0]
    in_loss = placement in ("Loss", "LossAndReward")
    assert plain == pytest.approx(-1 + 0.1 * math.log(2) * in_loss)
    assert adapted == pytest.approx(-1 + coefficient * math.log(2))


def test_all_wrong_settings_are_named_together():
    with pytest.raises(ValueError, match="objective: ") as refused:
        replace(PLAIN, loss="PPO", kl_placement="Of", dual_clip=1.0, floor=2.0)
    assert str(refused.value) == (
        "objective: loss 'PPO' is unknown, use one of PPOClip, GSPO, CISPO, GPG, SAPO, DPPOBinaryTV, DPPOBinaryKL; "
        "kl_placement 'Of' is unknown, use one of None, Loss, Reward, LossAndReward; "
        "dual_clip 1.0 would cut off the gradient at ratio 1, use a value above 1; "
        "floor 2.0 is not below cap 2.0, no token would train."
    )


def test_supervised_loss_is_the_mean_negative_log_likelihood():
    log_probs = torch.tensor([[math.log(0.5), math.log(0.25), math.nan]], requires_grad=True)
    mask = torch.tensor([[1, 1, 0]])
    # Two of the batch's four tokens: (ln 2 + ln 4) / 4.
    loss, metrics = supervised_objective(log_probs, mask, GlobalCounts(tokens=4, sequences=2, max_tokens=3))
    loss.backward()
    assert loss.item() == pytest.approx(3 * math.log(2) / 4)
    assert log_probs.grad.tolist() == [[-0.25, -0.25, 0.0]]
    assert metrics["nll"].item() == pytest.approx(3 * math.log(2))
    assert metrics["tokens"].item() == 2

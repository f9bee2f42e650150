import math

import pytest
import torch
from torch.testing import assert_close

from qwen35_trainer.algorithms.losses import LossInputs, policy_loss

EVERY = ["PPOClip", "GSPO", "CISPO", "GPG", "SAPO", "DPPOBinaryTV", "DPPOBinaryKL"]


def inputs(ratios, advantages, *, start=-1.0, mask=None, low=0.2, high=0.28, dual=3.0, dtype=torch.float32):
    """Tokens of one sequence whose current log-prob is `start`, at the given ratios to the proximal policy."""
    proximal = start - torch.tensor([ratios], dtype=torch.float64).log()
    return LossInputs(
        log_probs=torch.full((1, len(ratios)), start, dtype=dtype, requires_grad=True),
        proximal_log_probs=proximal.to(dtype),
        advantages=torch.tensor([advantages], dtype=dtype),
        mask=torch.ones(1, len(ratios)) if mask is None else torch.tensor([mask]),
        clip_low=low,
        clip_high=high,
        dual_clip=dual,
    )


def loss_and_gradient(name, loss_inputs):
    out = policy_loss(name)(loss_inputs)
    (gradient,) = torch.autograd.grad(out.per_token.sum(), loss_inputs.log_probs)
    return out, out.per_token[0], gradient[0]


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "bound"),
    [
        (1.1, 2.0, -2.2, -2.2, None),  # inside: -A·r
        (1.5, 1.0, -1.28, 0.0, "high"),  # good and likelier than 1.28: no further
        (0.5, 1.0, -0.5, -0.5, None),  # good and unlikelier: back up
        (0.5, -1.0, 0.8, 0.0, "low"),  # bad and unlikelier than 0.8: no further
        (1.5, -1.0, 1.5, 1.5, None),  # bad and likelier: back down
        (4.0, -1.0, 3.0, 0.0, "dual"),  # bad and far likelier: bounded at -A·3
        (4.0, 1.0, -1.28, 0.0, "high"),
        (4.0, 0.0, 0.0, 0.0, None),
    ],
)
def test_ppo_clips_the_side_that_would_go_too_far(ratio, advantage, loss, gradient, bound):
    out, per_token, slope = loss_and_gradient("PPOClip", inputs([ratio], [advantage]))
    assert_close(per_token, torch.tensor([loss]))
    assert_close(slope, torch.tensor([gradient]))
    for side in ("low", "high", "dual"):
        assert out.metrics[f"clip_fraction_{side}"].item() == (side == bound)


def test_without_a_dual_clip_a_bad_token_is_pushed_down_at_any_ratio():
    out, per_token, slope = loss_and_gradient("PPOClip", inputs([4.0], [-1.0], dual=None))
    assert_close(per_token, torch.tensor([4.0]))
    assert_close(slope, torch.tensor([4.0]))
    assert out.metrics["clip_fraction_dual"].item() == 0


def test_gspo_uses_the_geometric_mean_ratio_and_leaves_padding_out_of_it():
    # Ratios 4 and 1: s = √4 = 2. With A = -1 nothing clips: loss 2 per token, gradient s = 2 per token.
    _, per_token, slope = loss_and_gradient("GSPO", inputs([4.0, 1.0, 9.0], [-1.0] * 3, mask=[1, 1, 0]))
    assert_close(per_token, torch.tensor([2.0, 2.0, 0.0]))
    assert_close(slope, torch.tensor([2.0, 2.0, 0.0]))


def test_gspo_clips_all_tokens_of_a_sequence_or_none():
    # s = 2 > 1.28: also the second token, with a token ratio of 1, gets nothing.
    out, per_token, slope = loss_and_gradient("GSPO", inputs([4.0, 1.0], [1.0, 1.0]))
    assert_close(per_token, torch.tensor([-1.28, -1.28]))
    assert slope.count_nonzero() == 0
    assert out.metrics["clip_fraction_high"].item() == 2


def test_gspo_has_the_gradient_of_the_sequence_ratio():
    loss_inputs = inputs([1.2, 0.9, 1.1], [1.5] * 3, low=0.5, high=0.5, dtype=torch.float64)
    sequence = (loss_inputs.log_probs - loss_inputs.proximal_log_probs).mean().exp()
    (exact,) = torch.autograd.grad(-1.5 * sequence, loss_inputs.log_probs)
    (got,) = torch.autograd.grad(policy_loss("GSPO")(loss_inputs).per_token.mean(), loss_inputs.log_probs)
    assert_close(got, exact)


def test_cispo_bounds_the_weight_and_keeps_the_gradient():
    # Weights 1.28, 0.8 and 1 of -A·logp with A = 2, logp = -1: the loss is 2w, the gradient -2w.
    out, per_token, slope = loss_and_gradient("CISPO", inputs([1.5, 0.5, 1.0], [2.0] * 3))
    assert_close(per_token, torch.tensor([2.56, 1.6, 2.0]))
    assert_close(slope, torch.tensor([-2.56, -1.6, -2.0]))
    assert out.metrics["clip_fraction_high"].item() == 1
    assert out.metrics["clip_fraction_low"].item() == 1


def test_gpg_ignores_the_ratio():
    _, per_token, slope = loss_and_gradient("GPG", inputs([5.0, 0.1], [2.0, -3.0]))
    assert_close(per_token, torch.tensor([2.0, -3.0]))
    assert_close(slope, torch.tensor([-2.0, 3.0]))


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_at_ratio_one_every_loss_has_the_gradient_of_the_policy_gradient(name, clip):
    _, _, slope = loss_and_gradient(name, inputs([1.0] * 3, [2.0, -1.0, 0.5], low=clip, high=clip))
    assert_close(slope, torch.tensor([-2.0, 1.0, -0.5]))


@pytest.mark.parametrize("name", ["PPOClip", "GPG", "SAPO"])
def test_gradients_agree_with_finite_differences(name):
    # CISPO and GSPO stop gradients on purpose, so finite differences of their values are something else.
    loss_inputs = inputs([1.5, 0.5, 0.5, 1.1, 4.0], [1.0, 1.0, -1.0, -2.0, -1.0], dtype=torch.float64)

    def per_token(log_probs):
        return policy_loss(name)(LossInputs(**{**vars(loss_inputs), "log_probs": log_probs})).per_token

    assert torch.autograd.gradcheck(per_token, loss_inputs.log_probs)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("log_ratio", [1e3, -1e3, math.inf])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_extreme_ratios_stay_finite(name, log_ratio, advantage):
    loss_inputs = inputs([1.0, 1.0], [advantage] * 2, dual=None)
    loss_inputs = LossInputs(**{**vars(loss_inputs), "proximal_log_probs": torch.full((1, 2), -log_ratio)})
    out, per_token, slope = loss_and_gradient(name, loss_inputs)
    assert per_token.isfinite().all()
    assert slope.isfinite().all()
    assert all(value.isfinite() for value in out.metrics.values())


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_padding_reaches_neither_value_nor_gradient_nor_metrics(name, junk):
    clean = inputs([1.1, 0.7, 1.0], [1.0, -2.0, 0.0], mask=[1, 1, 0])
    dirty = {name: value.detach().clone() for name, value in vars(clean).items() if isinstance(value, torch.Tensor)}
    for field in ("log_probs", "proximal_log_probs", "advantages"):
        dirty[field][0, 2] = junk
    dirty["log_probs"].requires_grad_()
    expected, got = loss_and_gradient(name, clean), loss_and_gradient(name, LossInputs(**{**vars(clean), **dirty}))
    assert_close(got[0].metrics, expected[0].metrics, rtol=0, atol=0)
    assert torch.equal(got[1], expected[1])
    assert torch.equal(got[2], expected[2])
    assert got[2][2].item() == 0


@pytest.mark.parametrize("name", EVERY)
def test_metrics_are_sums_over_trained_tokens_without_gradient(name):
    out = policy_loss(name)(inputs([1.1, 1.1, 7.0], [1.0] * 3, mask=[1, 1, 0]))
    assert out.metrics["ratio"].item() == pytest.approx(2.2)
    assert not any(value.requires_grad for value in out.metrics.values())

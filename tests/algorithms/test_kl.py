import math

import pytest
import torch
from torch.testing import assert_close

from qwen35_trainer.algorithms.kl import kl

LN2 = math.log(2)


# The policy gives the token 1/2 and the reference 1/4: d = ln 2, exp(-d) = 1/2.
@pytest.mark.parametrize(
    ("name", "value", "gradient"), [("K1", LN2, 1.0), ("K2", LN2**2 / 2, LN2), ("K3", 0.5 + LN2 - 1, 0.5)]
)
def test_value_and_gradient_at_a_log_ratio_of_ln_2(name, value, gradient):
    log_probs = torch.tensor([[math.log(0.5)]], requires_grad=True)
    estimate = kl(name)(log_probs, torch.tensor([[math.log(0.25)]]))
    estimate.sum().backward()
    assert_close(estimate, torch.tensor([[value]]))
    assert_close(log_probs.grad, torch.tensor([[gradient]]))


@pytest.mark.parametrize("name", ["K1", "K2", "K3"])
def test_equal_policies_are_exactly_zero_apart(name):
    log_probs = torch.tensor([[-0.3, -7.0]])
    assert kl(name)(log_probs, log_probs).count_nonzero() == 0


def test_k3_keeps_its_digits_for_nearly_equal_policies():
    # d²/2 = 5e-9; exp(-d) + d - 1 in float32 would be off by the rounding of 1, 6e-8.
    estimate = kl("K3")(torch.tensor([[1e-4]]), torch.tensor([[0.0]]))
    assert estimate.item() == pytest.approx(5e-9, rel=1e-2)


def test_k3_is_bounded_and_has_no_gradient_beyond_the_bound():
    log_probs = torch.tensor([[-100.0, -3.0, -1.0]], requires_grad=True)
    estimate = kl("K3")(log_probs, torch.zeros(1, 3))
    estimate.sum().backward()
    # At -3: e³ - 3 - 1 = 16.1, above 10. At -1: e - 2 = 0.718 with gradient 1 - e.
    assert_close(estimate, torch.tensor([[10.0, 10.0, math.e - 2]]))
    assert_close(log_probs.grad, torch.tensor([[0.0, 0.0, 1 - math.e]]))


def test_half_precision_is_widened_first():
    half = torch.tensor([[-1.0]], dtype=torch.bfloat16)
    assert kl("K1")(half, half).dtype == torch.float32


def expected_gradient(estimate, logits, reference):
    """Gradient of the loss that samples tokens from the policy, in exact expectation over a small vocabulary."""
    log_probs = logits.log_softmax(-1)
    (log_probs.exp().detach() * estimate(log_probs[None], reference[None])[0]).sum().backward()
    return logits.grad


@pytest.fixture
def policies():
    logits = torch.tensor([0.3, -0.2, 0.9, 0.0], dtype=torch.float64, requires_grad=True)
    return logits, torch.tensor([0.1, 0.4, 0.0, -0.5], dtype=torch.float64).log_softmax(-1)


@pytest.mark.parametrize("name", ["K1", "K3"])
def test_k1_and_k3_are_unbiased_as_values(name, policies):
    logits, reference = policies
    log_probs = logits.log_softmax(-1)
    exact = (log_probs.exp() * (log_probs - reference)).sum()
    assert_close((log_probs.exp() * kl(name)(log_probs[None], reference[None])[0]).sum(), exact)


def test_k1_as_a_loss_restrains_nothing(policies):
    logits, reference = policies
    assert_close(expected_gradient(kl("K1"), logits, reference), torch.zeros(4, dtype=torch.float64))


def test_k2_as_a_loss_has_the_gradient_of_the_kl_to_the_reference(policies):
    logits, reference = policies
    log_probs = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((log_probs.exp() * (log_probs - reference)).sum(), logits)
    assert_close(expected_gradient(kl("K2"), logits, reference), exact)


def test_k3_as_a_loss_has_the_gradient_of_the_kl_from_the_reference(policies):
    logits, reference = policies
    (exact,) = torch.autograd.grad((reference.exp() * (reference - logits.log_softmax(-1))).sum(), logits)
    assert_close(expected_gradient(kl("K3"), logits, reference), exact)

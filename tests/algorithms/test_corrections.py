import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from qwen35_trainer.algorithms.corrections import CORRECTIONS, correction

CAP, FLOOR = 2.0, 0.5

# First sequence: product 3 · 1/4 · 1 · 3/2 = 9/8, geometric mean 1.03. Second: product 16, geometric mean 4.
RATIOS = [[3.0, 0.25, 1.0, 1.5], [4.0, 4.0, 1.0, 1.0]]
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])


def corrected(name, ratios=RATIOS, mask=MASK):
    proximal = torch.tensor(ratios).log()
    return correction(name)(torch.full_like(proximal, -1.0), proximal - 1, mask, CAP, FLOOR)


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("None", [[1, 1, 1, 1], [1, 1, 0, 0]]),
        ("Recomputed", [[1, 1, 1, 1], [1, 1, 0, 0]]),
        ("TokenTIS", [[2, 0.25, 1, 1.5], [2, 2, 0, 0]]),
        ("DecoupledPPO", [[2, 0.25, 1, 1.5], [2, 2, 0, 0]]),
        ("SequenceTIS", [[1.125] * 4, [2, 2, 0, 0]]),
        ("IcePop", [[0, 0, 1, 1.5], [0, 0, 0, 0]]),
        ("SequenceMask", [[1, 1, 1, 1], [0, 0, 0, 0]]),
    ],
)
def test_each_rule_weighs_tokens_as_its_table_says(name, weights):
    result = corrected(name)
    assert_close(result.weights, torch.tensor(weights, dtype=torch.float32))
    # In this example no kept token weighs 0, so the two tell the same story.
    assert torch.equal(result.keep, result.weights != 0)


@pytest.mark.parametrize("name", ["IcePop", "SequenceMask"])
@pytest.mark.parametrize(("ratio", "kept"), [(0.49, False), (0.51, True), (1.99, True), (2.01, False)])
def test_the_masks_keep_what_is_between_floor_and_cap(name, ratio, kept):
    result = corrected(name, [[ratio, ratio]], torch.ones(1, 2))
    assert result.keep.tolist() == [[kept, kept]]


@pytest.mark.parametrize("name", ["TokenTIS", "DecoupledPPO", "SequenceTIS"])
def test_truncation_has_no_lower_end(name):
    assert_close(corrected(name, [[0.01]], torch.ones(1, 1)).weights, torch.tensor([[0.01]]))


@pytest.mark.parametrize("name", CORRECTIONS.names)
def test_on_policy_every_token_weighs_one(name):
    result = corrected(name, [[1.0] * 4] * 2)
    assert_close(result.weights, MASK.float())
    assert torch.equal(result.keep, MASK.bool())


@pytest.mark.parametrize("name", CORRECTIONS.names)
def test_weights_carry_no_gradient(name):
    log_probs = torch.zeros(1, 2, requires_grad=True)
    assert not correction(name)(log_probs - 0.1, log_probs, torch.ones(1, 2), CAP, FLOOR).weights.requires_grad


@pytest.mark.parametrize("name", CORRECTIONS.names)
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_padding_changes_nothing(name, junk):
    behaviour = torch.tensor([[-1.0, -2.0, junk], [junk] * 3])
    proximal = torch.tensor([[-1.2, -1.9, junk], [junk] * 3])
    mask = torch.tensor([[1.0, 1.0, 0.0], [0.0] * 3])
    clean = correction(name)(behaviour[:1, :2], proximal[:1, :2], mask[:1, :2], CAP, FLOOR)
    dirty = correction(name)(behaviour, proximal, mask, CAP, FLOOR)
    assert torch.equal(dirty.weights[:1, :2], clean.weights)
    assert torch.equal(dirty.keep[:1, :2], clean.keep)
    assert dirty.weights.sum() == clean.weights.sum()
    assert dirty.keep.sum() == clean.keep.sum()


@pytest.mark.parametrize("name", CORRECTIONS.names)
@given(log_ratios=st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=8))
def test_weights_are_between_zero_and_cap_whatever_the_ratio(name, log_ratios):
    proximal = torch.tensor([log_ratios])
    result = correction(name)(torch.zeros_like(proximal), proximal, torch.ones_like(proximal), CAP, FLOOR)
    assert ((result.weights >= 0) & (result.weights <= CAP)).all()
    assert (result.weights[~result.keep] == 0).all()

"""Losses and advantages that the user brings."""

import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from qwen35_trainer.algorithms.advantages import AdvantageInputs
from qwen35_trainer.algorithms.losses import LossInputs
from qwen35_trainer.algorithms.user import advantage_of, loss_of

MINE = """
def gradient(inputs):
    return -inputs.advantages * inputs.log_probs

def scalar(inputs):
    return gradient(inputs).sum()

def detached(inputs):
    return gradient(inputs).detach()

def number(inputs):
    return 1.0

def centred(inputs):
    return (inputs.rewards - inputs.rewards.mean())[:, None].expand(inputs.mask.shape)
"""
PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"
MASK = torch.tensor([[1, 1], [1, 0]])


@pytest.fixture(autouse=True)
def mine(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)


@pytest.fixture
def inputs() -> LossInputs:
    """The last token is padding, of which nobody knows anything."""
    log_probs = torch.tensor([[-1.0, -2.0], [-3.0, math.nan]], requires_grad=True)
    return LossInputs(log_probs, log_probs.detach(), torch.tensor([[1.0, 1.0], [-2.0, 0.0]]), MASK, 0.2, 0.28, None)


def test_an_own_loss_is_that_of_the_registry_where_it_computes_the_same(inputs):
    assert_close(loss_of("mine:gradient")(inputs).per_token, loss_of("GPG")(inputs).per_token)
    loss_of("mine:gradient")(inputs).per_token.sum().backward()
    assert inputs.log_probs.grad.tolist() == [[-1.0, -1.0], [2.0, 0.0]]


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("mine:scalar", r"mine:scalar returned shape \(\). Return \(2, 2\), the shape of the mask."),
        ("mine:detached", r"mine:detached returned a loss without a gradient. Compute it from log_probs"),
        ("mine:number", r"mine:number returned float. Return a tensor, one number for each token."),
    ],
)
def test_a_result_that_is_not_a_loss_of_each_token_is_refused(inputs, name, refused):
    with pytest.raises(ValueError, match=refused):
        loss_of(name)(inputs)


def test_an_own_advantage_is_0_on_padding():
    inputs = AdvantageInputs(rewards=torch.tensor([1.0, 0.0]), group=torch.tensor([0, 0]), mask=MASK)
    assert advantage_of("mine:centred")(inputs).tolist() == [[0.5, 0.5], [-0.5, 0.0]]
    longer = replace(inputs, mask=torch.ones(2, 3))
    assert advantage_of("mine:centred")(longer).shape == (2, 3)


def test_names_without_a_module_are_those_of_the_registries():
    with pytest.raises(ValueError, match="unknown loss 'PPO'"):
        loss_of("PPO")
    with pytest.raises(ValueError, match="unknown advantage 'PPO'"):
        advantage_of("PPO")


def test_the_documented_functions_compute_a_number_for_each_token(inputs):
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["squared_log"](inputs).shape == MASK.shape
    scored = AdvantageInputs(rewards=torch.tensor([1.0, 0.0]), group=torch.tensor([0, 0]), mask=MASK)
    assert names["centred"](scored).tolist() == [[0.5, 0.5], [-0.5, -0.5]]

"""Adapters as they travel: what they adapt, and what does not fit a base."""

import pytest
import torch

from qwen35_trainer.weights.adapters import adapted, are_adapters, misfits

BASE = {"a.weight": torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), "b.weight": torch.zeros(2, 2)}
ADAPTERS = {
    "a.lora_A": torch.tensor([[1.0, -1.0]]),
    "a.lora_B": torch.tensor([[1.0], [0.0], [2.0]]),
    "lora_scale": torch.tensor(0.5),
}


def test_adapters_are_distinguished_from_whole_weights_and_name_what_they_adapt() -> None:
    assert are_adapters(ADAPTERS)
    assert not are_adapters(BASE)
    assert adapted(ADAPTERS) == ["a.weight"]


@pytest.mark.parametrize(
    ("change", "shapes"),
    [
        ({"a.lora_B": None}, "a.weight (3, 2) with lora_A (1, 2) and lora_B None"),
        ({"c.lora_A": torch.ones(1, 2)}, "c.weight None with lora_A (1, 2) and lora_B None"),
        ({"a.lora_A": torch.ones(2, 2)}, "a.weight (3, 2) with lora_A (2, 2) and lora_B (3, 1)"),
        ({"a.lora_A": torch.ones(1, 1)}, "a.weight (3, 2) with lora_A (1, 1) and lora_B (3, 1)"),
    ],
)
def test_what_does_not_fit_is_named_with_its_shapes(change, shapes) -> None:
    wrong = {name: tensor for name, tensor in (ADAPTERS | change).items() if tensor is not None}
    [misfit] = misfits(BASE, wrong)
    assert misfit == shapes


def test_what_fits_is_not_a_misfit() -> None:
    assert misfits(BASE, ADAPTERS) == []

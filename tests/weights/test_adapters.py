"""Adapters as they travel: what they make of a base, and what does not fit one."""

import pytest
import torch

from qwen35_trainer.weights.adapters import adapted, are_adapters, merged, misfits

BASE = {"a.weight": torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), "b.weight": torch.zeros(2, 2)}
ADAPTERS = {
    "a.lora_A": torch.tensor([[1.0, -1.0]]),
    "a.lora_B": torch.tensor([[1.0], [0.0], [2.0]]),
    "lora_scale": torch.tensor(0.5),
}


def test_the_product_is_scaled_and_added_to_what_it_adapts_alone() -> None:
    assert are_adapters(ADAPTERS)
    assert not are_adapters(BASE)
    assert adapted(ADAPTERS) == ["a.weight"]
    expected = torch.tensor([[1.5, 1.5], [3.0, 4.0], [6.0, 5.0]])
    assert torch.equal(merged(BASE, ADAPTERS)["a.weight"], expected)
    assert merged(BASE, ADAPTERS).keys() == {"a.weight"}


def test_the_sum_is_made_in_float32_and_rounded_once() -> None:
    base = {"a.weight": torch.full((1, 1), 256.0, dtype=torch.bfloat16)}
    halves = {"a.lora_A": torch.full((3, 1), 0.7), "a.lora_B": torch.ones(1, 3), "lora_scale": torch.tensor(1.0)}
    # Three steps of 0.7 in bfloat16 would each be lost: its neighbours of 256 are 2 apart.
    assert merged(base, halves)["a.weight"].item() == 258.0
    assert merged(base, halves)["a.weight"].dtype == torch.bfloat16
    # Neighbours of 1 are 2⁻⁷ apart. The sum lies just above the middle between two; 2⁻⁸, its bfloat16, would be the middle itself.
    one = {"a.weight": torch.ones(1, 1, dtype=torch.bfloat16)}
    more = {
        "a.lora_A": torch.full((1, 1), 2**-8 * (1 + 2**-10)),
        "a.lora_B": torch.ones(1, 1),
        "lora_scale": torch.tensor(1.0),
    }
    assert merged(one, more)["a.weight"].item() == 1 + 2**-7


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
    [found] = misfits(BASE, wrong)
    assert found == shapes


def test_what_fits_is_no_misfit() -> None:
    assert misfits(BASE, ADAPTERS) == []

"""Splitting nested tensors, also those that torch's own `unbind` refuses."""

import pytest
import torch

from qwen35_trainer.models.jagged import split

LENGTHS = [3, 2, 5]


def two_dimensions() -> tuple[torch.Tensor, list[torch.Tensor]]:
    parts = [torch.randn(length) for length in LENGTHS]
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged), parts


def three_dimensions(lengths: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    parts = [torch.randn(4, length) for length in lengths]
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged), parts


def same(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(actual) == len(expected) and all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


def test_two_dimensions():
    batch, parts = two_dimensions()
    assert same(split(batch), parts)


@pytest.mark.parametrize("lengths", [LENGTHS, [3, 3, 3], [3], [4, 1]])
def test_three_dimensions_with_the_ragged_one_last(lengths):
    batch, parts = three_dimensions(lengths)
    assert same(split(batch), parts)


def test_features_behind_the_ragged_dimension():
    parts = [torch.randn(length, 7) for length in LENGTHS]
    assert same(split(torch.nested.as_nested_tensor(parts, layout=torch.jagged)), parts)


def test_a_tensor_rebuilt_from_values_and_offsets_which_torch_splits_along_the_wrong_dimension():
    original, parts = three_dimensions(LENGTHS)
    rebuilt = torch.nested.nested_tensor_from_jagged(original.values(), original.offsets())
    with pytest.raises(RuntimeError):
        rebuilt.unbind(0)
    assert same(split(rebuilt), parts)


def test_equal_lengths_marked_like_other_batches_which_torch_splits_along_the_wrong_dimension():
    batch, parts = three_dimensions([3, 3, 3])
    batch._ragged_idx = 2
    with pytest.raises(RuntimeError):
        batch.unbind(0)
    assert same(split(batch), parts)


def test_chunking_three_dimensions_is_what_torch_cannot_do():
    batch, parts = three_dimensions(LENGTHS)
    with pytest.raises((RuntimeError, ValueError)):
        batch.chunk(3)
    assert same(split(batch)[1:], parts[1:])


def test_holes_between_sequences_are_left_out():
    values = torch.arange(10.0)
    batch = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 3, 6, 10]), torch.tensor([2, 3, 1]))
    assert same(split(batch), [values[0:2], values[3:6], values[6:7]])


def test_the_parts_are_views_with_gradients():
    values = torch.randn(4, 10, requires_grad=True)
    batch = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 3, 5, 10]), jagged_dim=2)
    split(batch)[1].sum().backward()
    assert values.grad.sum(0).tolist() == [0, 0, 0, 4, 4, 0, 0, 0, 0, 0]


def test_offsets_that_fit_no_dimension_are_refused():
    batch = torch.nested.nested_tensor_from_jagged(torch.randn(4, 9), torch.tensor([0, 3, 5, 10]))
    with pytest.raises(ValueError, match=r"values \(4, 9\) with offsets up to 10"):
        split(batch)

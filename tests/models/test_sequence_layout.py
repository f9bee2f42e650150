"""A packed row taken apart for mixers that know no boundaries, and put together again."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qwen35_trainer.models.qwen3_5.buckets import Split
from qwen35_trainer.models.qwen3_5.sequence_layout import SequenceLayout

CPU = torch.device("cpu")
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=12)
NONE = torch.empty(0)


def packed(lengths: list[int]) -> SequenceLayout:
    boundaries = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    return SequenceLayout(NONE, NONE, boundaries, max(lengths), Split.of(lengths, CPU))


@given(lengths=LENGTHS)
def test_what_is_taken_apart_comes_back_in_its_place(lengths):
    row = torch.randn(1, sum(lengths), 3, 2)
    assert torch.equal(packed(lengths).apart(lambda x: x, row), row)


@given(lengths=LENGTHS)
def test_a_mixer_sees_each_sequence_from_its_first_token_and_nothing_before_it(lengths):
    row = torch.randint(9, (1, sum(lengths), 2))
    expected = torch.cat([part.cumsum(1) for part in row.split(lengths, 1)], 1)
    assert torch.equal(packed(lengths).apart(lambda x: x.cumsum(1), row), expected)


@given(lengths=LENGTHS)
def test_several_tensors_are_taken_apart_alike(lengths):
    first, other = torch.randn(1, sum(lengths), 2), torch.randn(1, sum(lengths))
    mixed = packed(lengths).apart(lambda x, y: x * y.unsqueeze(-1), first, other)
    assert torch.equal(mixed, first * other.unsqueeze(-1))


@given(lengths=LENGTHS)
def test_padding_never_doubles_the_work_and_calls_are_few(lengths):
    buckets = Split.of(lengths, CPU).buckets
    assert sum(places.numel() for places in buckets) < 2 * sum(lengths)
    assert len(buckets) <= (max(lengths) // min(lengths)).bit_length()


@given(lengths=LENGTHS)
def test_gradients_come_back_to_their_own_tokens(lengths):
    row = torch.randn(1, sum(lengths), 2, requires_grad=True)
    weight = torch.randn_like(row)
    (packed(lengths).apart(lambda x: x * 3, row) * weight).sum().backward()
    torch.testing.assert_close(row.grad, 3 * weight)


def test_a_padded_batch_goes_through_whole():
    batch = torch.randn(3, 5, 2)
    assert torch.equal(SequenceLayout(NONE, NONE).apart(lambda x: x.cumsum(1), batch), batch.cumsum(1))


def test_a_packed_row_that_was_not_split_is_never_mixed_whole():
    layout = SequenceLayout(NONE, NONE, torch.tensor([0, 2, 5], dtype=torch.int32), 3)
    with pytest.raises(AssertionError, match="not split"):
        layout.apart(lambda x: x, torch.randn(1, 5, 2))

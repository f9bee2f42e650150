"""The plan of a publication: rows as FSDP divides them, and every rank of a replica gets its slice once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qwen35_trainer.weights.transfer_plan import PlannedTensor, row_range, transfers

SIZES = st.integers(1, 12)


@given(rows=st.integers(0, 40), ranks=SIZES)
def test_rows_are_divided_as_torch_divides_them(rows: int, ranks: int) -> None:
    chunks = [chunk.tolist() for chunk in torch.arange(rows).chunk(ranks) if len(chunk)]
    assert [list(each) for rank in range(ranks) if (each := row_range(rows, ranks, rank))] == chunks


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        (0, {(0, 0): 48, (1, 0): 16, (1, 1): 32, (2, 1): 32}),  # 8 rows on 3 ranks: 3, 3, 2
        (1, {(0, 0): 24, (0, 1): 24, (1, 0): 24, (1, 1): 24, (2, 0): 16, (2, 1): 16}),
        (None, {(0, 0): 48, (0, 1): 48, (1, 0): 48, (1, 1): 48, (2, 0): 32, (2, 1): 32}),
    ],
)
def test_who_needs_what_of_whom(split, expected) -> None:
    assert transfers([PlannedTensor("w", (8, 4), 4, split)], train_ranks=3, replica_ranks=2) == expected


@given(shape=st.lists(SIZES, max_size=3).map(tuple), train=SIZES, replica=SIZES, split=st.sampled_from([None, 0, 1]))
def test_a_rank_of_a_replica_gets_its_slice_once(shape, train, replica, split) -> None:
    split = None if split is None or split >= len(shape) else split
    whole = torch.empty(shape).numel()
    received = [0] * replica
    for (_, rank), size in transfers([PlannedTensor("w", shape, 2, split)], train, replica).items():
        received[rank] += size
    for rank, size in enumerate(received):
        part = whole if split is None else whole // shape[split] * len(row_range(shape[split], replica, rank))
        assert size == 2 * part


def test_a_value_without_dimensions_comes_from_one_rank() -> None:
    assert transfers([PlannedTensor("scale", (), 8, None)], train_ranks=4, replica_ranks=2) == {(0, 0): 8, (0, 1): 8}

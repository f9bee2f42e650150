"""The plan of a publication: rows as FSDP divides them. `test_slices.py` has what ranks of a replica read."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from qwen35_trainer.weights.division import WHOLE, ReplicaShape
from qwen35_trainer.weights.transfer_plan import held_by_rows, planned_version, row_range, transfers
from qwen35_trainer.weights.weight_manifest import WeightLayout

SIZES = st.integers(1, 12)


@given(rows=st.integers(0, 40), ranks=SIZES)
def test_rows_are_divided_as_torch_divides_them(rows: int, ranks: int) -> None:
    chunks = [chunk.tolist() for chunk in torch.arange(rows).chunk(ranks) if len(chunk)]
    assert [list(each) for rank in range(ranks) if (each := row_range(rows, ranks, rank))] == chunks


def test_a_value_without_dimensions_comes_from_one_rank() -> None:
    layout = WeightLayout.of([("scale", (), "float64")])
    version = planned_version(layout, WHOLE, held_by_rows(layout, ranks=4), most=100)
    assert transfers(version, {}, ReplicaShape(2)) == {(0, 0): 8, (0, 1): 8}

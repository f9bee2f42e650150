"""Each row of the table, from published tensors to the parts of ranks and back, with values that name their places."""

from typing import Any

import pytest
import torch

from qwen35_trainer.engines.megatron.weight_table import EXPERT_ROWS, LAYER_ROWS, OUTER_ROWS, ModelShape, Row

SHAPE = ModelShape(query_heads=4, key_value_heads=2, head_channels=2, linear_keys=4, linear_values=8, linear_heads=4)
D = 3
PUBLISHED: dict[str, list[tuple[int, ...]]] = {
    "embedding.word_embeddings.weight": [(7, D)],
    "decoder.final_layernorm.weight": [(D,)],
    "output_layer.weight": [(7, D)],
    "mtp.layers.0.enorm.weight": [(D,)],
    "mtp.layers.0.hnorm.weight": [(D,)],
    "mtp.layers.0.eh_proj.weight": [(4, 2 * D)],
    "mtp.layers.0.final_layernorm.weight": [(D,)],
    "input_layernorm.weight": [(D,)],
    "pre_mlp_layernorm.weight": [(D,)],
    "self_attention.linear_qkv.weight": [(16, D), (4, D), (4, D)],
    "self_attention.q_layernorm.weight": [(2,)],
    "self_attention.k_layernorm.weight": [(2,)],
    "self_attention.linear_proj.weight": [(D, 8)],
    "self_attention.in_proj.weight": [(16, D), (8, D), (4, D), (4, D)],
    "self_attention.conv1d.weight": [(16, 1, 4)],
    "self_attention.A_log": [(4,)],
    "self_attention.dt_bias": [(4,)],
    "self_attention.norm_weight": [(2,)],
    "self_attention.out_proj.weight": [(D, 8)],
    "mlp.linear_fc1.weight": [(6, D), (6, D)],
    "mlp.linear_fc2.weight": [(D, 6)],
    "mlp.router.weight": [(4, D)],
    "mlp.shared_experts.linear_fc1.weight": [(6, D), (6, D)],
    "mlp.shared_experts.linear_fc2.weight": [(D, 6)],
    "mlp.shared_experts.gate_weight": [(1, D)],
    "linear_fc1.weight": [(12, D)],
    "linear_fc2.weight": [(D, 6)],
}
"""Shapes of the published tensors of each row, of one expert for the last two."""
ROWS = (*OUTER_ROWS, *LAYER_ROWS, *EXPERT_ROWS)


def tensors_of(row: Row) -> list[torch.Tensor]:
    """Published tensors whose values are all different."""
    tensors, first = [], 0
    for shape in PUBLISHED[row.megatron]:
        count = int(torch.Size(shape).numel())
        tensors.append(torch.arange(first, first + count, dtype=torch.float32).view(shape))
        first += count
    return tensors


def rows_of(part: torch.Tensor) -> list[int]:
    """For each row of a parameter (rows, D) of `tensors_of`, its number among the published rows."""
    return (part[:, 0] / D).int().tolist()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.megatron)
def test_a_parameter_that_is_cut_and_joined_is_what_is_published(row: Row, ranks: int) -> None:
    tensors, how = tensors_of(row), row.arrangement
    parts = how.cut(how.merge(tensors, SHAPE), ranks, SHAPE)
    assert len(parts) == ranks
    assert len({part.shape for part in parts}) == 1
    back = how.divide(how.join(parts, SHAPE), SHAPE, PUBLISHED[row.megatron])
    assert all(torch.equal(a, b) for a, b in zip(back, tensors, strict=True))


def part(name: str, rank: int) -> torch.Tensor:
    [row] = [row for row in ROWS if row.megatron == name]
    return row.arrangement.cut(row.arrangement.merge(tensors_of(row), SHAPE), 2, SHAPE)[rank]


EXPECTED: dict[str, Any] = {
    # Published rows: 0-15 are queries, of each head two of the query and two of its gate; 16-19 keys; 20-23 values.
    "self_attention.linear_qkv.weight": [0, 1, 4, 5, 2, 3, 6, 7, 16, 17, 20, 21],
    # 0-3 queries, 4-7 keys, 8-15 values, 16-23 output gates, 24-27 write strengths, 28-31 decays.
    "self_attention.in_proj.weight": [0, 1, 4, 5, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 28, 29],
    "mlp.linear_fc1.weight": [0, 1, 2, 6, 7, 8],
    "mlp.shared_experts.linear_fc1.weight": [0, 1, 2, 6, 7, 8],
    "linear_fc1.weight": [0, 1, 2, 6, 7, 8],
    "embedding.word_embeddings.weight": [0, 1, 2, 3],
    "output_layer.weight": [0, 1, 2, 3],
}
"""The published rows that the first of two ranks has, in its order."""


@pytest.mark.parametrize("name", EXPECTED)
def test_the_first_of_two_ranks_has_its_share_of_every_section(name: str) -> None:
    assert rows_of(part(name, 0)) == EXPECTED[name]


def test_the_last_rank_has_the_padding_of_the_vocabulary() -> None:
    assert part("embedding.word_embeddings.weight", 1)[-1].tolist() == [0.0] * D


def test_the_first_of_two_ranks_has_the_filters_of_its_own_channels() -> None:
    filters = part("self_attention.conv1d.weight", 0)
    assert (filters[:, 0, 0] / 4).int().tolist() == [0, 1, 4, 5, 8, 9, 10, 11]


@pytest.mark.parametrize("name", ["self_attention.linear_proj.weight", "self_attention.out_proj.weight"])
def test_outputs_are_cut_by_columns(name: str) -> None:
    assert part(name, 0)[0].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_every_row_is_tested() -> None:
    assert [row.megatron for row in ROWS] == list(PUBLISHED)

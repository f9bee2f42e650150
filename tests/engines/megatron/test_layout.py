"""Sizes of pipeline stages, and the shares of ranks."""

import pytest

from qwen35_trainer.engines.batch_division import BatchDivision
from qwen35_trainer.engines.megatron.layout import stage_sizes
from qwen35_trainer.planning import megatron_memory


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"),
    [
        (40, 2, (None, None)),
        (94, 8, (11, 11)),  # as in the published recipe of the 235B model
        (5, 2, (3, 2)),
        (7, 3, (2, 2)),
        (10, 4, (2, 2)),
        (5, 4, (2, 1)),
        (61, 16, (3, 2)),
    ],
)
def test_stages_in_the_middle_are_equal_and_the_ends_have_the_rest(
    layers: int, stages: int, sizes: tuple[int | None, int | None]
) -> None:
    first, last = stage_sizes(layers, stages)
    assert (first, last) == sizes
    if first is not None and last is not None and stages > 2:
        middle, rest = divmod(layers - first - last, stages - 2)
        assert rest == 0
        assert middle >= 1


@pytest.mark.parametrize(
    ("layers", "stages", "virtual", "sizes"),
    [(8, 2, 2, (None, None)), (6, 2, 2, (4, 2)), (20, 4, 2, (4, 4)), (94, 8, 2, (12, 10)), (12, 4, 3, (None, None))],
)
def test_virtual_stages_of_a_stage_have_equal_numbers_of_layers(
    layers: int, stages: int, virtual: int, sizes: tuple[int | None, int | None]
) -> None:
    assert stage_sizes(layers, stages, virtual) == sizes


@pytest.mark.parametrize(
    ("layers", "stages", "virtual"),
    [
        (layers, stages, virtual)
        for layers in (4, 6, 7, 20, 40, 61, 94)
        for stages in (1, 2, 3, 4, 8)
        for virtual in (1, 2, 3)
        if layers % virtual == 0 and layers >= stages * virtual and (stages > 1 or virtual == 1)
    ],
)
def test_the_plan_has_the_layers_of_the_engine(layers: int, stages: int, virtual: int) -> None:
    planned = megatron_memory.stages(layers, stages, virtual)
    order = [layer for number in range(virtual) for stage in planned for layer in stage.parts[number]]
    assert order == list(range(layers))
    first, last = stage_sizes(layers, stages, virtual)
    assert (planned[0].layers, planned[-1].layers) == (first or layers // stages, last or layers // stages)


@pytest.mark.parametrize(
    ("division", "shares"),
    [
        (BatchDivision(shares=8), [0, 1, 2, 3, 4, 5, 6, 7]),
        (BatchDivision(shares=4), [0, 0, 1, 1, 2, 2, 3, 3]),
        (BatchDivision(shares=4, stages=2), [0, 1, 2, 3, 0, 1, 2, 3]),
        (BatchDivision(shares=2, stages=2), [0, 0, 1, 1, 0, 0, 1, 1]),
        (BatchDivision(shares=1, stages=4), [0] * 8),
    ],
)
def test_neighbours_and_pipeline_stages_compute_the_same_share(division: BatchDivision, shares: list[int]) -> None:
    assert [division.share_of(rank, 8) for rank in range(8)] == shares

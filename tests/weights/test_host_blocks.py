"""Host memory is allocated once, and holds storages of any size."""

import pytest
import torch

from qwen35_trainer.weights.host_blocks import BLOCK_BYTES, HostBlocks
from qwen35_trainer.weights.parked_tensors import ParkedTensors

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("size", "sizes"),
    [
        (1, [1]),
        (BLOCK_BYTES, [BLOCK_BYTES]),
        (2 * BLOCK_BYTES + 6, [BLOCK_BYTES, BLOCK_BYTES, 6]),
    ],
)
def test_all_blocks_but_the_last_one_have_one_size(size: int, sizes: list[int]) -> None:
    assert [block.numel() for block in HostBlocks(pinned=False, kept=False).take(size)] == sizes


def test_blocks_that_were_given_back_are_used_again() -> None:
    blocks = HostBlocks(pinned=False, kept=True)
    first = blocks.take(2 * BLOCK_BYTES + 6)
    places = {block.data_ptr() for block in first}
    blocks.give_back(first)
    again = blocks.take(BLOCK_BYTES) + blocks.take(BLOCK_BYTES + 6)
    assert {block.data_ptr() for block in again} == places
    assert blocks.take(6)[0].data_ptr() not in places


def test_a_tensor_that_is_parked_again_and_again_has_its_newest_values() -> None:
    blocks, table = HostBlocks(pinned=False, kept=True), torch.zeros(BLOCK_BYTES // 4 + 3)
    for value in (1.0, 2.0):
        table.fill_(value)
        table[-1] = value + 0.5
        parked = ParkedTensors([table], CPU, blocks=blocks)
        assert table.untyped_storage().nbytes() == 0
        parked.restore()
        assert bool((table[:-1] == value).all())
        assert float(table[-1]) == value + 0.5

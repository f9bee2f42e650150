"""Numbers of the response tokens of a share, and the rows of a micro-batch."""

import numpy as np
import torch

from qwen35_trainer.engines.micro_batch import Offsets, TokenTable
from qwen35_trainer.engines.train_batch import TrainBatch


def share(*held: int) -> TrainBatch:
    """A share of three samples, whose responses have 3, 1 and 2 tokens."""
    tokens, ones = np.arange(6, dtype=np.int32), np.ones(3, dtype=np.int64)
    batch = TrainBatch(tokens[:3], ones, tokens, np.array([3, 1, 2]), np.ones(6, dtype=np.bool_))
    return batch.share(np.array(held))


def test_rows_that_were_filled_come_back_in_any_order_and_0_on_padding():
    batch = share(0, 2)
    table = TokenTable.zeros(batch, Offsets.of(batch))
    table.fill(np.array([2, 0]), torch.tensor([[4.0, 5.0, 9.0, 9.0], [1.0, 2.0, 3.0, 9.0]]))
    assert table.values.tolist() == [1, 2, 3, 4, 5]
    assert table.rows(np.array([0, 2]), torch.zeros(2, 4)).tolist() == [[1, 2, 3, 0], [4, 5, 0, 0]]
    assert table.rows(np.array([2]), torch.zeros(1, 2)).tolist() == [[4, 5]]


def test_an_empty_micro_batch_has_a_row_of_zeros():
    batch = share(1)
    table = TokenTable.zeros(batch, Offsets.of(batch))
    empty = np.empty(0, dtype=np.int64)
    table.fill(empty, torch.ones(1, 1))
    assert table.values.tolist() == [0]
    assert table.rows(empty, torch.zeros(1, 1, dtype=torch.bool)).tolist() == [[0]]

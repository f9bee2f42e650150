"""No advantage depends on how the ranks divide the batch."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from qwen35_trainer.algorithms.advantages import ADVANTAGES, OneShare, TrainedTokens, estimator

PATIENCE = 60.0
"""Seconds to wait for the other ranks. A rank that calls less often than the others would otherwise block them forever."""


class Ranks:
    """Sums and maxima over ranks that are threads. All of them must make the same calls."""

    def __init__(self, ranks: int) -> None:
        self._values: dict[int, Tensor] = {}
        self._all_there = threading.Barrier(ranks)

    def sum(self, values: Tensor) -> Tensor:
        return torch.stack(self._exchanged(values)).sum(dim=0)

    def max(self, values: Tensor) -> Tensor:
        return torch.stack(self._exchanged(values)).amax(dim=0)

    def _exchanged(self, values: Tensor) -> list[Tensor]:
        self._values[threading.get_ident()] = values
        self._all_there.wait(PATIENCE)
        everyone = list(self._values.values())
        self._all_there.wait(PATIENCE)
        return everyone


def tokens_of(held: list[int], lengths: list[int], tables: list[Tensor]) -> TrainedTokens:
    """The trained tokens of some of 8 samples in 2 groups. tables: (8, T) penalties and values."""
    sample = torch.tensor([at for at in held for _ in range(lengths[at])], dtype=torch.int64)
    penalties, values = (torch.cat([table[at, : lengths[at]] for at in held] or [table[0, :0]]) for table in tables)
    return TrainedTokens(
        rewards=torch.tensor([1.0, 0.0, 0.5, 2.0, 0.0, 0.0, 3.0, 1.0]),
        group=torch.tensor([7, 7, 3, 3, 7, 7, 3, 3]),
        valid=torch.tensor([True, True, True, False, True, True, True, True]),
        lengths=torch.tensor(lengths),
        sample=sample,
        token_penalty=penalties,
        values=values,
        gamma=0.9,
        lam=0.8,
        baseline=torch.tensor([True, False, True, False, False, False, False, False]),
    )


@pytest.mark.parametrize("name", ADVANTAGES.names)
@pytest.mark.parametrize("shares", [[[0, 1, 2, 3], [4, 5, 6, 7]], [[1], [0, 2, 3, 4, 5, 6, 7]], [[], list(range(8))]])
def test_ranks_get_the_advantages_of_the_whole_batch(name, shares):
    lengths = [3, 1, 4, 2, 0, 5, 2, 1]
    generator = torch.Generator().manual_seed(3)
    tables = [torch.randn(8, 5, generator=generator) * scale for scale in (0.1, 1.0)]
    whole = tokens_of(list(range(8)), lengths, tables)
    expected = estimator(name)(whole, OneShare())
    assert expected.count_nonzero() > 0
    ranks = Ranks(len(shares))
    with ThreadPoolExecutor(len(shares)) as pool:
        of_ranks = list(pool.map(lambda held: estimator(name)(tokens_of(sorted(held), lengths, tables), ranks), shares))
    for held, result in zip(shares, of_ranks, strict=True):
        assert_close(result, torch.cat([expected[whole.sample == at] for at in sorted(held)] or [expected[:0]]))

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from qwen35_trainer.algorithms.aggregation import AGGREGATIONS, GlobalCounts, aggregate
from tests.algorithms.whole_batch import counts_of

MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])
PER_TOKEN = torch.tensor([[1.0, 2.0, 3.0], [4.0, math.nan, math.inf], [math.nan] * 3])


# Sums 6 and 4 over 3 and 1 tokens; the third sequence trains nothing and is none.
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("TokenMean", 10 / 4),
        ("SequenceMeanTokenSum", (6 + 4) / 2),
        ("SequenceMeanTokenMean", (6 / 3 + 4 / 1) / 2),
        ("SequenceMeanTokenSumNorm", (6 / 5 + 4 / 5) / 2),
    ],
)
def test_each_aggregation_divides_by_its_own_count(name, expected):
    assert aggregate(name)(PER_TOKEN, MASK, counts_of(MASK, max_tokens=5)).item() == pytest.approx(expected)


@pytest.mark.parametrize("name", AGGREGATIONS.names)
def test_padding_gets_no_gradient(name):
    per_token = PER_TOKEN.clone().requires_grad_()
    aggregate(name)(per_token, MASK, counts_of(MASK, max_tokens=5)).backward()
    assert per_token.grad.isfinite().all()
    assert torch.equal(per_token.grad != 0, MASK.bool())


def test_all_counts_below_one_are_refused_together():
    with pytest.raises(ValueError, match=r"global counts below 1: tokens 0, sequences 0\. Skip the update"):
        counts_of(torch.zeros(2, 3), max_tokens=5)


@pytest.mark.parametrize("name", AGGREGATIONS.names)
@pytest.mark.parametrize("rows", [0, 2])
def test_a_micro_batch_that_trains_nothing_adds_zero_and_can_be_differentiated(name, rows):
    per_token = torch.full((rows, 3), math.nan, requires_grad=True)
    share = aggregate(name)(per_token, torch.zeros(rows, 3), GlobalCounts(4, 2, 5))
    share.backward()
    assert share.item() == 0
    assert per_token.grad.count_nonzero() == 0


@pytest.mark.parametrize("name", AGGREGATIONS.names)
@given(
    rows=st.lists(st.integers(0, 6), min_size=1, max_size=10).filter(any),
    cuts=st.sets(st.integers(1, 9)),
    seed=st.integers(0, 999),
)
def test_shares_of_any_split_add_up_to_the_whole(name, rows, cuts, seed):
    mask = (torch.arange(6) < torch.tensor(rows)[:, None]).double()
    per_token = torch.randn(len(rows), 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    counts = counts_of(mask, max_tokens=6)
    edges = [0, *sorted(cut for cut in cuts if cut < len(rows)), len(rows)]
    shares = []
    for start, end in itertools.pairwise(edges):
        # Micro-batches are padded to their own longest sequence.
        width = max(1, *rows[start:end]) if end - start > 1 else max(1, rows[start])
        shares.append(aggregate(name)(per_token[start:end, :width], mask[start:end, :width], counts))
    assert_close(torch.stack(shares).sum(), aggregate(name)(per_token, mask, counts))

"""Two and four real processes that share each sequence, against one that has it alone."""

import pickle
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from qwen35_trainer.models.qwen3_5.context_parallel import head_problems, local_rows, padded
from qwen35_trainer.models.qwen3_5.inputs import ModelInput
from tests.models.context_rank import CASES, PICTURES, RANKS, Results, run
from tests.models.rank_processes import run_ranks


@pytest.fixture(scope="module")
def alone() -> Results:
    return {name: run(case, None) for name, case in (CASES | PICTURES).items()}


@pytest.fixture(scope="module")
def together(tmp_path_factory) -> list[dict[int, Results]]:
    """What each process got, by the number that shared sequences. Started once: it takes seconds."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks("tests.models.context_rank", RANKS, folder)
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(RANKS)]


TWO = [pytest.param(2, name, id=f"two: {name}") for name in CASES | PICTURES]
FOUR = [pytest.param(4, name, id=f"four: {name}") for name in CASES]


@pytest.mark.parametrize(("ranks", "case"), TWO + FOUR)
def test_every_process_gets_all_scores_and_they_are_those_of_one(alone, together, ranks, case):
    for results in together:
        for own, expected in zip(results[ranks][case][:2], alone[case][:2], strict=True):
            torch.testing.assert_close(own, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("ranks", "case"), TWO + FOUR)
def test_the_sum_of_the_processes_gradients_is_the_gradient_of_one(alone, together, ranks, case):
    for results in together:
        for own, expected in zip(results[ranks][case][2], alone[case][2], strict=True):
            torch.testing.assert_close(own, expected, atol=5e-4, rtol=1e-3)


class Group:
    """Size and rank of a process group, which is all that deciding about rows and padding takes."""

    def __init__(self, ranks: int, rank: int = 0) -> None:
        self._ranks, self._rank = ranks, rank

    def size(self) -> int:
        return self._ranks

    def rank(self) -> int:
        return self._rank


def test_padding_of_a_packed_row_is_a_sequence_of_its_own():
    inputs = ModelInput.of_text([torch.tensor([1, 2, 3]), torch.tensor([4, 5])], packed=True, device="cpu")
    longer = padded(inputs, Group(4))
    assert longer.tokens.tolist() == [[1, 2, 3, 4, 5, 0, 0, 0]]
    assert longer.boundaries is not None
    assert longer.boundaries.tolist() == [0, 3, 5, 8]
    assert longer.boundaries.dtype == torch.int32
    assert longer.positions[0, :, 0].tolist() == [0, 1, 2, 0, 1, 0, 1, 2]


def test_a_row_that_divides_gets_no_padding_and_no_empty_sequence():
    """An empty sequence repeats the last boundary, which breaks kernels that read it."""
    inputs = ModelInput.of_text([torch.tensor([1, 2, 3]), torch.tensor([4])], packed=True, device="cpu")
    assert padded(inputs, Group(4)) is inputs


def test_padded_rows_grow_to_the_right():
    inputs = ModelInput.of_text([torch.tensor([1, 2, 3]), torch.tensor([4])], packed=False, device="cpu")
    longer = padded(inputs, Group(2))
    assert longer.tokens.tolist() == [[1, 2, 3, 0], [4, 0, 0, 0]]
    assert longer.boundaries is None


def test_padding_changes_nothing_but_the_tokens():
    inputs = replace(ModelInput.of_text([torch.tensor([1])], packed=False, device="cpu"), text_only=True)
    assert padded(inputs, Group(2)).text_only


def test_every_row_has_one_process_which_finds_it_in_its_own_tokens():
    lines, length, ranks = 3, 7, 4
    share = 2  # tokens of a slice: 8, padded, by 4
    rows = torch.randperm(lines * length, generator=torch.Generator().manual_seed(0))
    inputs = ModelInput.of_text(
        [torch.arange(i * length, (i + 1) * length) for i in range(lines)], packed=False, device="cpu"
    )
    owners: list[Any] = []
    for rank in range(ranks):
        group = Group(ranks, rank)
        slice_of_tokens = padded(inputs, group).tokens.chunk(ranks, 1)[rank].flatten()
        indices, at = local_rows(rows, group, whole=length, share=share)
        assert torch.equal(slice_of_tokens[at], rows[indices])
        owners += indices.tolist()
    assert sorted(owners) == list(range(len(rows)))


def test_heads_that_processes_cannot_share_are_named_with_the_numbers_that_work(make_model):
    config = make_model().config  # 4 attention heads; linear attention: 2 key heads, 4 value heads
    assert head_problems(config, 2) == []
    [problem] = head_problems(config, 4)
    assert problem == "4 processes cannot share linear_num_key_heads 2 evenly; set train.parallelism.context to 1 or 2"
    [problem] = head_problems(config, 3)
    assert re.search(
        "num_attention_heads 4 and linear_num_key_heads 2 and linear_num_value_heads 4 .* 1 or 2$", problem
    )

"""Sequences as a model reads them."""

import pytest
import torch

from qwen35_trainer.data.expert_choices import NO_CHOICE
from qwen35_trainer.models.qwen3_5.inputs import ModelInput

SEQUENCES = [torch.tensor([5, 6, 7]), torch.tensor([8])]


def test_padded_sequences_stand_side_by_side():
    inputs = ModelInput.of_text(SEQUENCES, packed=False, device="cpu")
    assert inputs.tokens.tolist() == [[5, 6, 7], [8, 0, 0]]
    assert inputs.positions.tolist() == [[[0] * 4, [1] * 4, [2] * 4], [[0] * 4] * 3]
    assert inputs.boundaries is None


def test_packed_sequences_stand_one_after_another_and_count_from_zero():
    inputs = ModelInput.of_text(SEQUENCES, packed=True, device="cpu")
    assert inputs.tokens.tolist() == [[5, 6, 7, 8]]
    assert inputs.positions.tolist() == [[[0] * 4, [1] * 4, [2] * 4, [0] * 4]]
    assert inputs.boundaries is not None
    assert inputs.boundaries.dtype == torch.int32
    assert inputs.boundaries.tolist() == [0, 3, 4]


@pytest.mark.parametrize("sequences", [[], [torch.tensor([1]), torch.tensor([], dtype=torch.int64)]])
@pytest.mark.parametrize("packed", [False, True])
def test_no_sequences_and_empty_ones_are_refused(sequences, packed):
    with pytest.raises(ValueError, match="at least one sequence of at least one token"):
        ModelInput.of_text(sequences, packed=packed, device="cpu")


@pytest.mark.parametrize("packed", [False, True])
def test_replayed_experts_stand_at_the_tokens_of_their_sequences_unless_a_layer_has_one_twice(packed: bool) -> None:
    """Then, and at padding, routers choose in all layers."""
    lengths, generator = (3, 1), torch.Generator().manual_seed(0)
    rows = [torch.rand((length, 2, 4), generator=generator).argsort(-1)[..., :2].short() for length in lengths]
    rows[0][1, 1] = 3
    inputs = ModelInput.of_text([torch.ones(n, dtype=torch.int64) for n in lengths], packed=packed, device="cpu")
    choices = inputs.replaying(rows).choices
    assert choices is not None
    rows[0][1] = NO_CHOICE
    if packed:
        assert torch.equal(choices, torch.cat(rows)[None])
    else:
        assert torch.equal(choices[0], rows[0])
        assert torch.equal(choices[1, :1], rows[1])
        assert (choices[1, 1:] == NO_CHOICE).all()

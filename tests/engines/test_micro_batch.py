"""What the model reads of some samples, and which of its rows score which of their tokens."""

import numpy as np
import pytest
import torch

from qwen35_trainer.engines.micro_batch import MicroBatch, Offsets, micro_batch, response_scores
from qwen35_trainer.engines.train_batch import TrainBatch
from qwen35_trainer.models.qwen3_5.adapter import adapt

CPU = torch.device("cpu")
WAYS = pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])


def three_samples(*, supervised: bool = False) -> TrainBatch:
    """Prompts 1 2 | 3 | 4 5 6 and responses 11 12 13 | 14 15 | 16; token 12 does not train."""
    return TrainBatch(
        prompts=np.array([1, 2, 3, 4, 5, 6], dtype=np.int32),
        prompt_lengths=np.array([2, 1, 3]),
        responses=np.array([11, 12, 13, 14, 15, 16], dtype=np.int32),
        response_lengths=np.array([3, 2, 1]),
        trainable=np.array([True, False, True, True, True, True]),
        log_probs=None if supervised else np.arange(-6, 0, dtype=np.float32),
    )


def read(samples: list[int], *, supervised: bool = False, packed: bool = False) -> MicroBatch:
    batch = three_samples(supervised=supervised)
    chosen = np.array(samples, dtype=np.int64)
    return micro_batch(batch, Offsets.of(batch), chosen, None, packed=packed, device=CPU)


def test_padded_samples_stand_side_by_side_without_their_last_tokens() -> None:
    both = read([2, 0])
    assert both.inputs.tokens.tolist() == [[4, 5, 6, 0], [1, 2, 11, 12]]
    assert both.inputs.boundaries is None
    assert both.responses.mask.tolist() == [[True, False, False], [True, False, True]]
    assert both.responses.log_probs is not None
    assert both.responses.log_probs.tolist() == [[-1, 0, 0], [-6, -5, -4]]


def test_packed_samples_stand_in_one_row_without_their_last_tokens() -> None:
    both = read([2, 0], packed=True)
    assert both.inputs.tokens.tolist() == [[4, 5, 6, 1, 2, 11, 12]]
    assert both.inputs.boundaries is not None
    assert both.inputs.boundaries.tolist() == [0, 3, 7]


@WAYS
def test_trained_tokens_alone_are_scored_at_the_position_before_them(packed) -> None:
    micro = read([1, 0, 2], packed=packed)
    assert micro.targets.tolist() == [14, 15, 11, 13, 16]
    assert micro.inputs.tokens.flatten()[micro.rows].tolist() == [3, 14, 2, 12, 6]
    assert micro.table(micro.targets.float()).tolist() == [[14, 15, 0], [11, 0, 13], [16, 0, 0]]


def test_supervised_samples_have_no_log_probabilities() -> None:
    assert read([0], supervised=True).responses.log_probs is None
    assert read([], supervised=True).responses.log_probs is None


@WAYS
def test_no_samples_are_one_token_that_trains_nothing(packed) -> None:
    empty = read([], packed=packed)
    assert empty.inputs.tokens.shape == empty.responses.mask.shape == (1, 1)
    assert len(empty.rows) == 1
    assert not empty.responses.mask.any()


@WAYS
def test_samples_without_a_trained_token_score_one_that_trains_nothing(packed) -> None:
    batch = TrainBatch(
        prompts=np.array([3, 4], dtype=np.int32),
        prompt_lengths=np.array([1, 1]),
        responses=np.array([7, 8], dtype=np.int32),
        response_lengths=np.array([1, 1]),
        trainable=np.array([False, False]),
    )
    micro = micro_batch(batch, Offsets.of(batch), np.array([0, 1]), None, packed=packed, device=CPU)
    assert (micro.rows.tolist(), micro.targets.tolist()) == ([0], [7])
    assert not micro.responses.mask.any()


@WAYS
def test_log_probabilities_and_entropy_are_those_of_the_tempered_distribution(make_model, packed) -> None:
    model, micro = make_model(), read([0, 1, 2], packed=packed)
    with torch.no_grad():
        log_probs, entropy, _ = response_scores(adapt(make_model()), micro, 0.5, with_entropy=True)
        assert entropy is not None
        for row, (ids, first, length) in enumerate(
            [((1, 2, 11, 12, 13), 2, 3), ((3, 14, 15), 1, 2), ((4, 5, 6, 16), 3, 1)]
        ):
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, first - 1 : -1]
            expected, mask = (logits / 0.5).log_softmax(-1), micro.responses.mask[row, :length]
            chosen = expected.gather(1, torch.tensor(ids[first:])[:, None]).squeeze(1)
            torch.testing.assert_close(log_probs[row, :length], chosen * mask, atol=1e-4, rtol=1e-5)
            distribution = torch.distributions.Categorical(logits=logits / 0.5)
            torch.testing.assert_close(entropy[row, :length], distribution.entropy() * mask, atol=1e-4, rtol=1e-5)

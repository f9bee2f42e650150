"""Samples side by side, and which logits predict which of their tokens."""

import numpy as np
import torch

from qwen35_trainer.engines.batch import TrainBatch
from qwen35_trainer.engines.fsdp.forward import Offsets, pad, response_log_probs

CPU = torch.device("cpu")


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


def padded(samples: list[int], *, supervised: bool = False):
    batch = three_samples(supervised=supervised)
    return pad(batch, Offsets.of(batch), np.array(samples, dtype=np.int64), CPU)


def test_samples_stand_side_by_side_without_their_last_tokens() -> None:
    both = padded([2, 0])
    assert both.tokens.tolist() == [[4, 5, 6, 16], [1, 2, 11, 12]]
    assert both.targets.tolist() == [[16, 0, 0], [11, 12, 13]]
    assert both.mask.tolist() == [[True, False, False], [True, False, True]]
    assert both.log_probs is not None
    assert both.log_probs.tolist() == [[-1, 0, 0], [-6, -5, -4]]


def test_each_target_is_predicted_at_the_position_before_it() -> None:
    both = padded([1, 0])
    assert both.tokens.tolist() == [[3, 14, 15, 0], [1, 2, 11, 12]]
    assert both.positions.tolist() == [[0, 1, 2], [1, 2, 3]]
    for row, (positions, length) in enumerate(zip(both.positions, (2, 3), strict=True)):
        following = [int(both.tokens[row, at + 1]) for at in positions[: length - 1]]
        assert following == both.targets[row, : length - 1].tolist()


def test_supervised_samples_have_no_log_probabilities() -> None:
    assert padded([0], supervised=True).log_probs is None
    assert padded([], supervised=True).log_probs is None


def test_no_samples_are_one_row_that_trains_nothing() -> None:
    empty = padded([])
    assert empty.tokens.shape == empty.targets.shape == (1, 1)
    assert not empty.mask.any()


def test_a_single_token_after_a_single_token_is_a_sample() -> None:
    batch = TrainBatch(
        prompts=np.array([3], dtype=np.int32),
        prompt_lengths=np.array([1]),
        responses=np.array([7], dtype=np.int32),
        response_lengths=np.array([1]),
        trainable=np.array([True]),
    )
    one = pad(batch, Offsets.of(batch), np.array([0]), CPU)
    assert (one.tokens.tolist(), one.targets.tolist(), one.positions.tolist()) == ([[3]], [[7]], [[0]])


def test_log_probabilities_and_entropy_are_those_of_the_tempered_distribution(make_model) -> None:
    model, rows = make_model(), padded([0, 1, 2])
    with torch.no_grad():
        log_probs, entropy = response_log_probs(model, rows, 0.5, with_entropy=True)
        assert entropy is not None
        for row, (ids, first, length) in enumerate(
            [((1, 2, 11, 12, 13), 2, 3), ((3, 14, 15), 1, 2), ((4, 5, 6, 16), 3, 1)]
        ):
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, first - 1 : -1]
            expected = (logits / 0.5).log_softmax(-1)
            chosen = expected.gather(1, torch.tensor(ids[first:])[:, None]).squeeze(1)
            torch.testing.assert_close(log_probs[row, :length], chosen, atol=1e-5, rtol=1e-5)
            distribution = torch.distributions.Categorical(logits=logits / 0.5)
            torch.testing.assert_close(entropy[row, :length], distribution.entropy(), atol=1e-5, rtol=1e-5)

"""The counts of a whole batch, by which the losses of its micro-batches are divided, and its advantages."""

from dataclasses import replace

import numpy as np

from qwen35_trainer.algorithms.advantages import OneShare
from qwen35_trainer.algorithms.aggregation import GlobalCounts
from qwen35_trainer.engines.learning_signal import LearningSignal, counts
from qwen35_trainer.engines.micro_batch import Offsets
from qwen35_trainer.engines.train_batch import TrainBatch
from qwen35_trainer.manifest import AlgorithmSpec


def three_samples(*trainable: bool) -> TrainBatch:
    """Samples with one token of prompt each, and responses of 3, 2 and 1 tokens."""
    return TrainBatch(
        prompts=np.arange(3, dtype=np.int32),
        prompt_lengths=np.ones(3, dtype=np.int64),
        responses=np.arange(6, dtype=np.int32),
        response_lengths=np.array([3, 2, 1]),
        trainable=np.array(trainable),
    )


def test_remax_compares_with_the_sample_that_the_batch_marks_as_greedy() -> None:
    batch = replace(
        three_samples(True, True, True, False, False, True),
        rewards=np.array([1.0, 0.25, 0.0], dtype=np.float32),
        group=np.zeros(3, dtype=np.int64),
        baseline=np.array([False, True, False]),
    )
    algorithm = AlgorithmSpec(advantage="ReMax")
    signal = LearningSignal.of(batch, Offsets.of(batch), algorithm, OneShare(), reference=None, proximal=None)
    assert signal.advantages.values.tolist() == [0.75, 0.75, 0.75, 0.0, 0.0, -0.25]


def test_counts_leave_fully_masked_sequences_out() -> None:
    batch = three_samples(True, False, True, True, True, False)
    assert counts(batch, np.arange(3), 5) == GlobalCounts(tokens=4, sequences=2, max_tokens=5)


def test_the_counts_of_an_update_are_those_of_its_samples() -> None:
    batch = three_samples(True, False, True, True, True, True)
    assert counts(batch, np.array([0, 2]), 5) == GlobalCounts(tokens=3, sequences=2, max_tokens=5)


def test_a_batch_in_which_no_token_trains_has_no_counts() -> None:
    batch = three_samples(False, False, False, False, False, False)
    assert counts(batch, np.arange(3), 5) is None

"""Builds training batches from scored groups or supervised examples, and computes the lag of the tokens in a batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from qwen35_trainer.data.candidates import Candidates
from qwen35_trainer.data.encode import EncodedPrompt
from qwen35_trainer.data.picture_arrays import PictureSource
from qwen35_trainer.data.sft import SupervisedExample
from qwen35_trainer.engines.train_batch import TrainBatch
from qwen35_trainer.failure_reasons import FailureReason
from qwen35_trainer.rewards.reward import CombinedScore
from qwen35_trainer.rollout.rollout_engine import ENVIRONMENT_VERSION, Completed
from qwen35_trainer.runtime.reused_memory import ReusedMemory
from qwen35_trainer.runtime.stored_choices import StoredChoices


class BoundBroken(AssertionError):
    """A token with a lag above the maximum lag (`async.maxVersionLag`) was about to be trained.

    This is always a bug in scheduling.
    """

    failure = FailureReason.BOUND_BROKEN


@dataclass(frozen=True)
class ScoredGroup:
    """A finished group (all samples of one prompt): the prompt, the sequences, and the score of each sequence.

    choices: the experts that were chosen for each sequence; empty: unknown.
    """

    group: int
    prompt: EncodedPrompt
    sequences: tuple[Completed, ...]
    scores: tuple[CombinedScore, ...]
    choices: tuple[StoredChoices, ...] = ()

    @property
    def rewards(self) -> tuple[float | None, ...]:
        """The reward of each sequence, in order.

        None: the sequence could not be generated or scored, so it does not train.
        """
        return tuple(score.value for score in self.scores)

    def without_last(self) -> ScoredGroup:
        """Return the group without its last sequence, which is the greedy baseline in some algorithms."""
        return replace(self, sequences=self.sequences[:-1], scores=self.scores[:-1], choices=self.choices[:-1])


@dataclass(frozen=True)
class TokenAge:
    """The lags of the tokens of a batch.

    The lag of a token is the number of versions of the weights between its generation and its training.
    """

    histogram: dict[int, int]
    """Lag in versions → number of tokens of this lag in the loss."""
    masked: int
    """Number of tokens that are masked, so that they do not train, because their lag is above the maximum.

    Such tokens are also counted in samples that have no reward and would not train anyway.
    """


def assemble(
    groups: Sequence[ScoredGroup],
    *,
    version: int,
    max_lag: int,
    mask_old: bool,
    updates: int,
    mask_truncated: bool = False,
    greedy_last: bool = False,
    memory: ReusedMemory | None = None,
) -> tuple[TrainBatch, TokenAge]:
    """Pack groups into a batch that trains at weight version `version`. Returns the batch and the lags of its tokens.

    max_lag: maximum lag of a token, in versions. mask_old: whether tokens with a higher lag are masked; otherwise such
    a token raises BoundBroken. updates: number of updates (optimizer steps) of the batch. mask_truncated: whether
    responses that reached the length limit are excluded from training. greedy_last: whether the last response of each
    group is a greedy baseline, which does not train. memory: the memory for the tokens of the batch; None: new memory. The
    function has no other side effects, so it may run in a thread.
    """
    memory = memory or ReusedMemory()
    sequences = [sequence for group in groups for sequence in group.sequences]
    rewards = [reward for group in groups for reward in group.rewards]
    baseline = np.zeros(len(sequences), dtype=np.bool_)
    if greedy_last:
        baseline[np.cumsum([len(group.sequences) for group in groups]) - 1] = True
    trains = [
        reward is not None and not greedy and not (mask_truncated and sequence.truncated)
        for sequence, reward, greedy in zip(sequences, rewards, baseline.tolist(), strict=True)
    ]
    lengths = [len(sequence.tokens) for sequence in sequences]
    trainable = memory.empty(sum(lengths), np.bool_)
    age = _mark_trainable(trainable, sequences, trains, version=version, max_lag=max_lag, mask_old=mask_old)
    of_group = [np.asarray(group.prompt.token_ids, dtype=np.int32) for group in groups]
    prompts = [prompt for prompt, group in zip(of_group, groups, strict=True) for _ in group.sequences]
    batch = TrainBatch(
        prompts=np.concatenate(prompts),
        prompt_lengths=np.array([len(prompt) for prompt in prompts], dtype=np.int64),
        responses=np.concatenate(
            [sequence.tokens.ids for sequence in sequences], out=memory.empty(len(trainable), np.int32)
        ),
        response_lengths=np.array(lengths, dtype=np.int64),
        trainable=trainable,
        log_probs=np.concatenate(
            [sequence.tokens.log_probs for sequence in sequences], out=memory.empty(len(trainable), np.float32)
        ),
        candidates=Candidates.join((sequence.tokens.candidates for sequence in sequences), lengths),
        rewards=np.array([reward or 0.0 for reward in rewards], dtype=np.float32),
        valid=np.array([reward is not None for reward in rewards]),
        group=np.array([group.group for group in groups for _ in group.sequences], dtype=np.int64),
        baseline=baseline if greedy_last else None,
        updates=updates,
        pictures=_pictures([group.prompt.pictures for group in groups for _ in group.sequences]),
        choices=_choices(groups),
    )
    return batch, age


def _choices(groups: Sequence[ScoredGroup]) -> tuple[StoredChoices | None, ...] | None:
    """Return the choices of each sample of a batch, with None for a sample without. Returns None if no sample has choices."""
    choices = [each if each.parts else None for group in groups for each in group.choices]
    return None if all(each is None for each in choices) else tuple(choices)


def _mark_trainable(
    mask: NDArray[np.bool_],
    sequences: Sequence[Completed],
    trains: Sequence[bool],
    *,
    version: int,
    max_lag: int,
    mask_old: bool,
) -> TokenAge:
    """Set `mask` (T,) to whether each token trains, and return the lags of the tokens.

    T: tokens of all sequences together.

    trains: for each sequence, whether any of its tokens may train. Tokens of the environment do not train and have no
    lag. Raises BoundBroken for a token with a lag above `max_lag`, unless `mask_old`.
    """
    histogram: Counter[int] = Counter()
    masked = end = 0
    mask[:] = False
    for sequence, may_train in zip(sequences, trains, strict=True):
        for generated_by, count in sequence.tokens.versions.runs:
            start, end = end, end + count
            lag = version - generated_by
            if generated_by == ENVIRONMENT_VERSION:
                continue
            if lag <= max_lag:
                if may_train:
                    mask[start:end] = True
                    histogram[lag] += count
            elif mask_old:
                masked += count
            else:
                raise BoundBroken(f"a token of lag {lag} in a batch of version {version}; the bound is {max_lag}")
    return TokenAge(dict(sorted(histogram.items())), masked)


def assemble_supervised(examples: Sequence[SupervisedExample], updates: int) -> TrainBatch:
    """Pack supervised examples into a batch.

    The tokens of an example before its first target become the prompt, which has at least one token. updates: number
    of updates (optimizer steps) of the batch. Pictures are not read here: the train ranks read the pictures of the
    examples that they compute.
    """
    splits = [max(1, int(example.loss_mask.argmax())) for example in examples]
    pairs = list(zip(examples, splits, strict=True))
    return TrainBatch(
        prompts=np.concatenate([example.token_ids[:at] for example, at in pairs]),
        prompt_lengths=np.array(splits, dtype=np.int64),
        responses=np.concatenate([example.token_ids[at:] for example, at in pairs]),
        response_lengths=np.array([len(example.token_ids) - at for example, at in pairs], dtype=np.int64),
        trainable=np.concatenate([example.loss_mask[at:] for example, at in pairs]),
        updates=updates,
        pictures=_pictures([example.pictures for example in examples]),
    )


def _pictures(sources: Sequence[PictureSource | None]) -> tuple[PictureSource | None, ...] | None:
    """Return the pictures of each sample of a batch, with None for a sample without pictures.

    Returns None in place of the tuple if no sample has pictures.
    """
    return None if all(source is None for source in sources) else tuple(sources)

"""A training batch, or one rank's share of it. Both have the lengths and rewards of all N samples. A share has tokens only of
its own samples, which are called *held*.

all samples     prompt_lengths, response_lengths, rewards, valid, group, trained: (N,) each, the same on every rank
held samples    prompts    p p p │ p p │ …
                responses  r r   │ r r r r │ …        log_probs, trainable: one value per r; candidates: any number
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from qwen35_trainer.data.candidates import Candidates
from qwen35_trainer.data.expert_choices import ChoiceSource, RecordedParts
from qwen35_trainer.data.picture_arrays import PictureSource


@dataclass(frozen=True)
class TrainBatch:
    """N samples of a batch, or one rank's share of them.

    A whole batch has the tokens of all N samples. A share also lists all N samples, with their lengths, rewards and
    groups, but has the tokens of some samples only: these samples are *held*. The driver assembles whole batches, and
    each data-parallel rank gets its share (`batch_division`). Numbers that are computed from all samples, such as the
    counts by which losses are divided, need no tokens, so every rank computes the same numbers.
    """

    prompts: NDArray[np.int32]
    prompt_lengths: NDArray[np.int64]
    responses: NDArray[np.int32]
    response_lengths: NDArray[np.int64]
    trainable: NDArray[np.bool_]
    """True for each held response token that enters the loss."""
    log_probs: NDArray[np.float32] | None = None
    """Log-probability of each held response token under the behaviour policy; None for supervised samples."""
    candidates: Candidates | None = None
    """The tokens that the behaviour policy could have drawn in place of each held response token; None:
    the whole vocabulary."""
    rewards: NDArray[np.float32] | None = None
    """(N,) reward of each sample; None for supervised samples."""
    valid: NDArray[np.bool_] | None = None
    """(N,) false for samples that could not be scored; None: all samples were scored."""
    group: NDArray[np.int64] | None = None
    """(N,) number of each sample's group. The samples of one prompt have the same number and are adjacent. None
    for supervised samples."""
    baseline: NDArray[np.bool_] | None = None
    """(N,) true for the greedy sample of each group. Its reward is the baseline of the group, and it does not train.
    None: no sample is a baseline."""
    updates: int = 1
    """Number of optimizer steps. The samples are divided into this number of equal parts, in order; each
    step trains one part."""
    pictures: tuple[PictureSource | None, ...] | None = None
    """Images and videos of each of the N samples. They are read when a micro-batch is computed. An entry is None if the
    sample has no picture or is not held.

    None: text only."""
    choices: tuple[ChoiceSource | None, ...] | None = None
    """Where the experts that the rollout chose for each of the N samples are read before the batch trains. An entry is
    None if the sample has none or is not held. None: nothing is replayed."""
    replayed: tuple[RecordedParts | None, ...] | None = None
    """The experts to compute for the inputs of each of the N samples, as read from `choices`. An entry is None if the
    trainer's routers choose for the sample. None: they choose for all samples."""
    kl_coefficient: float | None = None
    """The adapted KL coefficient of this batch (`algorithm.kl.adaptive`). It applies to the penalty in the reward if
    there is one, and otherwise to the penalty in the loss.

    None: the coefficients are those of the manifest."""
    held: NDArray[np.int64] | None = None
    """Ascending indices of the samples whose tokens and pictures this object holds; None: all samples."""
    counts: NDArray[np.int64] | None = None
    """(N,) number of trained tokens of each sample, in a share. None in a whole batch, where `trainable`
    determines the numbers."""
    whole_mask: NDArray[np.bool_] | None = None
    """The array `trainable` of the whole batch, in a share for an advantage function of the user. None otherwise."""

    def __post_init__(self) -> None:
        held = self.held_samples
        assert self.prompts.size == self.prompt_lengths[held].sum(), "prompts do not fit their lengths"
        assert self.responses.size == self.trainable.size == self.response_lengths[held].sum(), "responses do not fit"
        assert self.candidates is None or len(self.candidates) == self.responses.size, "candidates do not fit"
        assert self.samples % self.updates == 0, f"{self.samples} samples do not make {self.updates} equal updates"
        assert self.pictures is None or len(self.pictures) == self.samples, "pictures are not one entry per sample"
        assert self.choices is None or len(self.choices) == self.samples, "choices are not one entry per sample"
        assert (self.held is None) == (self.counts is None), "a share needs the counts of the whole batch"

    @property
    def samples(self) -> int:
        """Number of samples, N."""
        return len(self.response_lengths)

    @property
    def held_samples(self) -> NDArray[np.int64]:
        """Ascending indices of the samples whose tokens this object holds."""
        return np.arange(self.samples) if self.held is None else self.held

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of tokens of each sample, prompt and response together, as an array with one entry per sample."""
        return self.prompt_lengths + self.response_lengths

    @property
    def parts(self) -> list[NDArray[np.int64]]:
        """Indices of the samples of each update, as one array per update."""
        return np.split(np.arange(self.samples), self.updates)

    @property
    def trained(self) -> NDArray[np.int64]:
        """Number of trained tokens of each sample, as an array with one entry per sample."""
        if self.counts is not None:
            return self.counts
        return np.add.reduceat(self.trainable, starts_of(self.response_lengths), dtype=np.int64)

    def share(self, samples: NDArray[np.int64], *, whole_masks: bool = False) -> TrainBatch:
        """Return a share of this whole batch, with copies of the tokens of `samples`.

        samples: ascending indices. whole_masks: whether the share also keeps `trainable` of all
        samples, as `whole_mask`.
        """
        assert self.held is None, "a share is taken from a whole batch"
        prompts, responses = starts_of(self.prompt_lengths), starts_of(self.response_lengths)

        def cut[T: np.generic](values: NDArray[T], starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[T]:
            parts = [values[at : at + length] for at, length in zip(starts[samples], lengths[samples], strict=True)]
            return np.concatenate(parts) if parts else values[:0]

        kept, candidates = set(samples.tolist()), None
        if self.candidates is not None:
            pairs = zip(responses[samples], self.response_lengths[samples], strict=True)
            tokens = [np.arange(at, at + length) for at, length in pairs]
            candidates = self.candidates.take(np.concatenate(tokens) if tokens else samples[:0])
        return replace(
            self,
            prompts=cut(self.prompts, prompts, self.prompt_lengths),
            responses=cut(self.responses, responses, self.response_lengths),
            trainable=cut(self.trainable, responses, self.response_lengths),
            log_probs=None if self.log_probs is None else cut(self.log_probs, responses, self.response_lengths),
            candidates=candidates,
            pictures=self.pictures and tuple(each if n in kept else None for n, each in enumerate(self.pictures)),
            choices=self.choices and tuple(each if n in kept else None for n, each in enumerate(self.choices)),
            held=samples,
            counts=self.trained,
            whole_mask=self.trainable if whole_masks else None,
        )


def starts_of(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the position of each sample's first token in an array that holds the tokens of all
    samples, one after another.
    """
    starts: NDArray[np.int64] = np.cumsum(lengths) - lengths
    return starts

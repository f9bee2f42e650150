"""Aggregation of losses per token into one number, with global counts.

An aggregation sees one micro-batch, but divides by counts over the whole update, so that micro-batches may differ
in size. The SUM of its results over all micro-batches and data-parallel ranks is the loss of the update. An engine
that averages gradients over ranks must therefore multiply them by the number of ranks. No engine divides by the
number of micro-batches.

A sequence without trained tokens does not count in `GlobalCounts.sequences`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from qwen35_trainer.algorithms.masking import sequence_mean, token_sum
from qwen35_trainer.algorithms.registry import Registry


@dataclass(frozen=True)
class GlobalCounts:
    """The numbers by which the losses of one update are divided, counted over all micro-batches
    and data-parallel ranks.

    The constructor raises ValueError naming every count below 1, because a batch without trained tokens
    cannot have an update.
    """

    tokens: int
    """Number of tokens whose mask is 1."""
    sequences: int
    """Number of sequences with at least one token whose mask is 1."""
    max_tokens: int
    """The maximum response length, in tokens: the constant by which SequenceMeanTokenSumNorm divides."""

    def __post_init__(self) -> None:
        empty = [f"{name} {value}" for name, value in vars(self).items() if value < 1]
        if empty:
            raise ValueError(f"global counts below 1: {', '.join(empty)}. Skip the update of a batch without tokens.")


type AggregationFunction = Callable[[Tensor, Tensor, GlobalCounts], Tensor]

AGGREGATIONS: Registry[AggregationFunction] = Registry("aggregation")


def aggregate(name: str) -> AggregationFunction:
    """Return the function registered as `name`: (per_token, mask, counts) -> scalar.

    per_token, mask: (N, T), N sequences of up to T tokens. Raises ValueError if the name is unknown.
    """
    return AGGREGATIONS.get(name)


@AGGREGATIONS.register("TokenMean")
def token_mean(per_token: Tensor, mask: Tensor, counts: GlobalCounts) -> Tensor:
    """Return this micro-batch's part of the mean over all trained tokens of the update (DAPO, arXiv:2503.14476).

    Every token has the same weight, so long sequences weigh more than short ones.
    """
    return token_sum(per_token, mask) / counts.tokens


@AGGREGATIONS.register("SequenceMeanTokenSum")
def sequence_mean_token_sum(per_token: Tensor, mask: Tensor, counts: GlobalCounts) -> Tensor:
    """Return this micro-batch's part of the mean over sequences, where each sequence counts with the sum of
    its tokens' losses.

    This is the textbook policy gradient, whose scale grows with the length of the sequences.
    """
    return token_sum(per_token, mask) / counts.sequences


@AGGREGATIONS.register("SequenceMeanTokenMean")
def sequence_mean_token_mean(per_token: Tensor, mask: Tensor, counts: GlobalCounts) -> Tensor:
    """Return this micro-batch's part of the mean over sequences, where each sequence counts with the mean of
    its tokens' losses.

    Every sequence has the same weight, whatever its length (GRPO, arXiv:2402.03300 eq. 3).
    """
    return sequence_mean(per_token, mask).sum() / counts.sequences


@AGGREGATIONS.register("SequenceMeanTokenSumNorm")
def sequence_mean_token_sum_norm(per_token: Tensor, mask: Tensor, counts: GlobalCounts) -> Tensor:
    """Return this micro-batch's part of the mean over sequences of (sum of the tokens' losses) /
    (maximum response length).

    The divisor is the constant `counts.max_tokens` instead of the width of the padded batch, which differs between
    micro-batches (Dr. GRPO, arXiv:2503.20783).
    """
    return token_sum(per_token, mask) / (counts.sequences * counts.max_tokens)

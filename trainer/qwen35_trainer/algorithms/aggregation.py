"""Aggregation of losses per token into one number, with global counts.

Every denominator is a count over the whole batch, so that micro-batches may differ in size: the SUM of the results over
all micro-batches and data-parallel ranks is the value for the undivided batch. An engine that averages gradients over
ranks must undo the average (multiply by the number of ranks); it never divides by the number of micro-batches.

A sequence without a token that trains does not count in `GlobalCounts.sequences`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from qwen35_trainer.algorithms.masking import sequence_mean, token_sum
from qwen35_trainer.algorithms.registry import Registry


@dataclass(frozen=True)
class GlobalCounts:
    """The numbers by which the losses of one update are divided, counted over all micro-batches and data-parallel ranks.

    Raises ValueError naming every count below 1: a batch without tokens to train has no update.
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
    """Return the function registered as `name`: (per_token (N, T), mask (N, T), counts) -> scalar. Raises ValueError if unknown."""
    return AGGREGATIONS.get(name)


@AGGREGATIONS.register("TokenMean")
def token_mean(per_token: Tensor, mask: Tensor, counts: GlobalCounts) -> Tensor:
    """Average over all trained tokens: every token weighs the same, so long sequences weigh more (DAPO,
    arXiv:2503.14476).
    """
    return token_sum(per_token, mask) / counts.tokens


@AGGREGATIONS.register("SequenceMeanTokenSum")
def sequence_mean_token_sum(per_token: Tensor, mask: Tensor, counts: GlobalCounts) -> Tensor:
    """Sum over tokens and average over sequences: the textbook policy gradient, whose scale grows with length."""
    return token_sum(per_token, mask) / counts.sequences


@AGGREGATIONS.register("SequenceMeanTokenMean")
def sequence_mean_token_mean(per_token: Tensor, mask: Tensor, counts: GlobalCounts) -> Tensor:
    """Average over the tokens of each sequence, then over sequences (GRPO, arXiv:2402.03300 eq. 3).

    Every sequence weighs the same, whatever its length.
    """
    return sequence_mean(per_token, mask).sum() / counts.sequences


@AGGREGATIONS.register("SequenceMeanTokenSumNorm")
def sequence_mean_token_sum_norm(per_token: Tensor, mask: Tensor, counts: GlobalCounts) -> Tensor:
    """Divide the sum over tokens by a constant length and average over sequences (Dr. GRPO, arXiv:2503.20783).

    The length is `counts.max_tokens`, not the width of the padded batch, which differs between micro-batches.
    """
    return token_sum(per_token, mask) / (counts.sequences * counts.max_tokens)

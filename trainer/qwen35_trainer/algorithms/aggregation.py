"""From losses per token to one number, with global counts.

Every denominator is a count over the whole batch, so the parts need not be equal: the SUM of the results over all
micro-batches and data-parallel ranks is the value of the batch in one piece. An engine that averages gradients over
ranks has to undo the average (multiply by the number of ranks); it never divides by the number of micro-batches.

A sequence without a token to train is not a sequence here: `GlobalCounts.sequences` leaves it out.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from .masking import sequence_mean, token_sum
from .registry import Registry


@dataclass(frozen=True)
class GlobalCounts:
    """What one update divides by: counts over all its micro-batches and data-parallel ranks.

    Raises ValueError, naming all of them, for counts below 1: a batch that trains nothing has no update.
    """

    tokens: int
    """Tokens whose mask is 1."""
    sequences: int
    """Sequences with at least one such token."""
    max_tokens: int
    """The constant length of SequenceMeanTokenSumNorm: the longest response allowed, in tokens."""

    def __post_init__(self) -> None:
        empty = [f"{name} {value}" for name, value in vars(self).items() if value < 1]
        if empty:
            raise ValueError(f"global counts below 1: {', '.join(empty)}. Skip the update of a batch without tokens.")

    @classmethod
    def of(cls, mask: Tensor, max_tokens: int) -> "GlobalCounts":
        """Counts of a whole batch's `mask` (N, T)."""
        trained = mask.bool()
        return cls(int(trained.sum()), int(trained.any(dim=-1).sum()), max_tokens)


type Aggregation = Callable[[Tensor, Tensor, GlobalCounts], Tensor]

AGGREGATIONS: Registry[Aggregation] = Registry("aggregation")


def aggregate(name: str) -> Aggregation:
    """The aggregation called `name`: (per_token (N, T), mask (N, T), counts) -> scalar. ValueError if unknown."""
    return AGGREGATIONS.get(name)


@AGGREGATIONS.register("TokenMean")
def token_mean(per_token: Tensor, mask: Tensor, counts: GlobalCounts) -> Tensor:
    """Every token weighs the same (DAPO, arXiv:2503.14476): long sequences weigh more."""
    return token_sum(per_token, mask) / counts.tokens


@AGGREGATIONS.register("SequenceMeanTokenSum")
def sequence_mean_token_sum(per_token: Tensor, mask: Tensor, counts: GlobalCounts) -> Tensor:
    """Sum over tokens, mean over sequences: the policy gradient as written, scale grows with length."""
    return token_sum(per_token, mask) / counts.sequences


@AGGREGATIONS.register("SequenceMeanTokenMean")
def sequence_mean_token_mean(per_token: Tensor, mask: Tensor, counts: GlobalCounts) -> Tensor:
    """Mean over a sequence's tokens, then over sequences: each sequence weighs the same (GRPO, arXiv:2402.03300 eq. 3)."""
    return sequence_mean(per_token, mask).sum() / counts.sequences


@AGGREGATIONS.register("SequenceMeanTokenSumNorm")
def sequence_mean_token_sum_norm(per_token: Tensor, mask: Tensor, counts: GlobalCounts) -> Tensor:
    """Sum over tokens divided by a constant length, mean over sequences (Dr. GRPO, arXiv:2503.20783).

    The length is `counts.max_tokens`, not the width of the padded batch: that differs between micro-batches.
    """
    return token_sum(per_token, mask) / (counts.sequences * counts.max_tokens)

"""Counts of a batch that one micro-batch on one rank holds as a whole."""

from torch import Tensor

from qwen35_trainer.algorithms.aggregation import GlobalCounts


def counts_of(mask: Tensor, max_tokens: int) -> GlobalCounts:
    """Count the tokens and sequences in `mask` (N, T) that train."""
    trained = mask.bool()
    return GlobalCounts(int(trained.sum()), int(trained.any(dim=-1).sum()), max_tokens)

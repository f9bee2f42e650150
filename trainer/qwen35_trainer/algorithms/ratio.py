"""The importance ratio: the probability of a sampled token under one policy over its probability under another."""

from torch import Tensor

from qwen35_trainer.algorithms.masking import zero_padding

MAX_LOG_RATIO = 20.0
"""Bound of the logarithm of a ratio, in nats: exp(±20) is 5e8 and 2e-9. A larger ratio would add no information, and
its overflow would turn a loss into NaN. verl has the same bound."""


def log_ratio(numerator: Tensor, denominator: Tensor, mask: Tensor) -> Tensor:
    """Return the logarithm of the probability ratio of each token, clamped to ±MAX_LOG_RATIO; 0 on padding.

    numerator, denominator: log-probabilities. All tensors are (N, T), N sequences of up to T tokens. Clamped
    values have no gradient.
    """
    difference = zero_padding(numerator, mask) - zero_padding(denominator, mask)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

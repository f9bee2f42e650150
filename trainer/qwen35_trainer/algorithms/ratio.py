"""The probability ratio of two policies on the tokens that were sampled."""

from torch import Tensor

from .masking import zero_padding

LOG_RATIO_BOUND = 20.0
"""exp(±20) is 2e-9 and 5e8: beyond it a ratio says no more, and overflow would turn a loss into NaN. As in verl."""


def log_ratio(numerator: Tensor, denominator: Tensor, mask: Tensor) -> Tensor:
    """(N, T) difference of two log-probabilities, held to ±LOG_RATIO_BOUND (no gradient beyond). Padding: 0."""
    difference = zero_padding(numerator, mask) - zero_padding(denominator, mask)
    return difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)

"""Adaptive KL coefficient: it rises and falls so that the divergence from the reference model stays near a target.

    a batch trains with coefficient β ─► its mean divergence from the reference model ─► β of the next batch

The driver keeps the coefficient, sends it with every batch, and saves it in checkpoints. This module does not import
torch, so that the driver can use it.
"""

MAX_ERROR = 0.2
"""Bound on |divergence / target - 1|, the error that adapts the KL coefficient (arXiv:1909.08593)."""


def adapted(coefficient: float, *, divergence: float, target: float, samples: int, horizon: int) -> float:
    """Return the KL coefficient of the next batch (Ziegler et al., arXiv:1909.08593 section 2.2).

    The result is coefficient · (1 + clip(divergence / target - 1, -0.2, 0.2) · min(samples / horizon, 1)): the
    coefficient grows while the divergence is above the target, and falls while it is below.

    divergence: mean over the last batch, in nats per token.
    samples: number of samples of the last batch.
    horizon: number of samples over which the coefficient changes by at most about 20 %.

    The paper multiplies the clipped error by a constant 0.1. The factor samples / horizon comes from
    the paper's published code.
    """
    error = min(max(divergence / target - 1, -MAX_ERROR), MAX_ERROR)
    return coefficient * (1 + error * min(samples / horizon, 1.0))

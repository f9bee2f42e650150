"""The KL coefficient that follows a target divergence. This module does not import torch, so that the driver can use it.

    batch with coefficient β ─► trained ─► mean divergence from the reference model ─► β of the next batch

The driver keeps the coefficient, gives it to every batch, and saves it in checkpoints.
"""

MAX_ERROR = 0.2
"""Bound of the relative distance from the target that the controller acts on, as in the paper."""


def adapted(coefficient: float, *, divergence: float, target: float, samples: int, horizon: int) -> float:
    """Return the KL coefficient of the next batch (Ziegler et al., arXiv:1909.08593 section 2.2).

    coefficient·(1 + clip(divergence / target - 1, -0.2, 0.2)·samples / horizon): the coefficient grows while the divergence is above
    the target, and falls while it is below. divergence: mean of the last batch, in nats per token. samples: number of samples of
    that batch. horizon: number of samples after which the coefficient has changed by at most 20 %. The paper has a gain of 0.1 for
    each batch; the gain samples / horizon is that of its code. A batch larger than the horizon counts as one horizon.
    """
    error = min(max(divergence / target - 1, -MAX_ERROR), MAX_ERROR)
    return coefficient * (1 + error * min(samples / horizon, 1.0))

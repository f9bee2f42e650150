"""The learning rate of each update."""

from __future__ import annotations

import math

from qwen35_trainer.spec import Optimizer


def learning_rate(optimizer: Optimizer, update: int, total: int) -> float:
    """Of update number `update` (from 0) of `total`: linear warm-up, then the schedule towards its floor.

    Update u of w in the warm-up has (u + 1) / w of the peak, so that none is spent at 0; the update after the last would
    have the floor.
    """
    peak, warmup = optimizer.learningRate, optimizer.warmupUpdates
    if update < warmup:
        return peak * (update + 1) / warmup
    progress = (update - warmup) / max(1, total - warmup)
    match optimizer.schedule:
        case "Constant":
            remaining = 1.0
        case "Linear":
            remaining = 1.0 - progress
        case "Cosine":
            remaining = 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (optimizer.minLearningRateRatio + (1.0 - optimizer.minLearningRateRatio) * remaining)

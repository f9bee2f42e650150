"""Verifiable rewards: built from the spec, run so that no scorer can stop a training by hanging or crashing.

Nothing here imports torch.
"""

from qwen35_trainer.rewards.base import (
    Completion,
    Reward,
    RewardError,
    RewardFailed,
    RewardSetupError,
    RewardTimeoutError,
    Score,
)
from qwen35_trainer.rewards.build import build_scorer, needs_answers
from qwen35_trainer.rewards.scorer import Scored, Scorer

__all__ = [
    "Completion",
    "Reward",
    "RewardError",
    "RewardFailed",
    "RewardSetupError",
    "RewardTimeoutError",
    "Score",
    "Scored",
    "Scorer",
    "build_scorer",
    "needs_answers",
]

"""The penalty for responses that come close to the length limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from qwen35_trainer.rewards.reward import CombinedScore

if TYPE_CHECKING:  # pydantic, which the processes of rewards do not need
    from qwen35_trainer.manifest.algorithm import OverlongPenaltySpec


def overlong_penalty(tokens: int, *, limit: int, buffer: int, weight: float) -> float:
    """Return the number to add to the reward of a response: DAPO's soft overlong punishment (arXiv:2503.14476 eq. 13).

    It is 0 up to `limit - buffer` tokens, and falls linearly from there to -weight at `limit`. tokens: length of the response.
    limit: maximum length of a response. buffer: number of tokens before the limit in which the penalty grows.
    """
    return -weight * max(0, tokens - (limit - buffer)) / buffer


def with_overlong_penalty(
    scores: Sequence[CombinedScore], lengths: Sequence[int], limit: int, settings: OverlongPenaltySpec | None
) -> tuple[CombinedScore, ...]:
    """Add the penalty to the rewards of a group. Responses without a reward stay without one.

    lengths: number of tokens of each response. limit: maximum length of a response. settings: None: there is no penalty.
    """
    if settings is None:
        return tuple(scores)
    penalties = [
        overlong_penalty(length, limit=limit, buffer=settings.bufferTokens, weight=settings.weight)
        for length in lengths
    ]
    return tuple(
        score if score.value is None else replace(score, value=score.value + penalty)
        for score, penalty in zip(scores, penalties, strict=True)
    )

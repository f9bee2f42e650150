"""Overlong penalty: responses that come close to the length limit lose reward (DAPO's soft overlong punishment)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from qwen35_trainer.rewards.reward import CombinedScore

if TYPE_CHECKING:  # pydantic, which the processes of rewards do not need
    from qwen35_trainer.manifest.algorithm import OverlongPenaltySpec


def overlong_penalty(tokens: int, *, limit: int, buffer: int, weight: float) -> float:
    """Return the number to add to the reward of a response: DAPO's soft overlong punishment (arXiv:2503.14476 eq. 13).

    The number is 0 up to `limit - buffer` tokens, and falls linearly from there to -weight at `limit`.

    tokens: length of the response.
    limit: maximum length of a response.
    buffer: number of tokens before the limit over which the penalty grows.
    """
    return -weight * max(0, tokens - (limit - buffer)) / buffer


def with_overlong_penalty(
    scores: Sequence[CombinedScore], lengths: Sequence[int], limit: int, settings: OverlongPenaltySpec | None
) -> tuple[CombinedScore, ...]:
    """Return the scores of a group with the overlong penalty added to each reward.

    A response without a reward (value None) still has none. lengths: number of tokens of each response. limit: maximum
    length of a response. settings: None means no penalty.
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

"""Decides whether a straggler moves to a replica of the straggler lane. Pure arithmetic on measured times.

A straggler that moves has its prompt and its tokens computed a second time, by prefill in the lane, which delays the
sequences that the replica generates already. It also makes their steps longer. A straggler moves if it gains more than all
of this costs:

    remaining · (step here − step there)  >  prefill · (n + 1)  +  remaining · (step there − step there before) · n  +  hand-over

n: number of sequences on the replica of the lane. Each step is measured in seconds, at the present number of sequences
or, for `step there`, with the straggler. Because the times are measured, replicas of any size and kind can be compared.
Without the delay of the n sequences in the sum, a lane fills until it is slow, and is worse than none: docs/design/staleness.md
has the figures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from qwen35_trainer.pipeline.replica_times import ReplicaTimes

GROWTH_LIMIT = 2
"""Multiple of the largest number of sequences with which a replica's steps were measured, up to which it takes stragglers."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """A sequence that may move to the lane."""

    prompt_tokens: int
    tokens: int
    """Number of response tokens so far."""
    remaining: float
    """Expected number of tokens until the sequence ends."""


def gained_seconds(straggler: Straggler, here: ReplicaTimes, there: ReplicaTimes, *, held: int, taken: int) -> float:
    """Return how many seconds a move gains: those by which the straggler finishes sooner, minus the delay of others.

    here, held: the replica that generates it, and the number of sequences there, including the straggler.
    there, taken: a replica of the lane, and the number of sequences there, without the straggler.
    The result is −∞ if the steps of `here` were not measured, and otherwise ∞ if those of `there` were not: the replica
    is measured by means of one straggler (`sequence_limit`).
    """
    if not here.is_measured:
        return -math.inf
    if not there.is_measured:
        return math.inf
    step = there.step_seconds(taken + 1)
    saved = straggler.remaining * (here.step_seconds(held) - step)
    slower = straggler.remaining * max(0.0, step - there.step_seconds(taken)) * taken
    prefill = (straggler.prompt_tokens + straggler.tokens) * there.prefill_seconds_per_token
    return saved - slower - prefill * (taken + 1) - here.hand_over_seconds


def sequence_limit(times: ReplicaTimes) -> int:
    """Return the maximum number of sequences that a replica of the lane may hold after a straggler has moved there.

    The limit is GROWTH_LIMIT times the largest number of sequences with which its steps were measured, and 1 before any
    measurement: nothing is known about its steps with many more sequences than it has had.
    """
    return max(1, math.floor(GROWTH_LIMIT * times.largest))

"""Decides whether a straggler (a long sequence) moves to a replica of the straggler lane, from measured times only.

A move costs time. The lane prefills the straggler's prompt and tokens a second time, during which the n sequences that
the replica of the lane already generates wait. Their later steps take longer. A straggler moves if it gains more:

    remaining · (step here − step there)  >  prefill · (n + 1)  +  remaining · (step there − step there before) · n  +  hand-over

remaining           expected number of tokens that the straggler still gains
step here           seconds of a decoding step on the present replica of the straggler
step there          seconds of a step on the replica of the lane with the straggler, so with n + 1 sequences
step there before   seconds of a step on the replica of the lane without the straggler, so with n sequences
prefill             seconds to prefill the straggler's prompt and tokens in the lane
hand-over           seconds until the present replica has given up the straggler

Replicas of any size and kind can be compared, because all times are measured. If the delay of the n sequences were left
out, the lane would fill until it is slow, and would be worse than no lane: docs/design/staleness.md has the figures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from qwen35_trainer.pipeline.replica_times import ReplicaTimes

GROWTH_LIMIT = 2
"""A replica of the lane takes stragglers up to this factor times the largest number of sequences in a measured step."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """A long sequence that may move to the straggler lane, whose replicas decode faster."""

    prompt_tokens: int
    tokens: int
    """Number of response tokens so far."""
    remaining: float
    """Expected number of tokens until the sequence ends."""


def gained_seconds(straggler: Straggler, here: ReplicaTimes, there: ReplicaTimes, *, held: int, taken: int) -> float:
    """Return the seconds that a move to the lane saves the straggler, minus the delays of other sequences.

    here: times of the straggler's present replica. held: number of sequences on this replica, including the straggler.
    there: times of a replica of the lane. taken: number of sequences on that replica, without the straggler.
    Returns −∞ if no step of `here` was measured. Otherwise returns ∞ if no step of `there` was measured: then one
    straggler (`sequence_limit`) moves to that replica, so that steps of the replica can be measured.
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
    """Return the maximum number of sequences on a replica of the straggler lane, including a sequence that moves there.

    The limit is GROWTH_LIMIT times the largest number of sequences with which steps of the replica were measured, and 1
    before any measurement. Nothing is known about steps with many more sequences.
    """
    return max(1, math.floor(GROWTH_LIMIT * times.largest))

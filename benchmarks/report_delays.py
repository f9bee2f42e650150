"""Computes how long reports of trainers took to reach the statuses of their trainings, from what trainers and a watch have noted.

    report answered ──► the operator may show it ──► a watch brings a status with it, or with a later one
                 │          │                              │
                 │          └── delay of the numbers ──────┤
                 └───────────── delay of a checkpoint ─────┘

The operator shows a checkpoint immediately, so its delay begins when the API server has answered the report. It copies the
numbers of a training only once per interval, which begins at the `status.progress.time` of the copy before. The delay of
numbers therefore begins at the end of that interval, or at the answer if that is later.

All times are those of one clock of this machine, in seconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from benchmarks.observer import Copy, Json, spread


class Delay(NamedTuple):
    """The delay of one report. answered: when the API server had answered it."""

    answered: float
    seconds: float


def checkpoint_delays(answered: Mapping[int, float], copies: Sequence[tuple[float, int]]) -> list[Delay]:
    """Return the delays of a training's checkpoints that were shown.

    answered: when each was reported, by its update. copies: when which update was first shown, in their order.
    """
    updates = [update for _, update in copies]
    places = {update: bisect_left(updates, update) for update in answered}
    return [
        Delay(answered[update], max(0.0, copies[place][0] - answered[update]))
        for update, place in places.items()
        if place < len(copies)
    ]


def number_delays(answered: Mapping[int, float], copies: Sequence[Copy], interval: float) -> list[Delay]:
    """Return the delays of a training's numbers that were shown, each by a copy of these or of later ones."""
    updates = [copy.update for copy in copies]
    delays = []
    for update, at in answered.items():
        place = bisect_left(updates, update)
        if place == len(copies):
            continue
        due = at if place == 0 else max(at, copies[place - 1].written + interval)
        delays.append(Delay(at, max(0.0, copies[place].at - due)))
    return delays


def spread_of(delays: Sequence[Delay]) -> Json:
    """Return count and percentiles of the delays, in seconds."""
    return spread([delay.seconds for delay in delays]) if delays else {"count": 0}


def windows(delays: Sequence[Delay], began: float, seconds: float, length: float) -> list[Json]:
    """Return the spread of the delays in each window of this length, by the time of the answer. The last one may be shorter."""
    spreads = []
    for start in range(0, round(seconds), round(length)):
        inside = [delay for delay in delays if start <= delay.answered - began < start + length]
        spreads.append({"fromSecond": start} | spread_of(inside))
    return spreads


def without(delays: Sequence[Delay], first: float, last: float) -> list[Delay]:
    """Return the delays of reports that were answered before `first` or after `last`."""
    return [delay for delay in delays if not first <= delay.answered <= last]


def growth(values: Sequence[float]) -> float:
    """Return the maximum of the last third of the values over that of the first third; 1 or less means that they do not grow."""
    third = max(1, len(values) // 3)
    return max(values[-third:]) / max(values[:third])


def at_share(values: Sequence[float], share: float) -> float:
    """Return the value at this share of a series, from 0 to 1: the last one of the first `share`, or the first one."""
    return values[max(0, round(share * len(values)) - 1)]

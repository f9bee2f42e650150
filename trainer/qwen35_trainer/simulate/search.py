"""The best of a grid's plans, by few and short simulations.

    arithmetic ─► the splits that leave little idle, the least count knob that can fill them
        │
        ▼ with no lane, and with one of each size
    the two best ─► steps in one thing at a time, first wide, then narrow
        │
        ▼
    the greatest effective throughput ─► down with the count knob, then with the age knob, within 2 %

Deterministic: equal manifests give equal plans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from qwen35_trainer.simulate.analytic import estimate
from qwen35_trainer.simulate.changes import LoadRefused
from qwen35_trainer.simulate.grid import Grid, Point
from qwen35_trainer.simulate.trials import Trial, Trials

SLACK: Final = 0.02
"""Of the greatest throughput: what may be given for a smaller lag."""
NOISE: Final = 0.005
"""Of the throughput: a smaller gain is no step."""
SPLITS: Final = 4
"""Splits to start from."""
PROMISING: Final = 0.6
"""Of the greatest ideal throughput: a split of less is no start."""
SHARE_OF_BOUND: Final = 0.6
"""Of the age knob: the greatest count knob to start from. At the whole of it there is nothing left to schedule."""
STARTS: Final = 2
"""To climb from."""
SAME_LAG: Final = 0.1
"""Versions: mean lags that are as good as one."""


def search(grid: Grid, trials: Trials) -> Trial:
    """The plan of greatest throughput that climbing finds. Raises LoadRefused when none can be simulated."""

    def score(point: Point) -> float:
        result = trials.short(grid.choice(point))
        return -1.0 if result is None else result.effective_throughput

    starts = sorted(_starts(grid, trials), key=score, reverse=True)
    for start in starts[:STARTS]:
        climb(start, grid.sizes, score)
    trials.short(grid.start)
    if not (played := trials.played(long=False)):
        raise LoadRefused(["no plan of this manifest can be simulated: every one is refused by the spec's own rules"])
    return preferred(played)


def _starts(grid: Grid, trials: Trials) -> list[Point]:
    """Where arithmetic says to look: some splits, each with no lane and with the smallest lane of each size."""
    estimates = [estimate(trials.load(grid.start.with_split(nodes))) for nodes in grid.splits]
    ideal = max(each.ideal for each in estimates)
    busy = [place for place, each in enumerate(estimates) if each.ideal >= PROMISING * ideal]
    splits = {busy[i * (len(busy) - 1) // (SPLITS - 1)] for i in range(SPLITS)}
    middle = len(grid.after_tokens) // 2
    points: list[Point] = []
    for split in sorted(splits):
        # As much as fills the pools, and yet enough below the age knob to have a choice.
        least = min(estimates[split].least_staleness, SHARE_OF_BOUND * grid.start.max_version_lag)
        threshold = sum(each < least for each in grid.thresholds)
        lanes = [(0, 0)]
        for size in range(len(grid.lane_sizes)):
            points_of_size = ((split, threshold, nodes, size, middle) for nodes in range(1, len(grid.lane_nodes)))
            lanes += [(point[2], size) for point in points_of_size if trials.legal(grid.choice(point))][:1]
        points += [(split, threshold, nodes, size, middle) for nodes, size in lanes]
    return points


def climb(start: Point, sizes: Point, score: Callable[[Point], float]) -> Point:
    """The best point that steps along one axis at a time lead to; steps halve when none leads up (pattern search)."""
    best, height = start, score(start)
    steps = [max(1, size // 4) for size in sizes]
    while True:
        moved = False
        for axis, step in enumerate(steps):
            for place in (best[axis] - step, best[axis] + step):
                if not 0 <= place < sizes[axis]:
                    continue
                there = (*best[:axis], place, *best[axis + 1 :])
                if (value := score(there)) > max(height, 0.0) * (1 + NOISE):
                    best, height, moved = there, value, True
        if not moved and max(steps) == 1:
            return best
        if not moved:
            steps = [max(1, step // 2) for step in steps]


def less_lag(best: Trial, grid: Grid, trials: Trials) -> Trial:
    """Smaller knobs as long as the throughput stays within the slack: first the count, then the age."""
    least, most = 0, sum(threshold < best.choice.staleness_threshold for threshold in grid.thresholds)
    while least < most:
        middle = (least + most) // 2
        result = trials.short(replace(best.choice, staleness_threshold=grid.thresholds[middle]))
        enough = result is not None and result.effective_throughput >= _enough(trials.played(long=False))
        least, most = (least, middle) if enough else (middle + 1, most)
    fresh = preferred(trials.played(long=False))
    for lag in range(fresh.choice.max_version_lag - 1, -1, -1):
        if lag < fresh.choice.staleness_threshold:
            break
        result = trials.short(replace(fresh.choice, max_version_lag=lag))
        if result is None or result.effective_throughput < _enough(trials.played(long=False)):
            break
    return preferred(trials.played(long=False))


def preferred(trials: Sequence[Trial]) -> Trial:
    """Of those within the slack of the greatest throughput: the smallest mean lag, then the lower bound, then no lane."""
    enough = _enough(trials)
    near = [trial for trial in trials if trial.result.effective_throughput >= enough]
    least = min(trial.result.mean_lag for trial in near)
    return min(
        (trial for trial in near if trial.result.mean_lag <= least + SAME_LAG),
        key=lambda trial: (
            trial.choice.max_version_lag,
            trial.choice.lane is not None,
            -trial.result.effective_throughput,
        ),
    )


def _enough(trials: Sequence[Trial]) -> float:
    return (1 - SLACK) * max(trial.result.effective_throughput for trial in trials)

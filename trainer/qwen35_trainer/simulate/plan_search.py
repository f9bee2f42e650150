"""The search for the best plan of a grid, with a small number of short simulations.

    analytic estimate ─► splits with little idle time, and the minimum staleness threshold that can keep them busy
        │
        ▼ without a lane, and with a lane of each size
    the MAX_CLIMBS best ─► pattern search: steps along one axis at a time, first large, then small
        │
        ▼
    the maximum effective throughput ─► lower staleness threshold, then lower maximum lag, within THROUGHPUT_TOLERANCE

The search is deterministic: equal manifests give equal plans.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from qwen35_trainer.manifest.training import TrainingSpec
from qwen35_trainer.simulate.field_changes import FieldChange, WorkloadRefused, apply_changes
from qwen35_trainer.simulate.manifest_workload import HardwareSpeeds, workload_of
from qwen35_trainer.simulate.plan_choice import GridPoint, PlanChoice, PlanGrid
from qwen35_trainer.simulate.response_lengths import BLOCK_PROMPTS, GroupSampler, LengthDistribution
from qwen35_trainer.simulate.simulation_result import SimulationResult
from qwen35_trainer.simulate.sweep import simulate_seeds
from qwen35_trainer.simulate.workload import Workload

THROUGHPUT_TOLERANCE: Final = 0.02
"""Share of the maximum throughput that the planner may give up for a plan with a smaller lag."""
MIN_RELATIVE_GAIN: Final = 0.005
"""Minimum relative increase of the throughput for which the search takes a step."""
MAX_STARTING_SPLITS: Final = 4
"""Maximum number of splits into rollout and train nodes from which the search starts."""
MIN_IDEAL_SHARE: Final = 0.6
"""Minimum ideal throughput of a split from which the search starts, as a share of the best split's ideal throughput."""
MAX_STARTING_THRESHOLD_SHARE: Final = 0.6
"""Maximum staleness threshold at the start of the search, as a share of the maximum lag.

If the threshold were equal to the maximum lag, the scheduler would have no choice which groups a batch takes.
"""
MAX_CLIMBS: Final = 2
"""Maximum number of points from which pattern search starts: those with the highest throughput."""
LAG_TOLERANCE_VERSIONS: Final = 0.1
"""Mean lags that differ by at most this many versions count as equal."""


@dataclass(frozen=True)
class Estimate:
    """An analytic estimate of a workload's throughput, from which the search starts.
    Rates are in tokens per unit of time.

    A group occupies one of the (1 + s)·P·K places of the window from its dispatch until the version trained on it is
    published. By Little's law, X(s) ≤ min(X*, (1 + s)·P·K·G·m / (W + t)).

        X(s)   the throughput with staleness threshold s
        X*     the throughput of the slower pool if it is always busy
        P      groups per batch
        K      batches per version
        G      sequences per group
        m      mean tokens per sequence
        W      the decoding time of the longest sequence of a group
        t      the time of a batch and a publication

    The estimate is an upper bound, because it leaves out the time that sequences wait for slots and that batches wait
    for due groups. At s ≥ 2 it is within a quarter of the simulated throughput. At lower s it is too optimistic.
    """

    rollout: float
    """Tokens that the rollout pool generates per unit of time if all slots are occupied."""
    trainer: float
    """Tokens that the train pool trains per unit of time if it is always busy."""
    group_time: float
    """Time from the dispatch of a group to the publication of the version trained on it, if
    the group waits for nothing: W + t."""
    version_tokens: float
    """Mean number of tokens in all batches of one version: P·K·G·m."""

    @property
    def ideal(self) -> float:
        """The throughput of the slower pool if it is always busy (X*), in tokens per unit of time."""
        return min(self.rollout, self.trainer)

    def throughput(self, staleness_threshold: float) -> float:
        """Return the estimated maximum throughput with a staleness threshold, X(s), in tokens per unit of time.

        staleness_threshold: in versions.
        """
        return min(self.ideal, (1 + staleness_threshold) * self.version_tokens / self.group_time)

    @property
    def min_staleness(self) -> float:
        """The minimum staleness threshold, in versions, with which the slower pool can be always busy."""
        return max(0.0, self.ideal * self.group_time / self.version_tokens - 1)


def estimate(workload: Workload) -> Estimate:
    """Return an analytic estimate of a workload's throughput, without simulating it.

    Faults, the drift of lengths, prefill and changes of the pool's size are ignored.
    """
    mean, longest = _lengths(workload.lengths, workload.group_size, workload.correlation, workload.seed)
    replicas, trainer = workload.replicas, workload.train_pool
    rollout = sum(replica.tokens_per_second for replica in replicas)
    if workload.lane is not None:
        rollout += workload.lane.replicas * workload.lane.replica.tokens_per_second
    batch = trainer.seconds(workload.prompts_per_batch * workload.group_size * mean)
    batch += workload.publication.copy / workload.batches_per_version
    rate = workload.prompts_per_batch * workload.group_size * mean / batch
    step = sum(replica.step(replica.slots) for replica in replicas) / len(replicas)
    latency = (workload.turns.count - 1) * workload.turns.latency
    publication = workload.publication.transfer + workload.publication.pause + workload.scoring_latency
    return Estimate(
        rollout,
        rate,
        longest * step + latency + batch + publication,
        workload.prompts_per_batch * workload.group_size * workload.batches_per_version * mean,
    )


@lru_cache(maxsize=8)  # a search estimates every split of the nodes with the same lengths
def _lengths(lengths: LengthDistribution, group_size: int, correlation: float, seed: int) -> tuple[float, float]:
    """Return the mean number of tokens of a sequence, and the mean number of tokens of the longest sequence of a group.

    Both are means over BLOCK_PROMPTS sampled groups.
    """
    sampler = GroupSampler(lengths, group_size, correlation, 1.0, 1.0, seed)
    groups = [sampler.draw(position, 0)[0] for position in range(BLOCK_PROMPTS)]
    tokens = sum(map(sum, groups))
    return tokens / (BLOCK_PROMPTS * group_size), sum(map(max, groups)) / BLOCK_PROMPTS


def search(grid: PlanGrid, trials: Trials) -> Trial:
    """Search a grid by pattern search, and return the best plan that was simulated, as `preferred` selects it.

    Raises WorkloadRefused if no plan can be simulated.
    """

    def score(point: GridPoint) -> float:
        result = trials.short(grid.choice(point))
        return -1.0 if result is None else result.effective_throughput

    starts = sorted(_starts(grid, trials), key=score, reverse=True)
    for start in starts[:MAX_CLIMBS]:
        climb(start, grid.sizes, score)
    trials.short(grid.start)
    if not (simulated := trials.simulated(long=False)):
        raise WorkloadRefused(["no plan of this manifest can be simulated: the rules of the spec refuse all of them"])
    return preferred(simulated)


def _starts(grid: PlanGrid, trials: Trials) -> list[GridPoint]:
    """Return the points of the grid from which the search starts, which the analytic estimate chooses.

    The points cover a few splits of the nodes. Each split has one point without a lane, and one point for each number
    of devices that a replica of the lane can have, with the minimum legal number of lane nodes.
    """
    estimates = [estimate(trials.workload(grid.start.with_split(nodes))) for nodes in grid.splits]
    ideal = max(split_estimate.ideal for split_estimate in estimates)
    busy = [index for index, split in enumerate(estimates) if split.ideal >= MIN_IDEAL_SHARE * ideal]
    splits = {busy[i * (len(busy) - 1) // (MAX_STARTING_SPLITS - 1)] for i in range(MAX_STARTING_SPLITS)}
    middle = len(grid.after_tokens) // 2
    points: list[GridPoint] = []
    for split in sorted(splits):
        # High enough to keep the pools busy, and low enough that the scheduler has a choice.
        lowest = min(estimates[split].min_staleness, MAX_STARTING_THRESHOLD_SHARE * grid.start.max_version_lag)
        threshold = sum(value < lowest for value in grid.thresholds)
        lanes = [(0, 0)]
        for size in range(len(grid.lane_sizes)):
            points_of_size = ((split, threshold, nodes, size, middle) for nodes in range(1, len(grid.lane_nodes)))
            lanes += [(point[2], size) for point in points_of_size if trials.is_legal(grid.choice(point))][:1]
        points += [(split, threshold, nodes, size, middle) for nodes, size in lanes]
    return points


def climb(start: GridPoint, sizes: GridPoint, score: Callable[[GridPoint], float]) -> GridPoint:
    """Return the point with the highest score that pattern search from `start` finds.

    The search moves along one axis at a time to a point whose score is higher by more than MIN_RELATIVE_GAIN. When
    there is no such point, the search halves its steps. sizes: number of points along each axis.
    """
    best, best_score = start, score(start)
    steps = [max(1, size // 4) for size in sizes]
    while True:
        moved = False
        for axis, step in enumerate(steps):
            for place in (best[axis] - step, best[axis] + step):
                if not 0 <= place < sizes[axis]:
                    continue
                candidate = (*best[:axis], place, *best[axis + 1 :])
                if (value := score(candidate)) > max(best_score, 0.0) * (1 + MIN_RELATIVE_GAIN):
                    best, best_score, moved = candidate, value, True
        if not moved and max(steps) == 1:
            return best
        if not moved:
            steps = [max(1, step // 2) for step in steps]


def reduce_lag(best: Trial, grid: PlanGrid, trials: Trials) -> Trial:
    """Try lower staleness thresholds for the plan `best`, then lower maximum lags for the best plan so far.

    Returns the plan that `preferred` selects from all short simulations. Its throughput is within THROUGHPUT_TOLERANCE
    of their maximum.
    """
    low, high = 0, sum(threshold < best.choice.staleness_threshold for threshold in grid.thresholds)
    while low < high:
        middle = (low + high) // 2
        result = trials.short(replace(best.choice, staleness_threshold=grid.thresholds[middle]))
        enough = result is not None and result.effective_throughput >= _min_throughput(trials.simulated(long=False))
        low, high = (low, middle) if enough else (middle + 1, high)
    plan = preferred(trials.simulated(long=False))
    for lag in range(plan.choice.max_version_lag - 1, -1, -1):
        if lag < plan.choice.staleness_threshold:
            break
        result = trials.short(replace(plan.choice, max_version_lag=lag))
        if result is None or result.effective_throughput < _min_throughput(trials.simulated(long=False)):
            break
    return preferred(trials.simulated(long=False))


def preferred(trials: Sequence[Trial]) -> Trial:
    """Return the best of the trials whose throughput is within THROUGHPUT_TOLERANCE of the maximum.

    The best trials have the lowest mean lag; mean lags within LAG_TOLERANCE_VERSIONS of the minimum count as equal. Of
    these trials, the best has the lowest maximum lag, then no lane, then the highest throughput.
    """
    min_throughput = _min_throughput(trials)
    near = [trial for trial in trials if trial.result.effective_throughput >= min_throughput]
    min_lag = min(trial.result.mean_lag for trial in near)
    return min(
        (trial for trial in near if trial.result.mean_lag <= min_lag + LAG_TOLERANCE_VERSIONS),
        key=lambda trial: (
            trial.choice.max_version_lag,
            trial.choice.lane is not None,
            -trial.result.effective_throughput,
        ),
    )


def _min_throughput(trials: Sequence[Trial]) -> float:
    return (1 - THROUGHPUT_TOLERANCE) * max(trial.result.effective_throughput for trial in trials)


@dataclass(frozen=True)
class Trial:
    """A plan and the result of its simulation."""

    choice: PlanChoice
    result: SimulationResult


class Trials:
    """Simulates plans and keeps their results.

    Short simulations find good plans, and long simulations compare them. Each plan has at most one short and one long
    simulation.
    """

    def __init__(
        self,
        spec: TrainingSpec,
        speeds: HardwareSpeeds,
        changes: Sequence[FieldChange],
        limit: int,
        on_simulated: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare the simulation of plans.

        changes: applied to every workload. limit: number of simulations, short or long, after which `short` simulates
        no further plan. on_simulated: called after each simulation.
        """
        self._spec, self._speeds, self._changes, self._limit, self._on_simulated = (
            spec,
            speeds,
            changes,
            limit,
            on_simulated,
        )
        self._results: dict[tuple[PlanChoice, bool], SimulationResult | None] = {}
        self.simulations = 0
        """Number of simulations so far, short and long."""

    def workload(self, choice: PlanChoice) -> Workload:
        """Return the workload of a plan, with the default number of batches.

        Raises WorkloadRefused for an invalid workload.
        """
        return apply_changes(workload_of(choice.apply(self._spec), self._speeds), self._changes)

    def is_legal(self, choice: PlanChoice) -> bool:
        """Return whether a plan is legal for the manifest (`PlanChoice.is_legal`)."""
        return choice.is_legal(self._spec)

    def short(self, choice: PlanChoice) -> SimulationResult | None:
        """Return the result of a short simulation of a plan.

        Returns None if the plan is not legal or cannot be simulated, or if the limit of
        simulations was reached before the plan was simulated.
        """
        if (choice, False) not in self._results and self.simulations >= self._limit:
            return None
        return self._result(choice, long=False)

    def long(self, choice: PlanChoice) -> SimulationResult | None:
        """Return the result of a long simulation of a plan, for comparison with other plans.

        Returns None if the plan is not legal or cannot be simulated.
        """
        return self._result(choice, long=True)

    def simulated(self, *, long: bool) -> list[Trial]:
        """Return the plans that have been simulated, with their results, in the order of simulation.

        long: whether to return the results of long simulations; otherwise the results of short simulations.
        """
        results = ((choice, result) for (choice, was_long), result in self._results.items() if was_long == long)
        return [Trial(choice, result) for choice, result in results if result is not None]

    def _result(self, choice: PlanChoice, *, long: bool) -> SimulationResult | None:
        key = (choice, long)
        if key not in self._results:
            self._results[key] = self._simulate(choice, long=long)
        return self._results[key]

    def _simulate(self, choice: PlanChoice, *, long: bool) -> SimulationResult | None:
        if not self.is_legal(choice):
            return None
        try:
            workload = self.workload(choice)
            (result,) = simulate_seeds(_long(workload) if long else _short(workload), 1, self._on_simulated)
        except WorkloadRefused:
            return None
        self.simulations += 1
        return result


def _short(workload: Workload) -> Workload:
    """Return the workload with the duration of a short simulation, which is enough to find good plans."""
    return _of_length(workload, sequences=6_000, min_versions=8, max_versions=24)


def _long(workload: Workload) -> Workload:
    """Return the workload with the duration of a long simulation, which is enough to compare good plans."""
    return _of_length(workload, sequences=16_000, min_versions=16, max_versions=50)


def _of_length(workload: Workload, *, sequences: int, min_versions: int, max_versions: int) -> Workload:
    """Return the workload with a duration in which about `sequences` sequences are measured.

    The measured batches are those of whole versions. Before them, a warm-up fills the window twice.
    """
    versions = sequences / (workload.prompts_per_batch * workload.group_size * workload.batches_per_version)
    measured = max(min_versions, min(max_versions, math.ceil(versions))) * workload.batches_per_version
    warm_up = math.ceil(2 * (1 + workload.settings.window.staleness_threshold)) * workload.batches_per_version
    return replace(workload, batches=warm_up + measured, warm_up=warm_up)

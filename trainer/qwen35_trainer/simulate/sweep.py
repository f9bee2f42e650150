"""Sweeps: simulations of every combination of values of some fields, each averaged over seeds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from statistics import fmean
from typing import Any

from qwen35_trainer.simulate.field_changes import ChangeRefused, FieldChange, WorkloadRefused, apply_changes
from qwen35_trainer.simulate.simulation import simulate
from qwen35_trainer.simulate.simulation_result import SimulationResult
from qwen35_trainer.simulate.workload import Workload

MAX_ROWS = 1000


@dataclass(frozen=True)
class SweepAxis:
    """A field of the workload, and the values that the field has in a sweep."""

    key: str
    """Path of the field, or its short name."""
    values: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> SweepAxis:
        """Parse an axis of the form `KEY=a,b,c`.

        A repeated value counts once. Raises ChangeRefused for text of any other form.
        """
        key, equals, text_values = text.partition("=")
        values = tuple(value.strip() for value in text_values.split(","))
        if not equals or not all(values):
            raise ChangeRefused([f"--sweep {text}: write KEY=a,b,c without empty values"])
        return cls(key.strip(), tuple(dict.fromkeys(values)))


@dataclass(frozen=True)
class SweepRow:
    """One combination of values in a sweep: a value for each axis, and a result for each seed."""

    values: tuple[str, ...]
    workload: Workload
    runs: tuple[SimulationResult, ...]

    @property
    def result(self) -> SimulationResult:
        """The result of the combination, averaged over the seeds."""
        return average(self.runs)


@dataclass(frozen=True)
class SkippedCombination:
    """A combination of values in a sweep that cannot be simulated, and the reasons."""

    values: tuple[str, ...]
    problems: tuple[str, ...]


def simulate_seeds(
    workload: Workload, seeds: int, on_simulated: Callable[[], None] = lambda: None
) -> tuple[SimulationResult, ...]:
    """Simulate a workload with `seeds` consecutive seeds, beginning with the seed of the
    workload. Returns a result for each seed.

    on_simulated: called after each simulation. Raises WorkloadRefused if a run cannot end.
    """
    results = []
    for seed in range(workload.seed, workload.seed + seeds):
        try:
            results.append(simulate(replace(workload, seed=seed)))
        except ValueError as error:
            raise WorkloadRefused(str(error).split("; ")) from error
        on_simulated()
    return tuple(results)


def combinations(
    workload: Workload, changes: Sequence[FieldChange], axes: Sequence[SweepAxis]
) -> tuple[list[tuple[tuple[str, ...], Workload]], list[SkippedCombination]]:
    """Return the valid combinations of a sweep, each as (values, workload), and the invalid ones.

    changes: applied to every combination. The values are in the order of `axes`. A combination is invalid if, for
    example, its staleness threshold is above its maximum lag. Raises WorkloadRefused if all combinations are invalid,
    if a name or a value is wrong, or if there are more than MAX_ROWS combinations.
    """
    _check(axes)
    workloads: list[tuple[tuple[str, ...], Workload]] = []
    skipped: list[SkippedCombination] = []
    unreadable: dict[str, None] = {}
    for values in itertools.product(*(axis.values for axis in axes)):
        swept = [FieldChange(axis.key, value) for axis, value in zip(axes, values, strict=True)]
        try:
            workloads.append((values, apply_changes(workload, [*changes, *swept])))
        except ChangeRefused as error:
            unreadable |= dict.fromkeys(error.problems)
        except WorkloadRefused as error:
            skipped.append(SkippedCombination(values, error.problems))
    if unreadable:
        raise ChangeRefused(tuple(unreadable))
    if not workloads:
        raise WorkloadRefused(list(dict.fromkeys(problem for item in skipped for problem in item.problems)))
    return workloads, skipped


def average(results: Sequence[SimulationResult]) -> SimulationResult:
    """Return the results of several seeds as one result.

    Measures whose name begins with max_ are combined by the maximum. Numbers of groups, publications, lost replicas, moves
    and events are added up. All other measures are averaged. An optional measure is None if any seed does not have it.
    """
    if len(results) == 1:
        return results[0]
    joined: dict[str, Any] = {measure.name: _joined(measure.name, results) for measure in fields(SimulationResult)}
    return SimulationResult(**joined)


_SUMMED = {"publications", "lost_replicas", "moves", "events"}


def _joined(name: str, results: Sequence[SimulationResult]) -> object:
    values = [getattr(result, name) for result in results]
    if name == "lag_histogram":
        return tuple(map(sum, itertools.zip_longest(*values, fillvalue=0)))
    if name == "exits":
        return {reason: sum(exits.get(reason, 0) for exits in values) for reason in values[0]}
    if any(value is None for value in values):
        return None
    if name in _SUMMED:
        return sum(values)
    return max(values) if name.startswith("max_") else fmean(values)


def _check(axes: Sequence[SweepAxis]) -> None:
    paths = [FieldChange(axis.key, "").segments for axis in axes]
    problems = [f"--sweep {axis.key}: is swept twice" for i, axis in enumerate(axes) if paths[i] in paths[:i]]
    if (rows := math.prod(len(axis.values) for axis in axes)) > MAX_ROWS:
        problems.append(f"the sweep has {rows} rows, more than {MAX_ROWS}; leave out values")
    if problems:
        raise ChangeRefused(problems)

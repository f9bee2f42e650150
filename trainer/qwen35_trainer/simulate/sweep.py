"""A table of simulations: every combination of the values of some fields, each averaged over seeds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from statistics import fmean
from typing import Any

from qwen35_trainer.simulate.changes import Change, ChangeRefused, LoadRefused, changed
from qwen35_trainer.simulate.load import Load
from qwen35_trainer.simulate.result import Result
from qwen35_trainer.simulate.run import simulate

MOST_ROWS = 1000


@dataclass(frozen=True)
class Axis:
    """A field of the load, and the values that it takes in turn."""

    key: str
    values: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Axis:
        """From `KEY=a,b,c`. Raises ChangeRefused."""
        key, equals, written = text.partition("=")
        values = tuple(value.strip() for value in written.split(","))
        if not equals or not all(values):
            raise ChangeRefused([f"--sweep {text}: write KEY=a,b,c, with a value at every place"])
        return cls(key.strip(), tuple(dict.fromkeys(values)))


@dataclass(frozen=True)
class Row:
    """One combination: a value for each axis, and what came of it, seed by seed."""

    values: tuple[str, ...]
    load: Load
    runs: tuple[Result, ...]

    @property
    def result(self) -> Result:
        """The mean over the seeds."""
        return average(self.runs)


@dataclass(frozen=True)
class LeftOut:
    """A combination that cannot be simulated, and why."""

    values: tuple[str, ...]
    problems: tuple[str, ...]


def run(load: Load, seeds: int, told: Callable[[], None] = lambda: None) -> tuple[Result, ...]:
    """The load with its seed and those after it. Raises LoadRefused. told: called after each."""
    results = []
    for seed in range(load.seed, load.seed + seeds):
        try:
            results.append(simulate(replace(load, seed=seed)))
        except ValueError as error:
            raise LoadRefused(str(error).split("; ")) from error
        told()
    return tuple(results)


def combinations(
    load: Load, changes: Sequence[Change], axes: Sequence[Axis]
) -> tuple[list[tuple[tuple[str, ...], Load]], list[LeftOut]]:
    """The loads of a table, and the combinations that are none, such as a count knob above the age knob.

    Raises LoadRefused when none is left, when a name or a value cannot be read, or when there are too many.
    """
    _check(axes)
    loads: list[tuple[tuple[str, ...], Load]] = []
    left_out: list[LeftOut] = []
    unreadable: dict[str, None] = {}
    for values in itertools.product(*(axis.values for axis in axes)):
        chosen = [Change(axis.key, value) for axis, value in zip(axes, values, strict=True)]
        try:
            loads.append((values, changed(load, [*changes, *chosen])))
        except ChangeRefused as error:
            unreadable |= dict.fromkeys(error.problems)
        except LoadRefused as error:
            left_out.append(LeftOut(values, error.problems))
    if unreadable:
        raise ChangeRefused(tuple(unreadable))
    if not loads:
        raise LoadRefused(list(dict.fromkeys(problem for each in left_out for problem in each.problems)))
    return loads, left_out


def average(results: Sequence[Result]) -> Result:
    """One result for several seeds: the greatest of the greatest lags, sums of counts, means of the rest."""
    if len(results) == 1:
        return results[0]
    joined: dict[str, Any] = {each.name: _joined(each.name, results) for each in fields(Result)}
    return Result(**joined)


_SUMS = {"publications", "lost_engines", "moves", "events"}


def _joined(name: str, results: Sequence[Result]) -> object:
    values = [getattr(result, name) for result in results]
    if name == "lag_histogram":
        return tuple(map(sum, itertools.zip_longest(*values, fillvalue=0)))
    if name == "exits":
        return {reason: sum(each.get(reason, 0) for each in values) for reason in values[0]}
    if any(value is None for value in values):
        return None
    if name in _SUMS:
        return sum(values)
    return max(values) if name.startswith("max_") else fmean(values)


def _check(axes: Sequence[Axis]) -> None:
    fields_ = [Change(axis.key, "").segments for axis in axes]
    problems = [f"--sweep {axis.key}: is swept twice" for i, axis in enumerate(axes) if fields_[i] in fields_[:i]]
    if (rows := math.prod(len(axis.values) for axis in axes)) > MOST_ROWS:
        problems.append(f"the sweep has {rows} rows, more than {MOST_ROWS}; leave out values")
    if problems:
        raise ChangeRefused(problems)

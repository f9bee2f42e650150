"""Compares how runs learn: by the reward (SFT: the loss) of updates, and by held-out measures of evaluations.

    by update   mean of the reward over each of up to PARTS equal parts of the updates that all runs have;
                held-out measures after up to PARTS of the updates after which all runs were evaluated
    by time     mean of the reward over each of PARTS equal parts of the compared time;
                held-out measures of the latest evaluation before the end of each part.
                The compared time ends with the last update of the run that trained for the shortest time
    target      the update and the time at which each run first reached a common target.
                Each run has a best held-out value, and the target is the worst of these, so all runs have reached it

These are plain means and values. No confidence interval and no statistical significance is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Final

from qwen35_trainer.comparison.compared_run import ComparedRun
from qwen35_trainer.comparison.row import ComparedRow, RowSection, whole, with_values
from qwen35_trainer.formatting import count, duration, number, percent
from qwen35_trainer.progress.held_out import accuracy_is_meaningful, reward_is_meaningful
from qwen35_trainer.progress.records import EvaluationRecord, UpdateRecord

PARTS: Final = 4
"""Maximum number of rows for a measure in the section by update, and in the section by time."""


@dataclass(frozen=True)
class Measure[R: UpdateRecord | EvaluationRecord]:
    """A measure that is compared, such as the reward: a number for each update record or each evaluation record."""

    name: str
    value: Callable[[R], float | None]
    """Returns the measure of a record; None if the record does not have it."""
    text: Callable[[float | None], str] = number
    """Formats a value for a cell."""
    falls: bool = False
    """Whether smaller values are better."""

    def points(self, records: Iterable[R]) -> list[tuple[R, float]]:
        """Return (record, value) for each record that has a finite value."""
        pairs = ((record, self.value(record)) for record in records)
        return [(record, value) for record, value in pairs if value is not None and math.isfinite(value)]


@dataclass(frozen=True)
class Reach:
    """The range of updates that all runs have trained, and the range of time over which runs are compared."""

    first: int
    """Number of the first update that all runs have."""
    last: int
    """Number of the last update that all runs have. Below `first` if the runs have no common update."""
    start: float
    """Earliest time at which a run began its first update, in seconds since its training first started."""
    seconds: float
    """Time of the last update of the run that has trained for the shortest time, in
    seconds since its training first started."""

    @property
    def updates(self) -> list[tuple[int, int]]:
        """Up to PARTS nearly equal parts of the common updates, each as (first, last) update.

        Empty if the runs have no common update.
        """
        length = self.last - self.first + 1
        parts = min(PARTS, max(0, length))
        edges = [self.first + length * part // parts for part in range(parts)] + [self.last + 1]
        return [(edges[part], edges[part + 1] - 1) for part in range(parts)]

    @property
    def times(self) -> list[tuple[float, float]]:
        """PARTS equal parts of the compared time, each as (start, end) in seconds. Empty if a run has no update."""
        length = self.seconds - self.start
        ends = [self.start + length * part / PARTS for part in range(PARTS + 1)]
        return list(pairwise(ends)) if length > 0 else []


def reach(runs: Sequence[ComparedRun]) -> Reach:
    """Return the range of updates that all runs have, and the range of time over which the runs are compared.

    Both ranges are empty if a run has no update.
    """
    if any(not run.updates for run in runs):
        return Reach(1, 0, 0.0, 0.0)
    begun, ended = [run.updates[0] for run in runs], [run.updates[-1] for run in runs]
    return Reach(
        max(update.update for update in begun),
        min(update.update for update in ended),
        max(0.0, min(update.time - update.seconds for update in begun)),
        min(update.time for update in ended),
    )


def update_measures(runs: Sequence[ComparedRun]) -> list[Measure[UpdateRecord]]:
    """Return the only measure of updates that is compared: the reward, or the loss if a run has no rewards (SFT)."""
    loss = Measure[UpdateRecord]("loss", lambda update: update.loss, falls=True)
    rewards = [any(update.reward_mean is not None for update in run.updates) for run in runs if run.updates]
    return [Measure("reward", lambda update: update.reward_mean)] if all(rewards) else [loss]


def evaluation_measures(runs: Sequence[ComparedRun]) -> list[Measure[EvaluationRecord]]:
    """Return the held-out measures to compare: accuracy, reward and loss, as far as any run has them.

    Accuracy is included if it is above 0 in some evaluation, or always equals the reward. The reward is left out if
    it always equals the accuracy.
    """
    evaluations = [evaluation for run in runs for evaluation in run.evaluations]
    results = [(each.accuracy, each.reward_mean) for each in evaluations if each.loss is None]
    measures: list[Measure[EvaluationRecord]] = []
    if any(accuracy is not None for accuracy, _ in results) and accuracy_is_meaningful(results):
        measures.append(Measure("held-out accuracy", lambda each: each.accuracy, percent))
    if results and reward_is_meaningful(results):
        measures.append(Measure("held-out reward", lambda each: each.reward_mean))
    if any(each.loss is not None for each in evaluations):
        measures.append(Measure("held-out loss", lambda each: each.loss, falls=True))
    return measures


def learning_sections(runs: Sequence[ComparedRun]) -> list[RowSection]:
    """Return the sections "by update", "by time" and "until a common target". Sections without rows are left out."""
    common = reach(runs)
    seen = [run.within(common.last, common.seconds) for run in runs]
    updates, evaluations = [each for each, _ in seen], [each for _, each in seen]
    by_update, by_time, targets = list[ComparedRow](), list[ComparedRow](), list[ComparedRow]()
    for measure in update_measures(runs):
        points = [measure.points(each) for each in updates]
        by_update += [
            _row(f"{measure.name}, {_span(*part)}", measure, [_mean_of_updates(each, *part) for each in points])
            for part in common.updates
        ]
        by_time += [
            _row(f"{measure.name}, {duration(a)} to {duration(b)}", measure, [_mean_in(each, a, b) for each in points])
            for a, b in common.times
        ]
    for of_evaluation in evaluation_measures(runs):
        points_of = [of_evaluation.points(each) for each in evaluations]
        by_update += [
            _row(f"{of_evaluation.name} after {count(at)}", of_evaluation, [_at(each, at) for each in points_of])
            for at in _common(points_of)
        ]
        by_time += [
            _row(f"{of_evaluation.name} at {duration(end)}", of_evaluation, [_until(each, end) for each in points_of])
            for _, end in common.times
        ]
        targets += _target(of_evaluation, [of_evaluation.points(run.evaluations) for run in runs])
    sections = [
        RowSection("byUpdate", "Learning by update", with_values(by_update)),
        RowSection("byTime", "Learning by time", with_values(by_time)),
        RowSection("target", "Until a common target", tuple(targets)),
    ]
    return [section for section in sections if section.rows]


type _Updates = list[tuple[UpdateRecord, float]]
type _Evaluations = list[tuple[EvaluationRecord, float]]


def _row[R: UpdateRecord | EvaluationRecord](name: str, measure: Measure[R], values: list[float | None]) -> ComparedRow:
    return ComparedRow(name, tuple(values), measure.text)


def _mean_of_updates(points: _Updates, first: int, last: int) -> float | None:
    values = [value for update, value in points if first <= update.update <= last]
    return fmean(values) if values else None


def _mean_in(points: _Updates, start: float, end: float) -> float | None:
    values = [value for update, value in points if start < update.time <= end]
    return fmean(values) if values else None


def _at(points: _Evaluations, update: int) -> float | None:
    return next((value for evaluation, value in points if evaluation.update == update), None)


def _until(points: _Evaluations, seconds: float) -> float | None:
    return next((value for evaluation, value in reversed(points) if evaluation.time <= seconds), None)


def _common(points: Sequence[_Evaluations]) -> list[int]:
    """Return up to PARTS of the updates after which all runs were evaluated: the last one, and
    others at equal distances in this list.
    """
    after = sorted(set.intersection(*({evaluation.update for evaluation, _ in each} for each in points)))
    parts = min(PARTS, len(after))
    return [after[len(after) * (part + 1) // parts - 1] for part in range(parts)]


def _target(measure: Measure[EvaluationRecord], points: Sequence[_Evaluations]) -> list[ComparedRow]:
    """Return the rows with the update and the time at which each run reached the best value that all runs have reached.

    Returns no rows if a run has no evaluation after its first update.
    """
    sign = -1.0 if measure.falls else 1.0
    bests = [max((sign * value for evaluation, value in each if evaluation.update), default=None) for each in points]
    if any(best is None for best in bests):
        return []
    target = min(best for best in bests if best is not None)
    reached = [next(evaluation for evaluation, value in each if sign * value >= target) for each in points]
    name = f"until {measure.name} {measure.text(sign * target)}"
    return [
        ComparedRow(f"{name}: updates", tuple(each.update for each in reached), whole, ratios=True),
        ComparedRow(f"{name}: time", tuple(each.time for each in reached), duration, ratios=True),
    ]


def _span(first: int, last: int) -> str:
    return f"update {count(first)}" if first == last else f"updates {count(first)}–{count(last)}"

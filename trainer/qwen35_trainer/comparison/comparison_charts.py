"""The charts of a comparison. A run has the same colour in every chart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from qwen35_trainer.comparison.compared_run import ComparedRun
from qwen35_trainer.comparison.figures import update_seconds
from qwen35_trainer.comparison.learning import Measure, evaluation_measures, update_measures
from qwen35_trainer.page import Figure
from qwen35_trainer.progress.curves import Chart, Series, axis_title, curve_figure, layout_of, rounded, value_range
from qwen35_trainer.progress.records import EvaluationRecord, UpdateRecord

type Points = Sequence[tuple[UpdateRecord | EvaluationRecord, float]]

_TIME_UNITS: Final = ((2 * 86400, "days", 86400), (2 * 3600, "hours", 3600), (120, "minutes", 60), (0, "seconds", 1))
"""Units of a time axis: (minimum length of the axis in seconds, name of the unit, seconds of the unit), longest unit first."""


def colour(place: int) -> str:
    """Return the name of a run's colour, which the page replaces by a value of its style sheet.

    place: index of the run in the comparison, from 0.
    """
    return f"@run-{place}"


def comparison_charts(runs: Sequence[ComparedRun]) -> list[Chart]:
    """Return the charts of a comparison. A chart is left out if no run has values for it."""
    drawn: list[Chart | None] = []
    for measure in update_measures(runs):
        points = [measure.points(run.updates) for run in runs]
        drawn += [_curves(measure.name, points, by_time=False), _curves(measure.name, points, by_time=True)]
    for of_evaluation in evaluation_measures(runs):
        held_out = [of_evaluation.points(run.evaluations) for run in runs]
        drawn += [
            _curves(of_evaluation.name, held_out, by_time=False),
            _curves(of_evaluation.name, held_out, by_time=True),
        ]
    drawn += [_update_time(runs), _lags(runs)]
    more: tuple[tuple[str, Callable[[UpdateRecord], float | None]], ...] = (
        ("seconds of an update", lambda update: update.seconds or None),
        ("generated tokens per second", lambda update: update.tokens_per_second),
        ("mean lag in versions", lambda update: update.lag_mean),
        ("mean response in tokens", lambda update: update.response_tokens_mean),
        ("seconds of a publication", lambda update: update.seconds_publishing or None),
    )
    for name, value in more:
        drawn.append(_curves(name, [Measure(name, value).points(run.updates) for run in runs], by_time=False))
    return [chart for chart in drawn if chart is not None]


def _curves(name: str, points: Sequence[Points], *, by_time: bool) -> Chart | None:
    """Return a chart with a curve for each run, over updates or over time; None if no run has values."""
    if not any(points):
        return None
    longest = max(record.time for each in points for record, _ in each)
    unit, seconds = next((unit, seconds) for least, unit, seconds in _TIME_UNITS if longest >= least)
    series = [
        Series(
            "",
            colour(place),
            [record.time / seconds if by_time else record.update for record, _ in each],
            [rounded(value) for _, value in each],
            markers=isinstance(each[0][0], EvaluationRecord),
        )
        for place, each in enumerate(points)
        if each
    ]
    limits = value_range([value for line in series for value in line.y], zero="held-out" not in name)
    along = unit if by_time else "update"
    title = f"{name[0].upper()}{name[1:]}"
    return Chart(
        _key(f"{name} {along if not by_time else 'time'}"),
        title,
        f"by {'time' if by_time else along}",
        curve_figure(series, limits, "", along),
    )


def _update_time(runs: Sequence[ComparedRun]) -> Chart | None:
    """Return a bar chart of the mean seconds that each run spends on each part of an update; None if no run has an update."""
    parts = [update_seconds(run) for run in runs]
    names = [name for name in dict.fromkeys(name for each in parts for name in each) if any(p.get(name) for p in parts)]
    return _bars(
        "Time of an update",
        "mean seconds of each part",
        names,
        [[p.get(name, 0.0) for name in names] for p in parts],
        "",
    )


def _lags(runs: Sequence[ComparedRun]) -> Chart | None:
    """Return a bar chart of the share of each run's trained tokens that has each lag; None if no run has trained tokens."""
    tokens = [{int(lag): count for lag, count in run.summary["staleness"].items()} for run in runs]
    lags = range(max((lag for each in tokens for lag in each), default=-1) + 1)
    shares = [[each.get(lag, 0) / max(1, sum(each.values())) for lag in lags] for each in tokens]
    return _bars("Staleness", "share of trained tokens by lag in versions", [str(lag) for lag in lags], shares, ".0%")


def _bars(title: str, note: str, names: Sequence[str], heights: Sequence[Sequence[float]], form: str) -> Chart | None:
    """Return a bar chart with a group of bars for each of `names`, and in a group one bar per run; None if `names` is empty."""
    if not names:
        return None
    data: list[Figure] = [
        {
            "type": "bar",
            "x": list(names),
            "y": [rounded(height) for height in each],
            "marker": {"color": colour(place)},
            "hovertemplate": f"%{{x}}: %{{y:{form or '.4~g'}}}<extra></extra>",
        }
        for place, each in enumerate(heights)
    ]
    layout = layout_of((0.0, max(height for each in heights for height in each) * 1.08 or 1.0), form, right=16)
    layout["barmode"] = "group"
    layout["xaxis"] |= {"type": "category", "title": axis_title("")}
    return Chart(_key(title), title, note, {"data": data, "layout": layout}, "wide")


def _key(title: str) -> str:
    return title.lower().replace(" ", "-")

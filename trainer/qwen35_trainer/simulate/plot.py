"""Draws the results of a simulation or a sweep as an HTML page of charts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Final

from qwen35_trainer.formatting import MISSING, number, percent
from qwen35_trainer.page import Figure, figure_card, render_page, write_page
from qwen35_trainer.simulate.output import describe_workload
from qwen35_trainer.simulate.simulation_result import SimulationResult
from qwen35_trainer.simulate.sweep import SweepAxis, SweepRow
from qwen35_trainer.simulate.workload import Workload

_BODY: Final = Path(__file__).with_suffix(".html")
_STYLE: Final = Path(__file__).with_suffix(".css")
_COLOURS: Final = ("@first", "@second", "@third", "@fourth", "@fifth", "@sixth")
_MAX_TICKS: Final = 10


def write_plot(path: Path, workload: Workload, axes: Sequence[SweepAxis], rows: Sequence[SweepRow]) -> None:
    """Write an HTML page with the charts of a simulation or a sweep to `path`. The file is replaced atomically.

    axes: the axes of the sweep; empty for a single simulation. rows: the results, one row for a single
    simulation. workload: the workload of the first row. Raises OSError if the file cannot be written, and
    ImportError if plotly is not installed.
    """
    write_page(path, _page(workload, axes, rows))


def _page(workload: Workload, axes: Sequence[SweepAxis], rows: Sequence[SweepRow]) -> str:
    figures = _sweep_figures(axes, rows) if axes else _run_figures(rows[0])
    seeds = len(rows[0].runs)
    name = "Sweep of " + " × ".join(axis.key for axis in axes) if axes else "Simulation"
    body = Template(_BODY.read_text(encoding="utf-8")).substitute(
        name=escape(name),
        facts="<br>".join(map(escape, [*(["The first row:"] if axes else []), *describe_workload(workload, seeds)])),
        cards="".join(figure_card(key, title, note) for key, (title, note, _) in figures.items()),
        numbers=_numbers(axes, rows),
    )
    drawn = {key: figure for key, (_, _, figure) in figures.items()}
    return render_page(f"{name} · qwen35", style=_STYLE.read_text(encoding="utf-8"), body=body, figures=drawn)


type _Figures = dict[str, tuple[str, str, Figure]]  # name: (title, note, figure)


def _run_figures(row: SweepRow) -> _Figures:
    result = row.result
    labels = [f"seed {row.workload.seed + i}" for i in range(len(row.runs))]
    return {
        "throughput": (
            "Throughput against mean lag",
            "effective, per unit of time; a point for each seed",
            _scatter([_points("", "@first", row.runs, labels) | {"mode": "markers"}], row.runs),
        ),
        "lags": (
            "Lag of groups",
            f"share of the trained groups; mean {number(result.mean_lag)} versions",
            _histogram(result, row.workload),
        ),
    }


def _sweep_figures(axes: Sequence[SweepAxis], rows: Sequence[SweepRow]) -> _Figures:
    """Return the charts of a sweep: curves along the axis with the most numbers, or bars if no axis has numbers.

    There is one curve for each combination of values of the other axes.
    """
    numeric = [place for place, axis in enumerate(axes) if _numbers_of(axis)]
    along = max(numeric, key=lambda place: len(axes[place].values)) if numeric else None
    curves: dict[str, list[SweepRow]] = {}
    for row in rows:
        curves.setdefault(", ".join(v for place, v in enumerate(row.values) if place != along), []).append(row)
    styled = [(name, _COLOURS[i % len(_COLOURS)], members) for i, (name, members) in enumerate(curves.items())]
    points = [
        _points(name, colour, [row.result for row in members], [", ".join(row.values) for row in members])
        for name, colour, members in styled
    ]
    note = "effective, per unit of time"
    if along is not None:
        note += f"; along a line: {axes[along].key}"
    figures: _Figures = {
        "throughput": ("Throughput against mean lag", note, _scatter(points, [row.result for row in rows]))
    }
    lines: dict[str, tuple[str, Callable[[SimulationResult], float], str]] = {
        "effective": ("Effective throughput", lambda result: result.effective_throughput, "~g"),
        "maximum-lag": ("Maximum lag of trained tokens", lambda result: result.max_token_lag, "~g"),
        "idle": ("Idle trainer", lambda result: result.train_idle, ".0%"),
    }
    for name, (title, value, form) in lines.items():
        figure = _bars(styled, value, form) if along is None else _lines(styled, axes[along], along, value, form)
        figures[name] = (title, "" if along is None else f"by {axes[along].key}", figure)
    return figures


type _Styled = Sequence[tuple[str, str, list[SweepRow]]]  # name, colour, rows


def _lines(
    styled: _Styled, axis: SweepAxis, place: int, value: Callable[[SimulationResult], float], form: str
) -> Figure:
    numbers = _numbers_of(axis)
    traces = [
        _trace(name, colour, [numbers[row.values[place]] for row in members], [value(row.result) for row in members])
        for name, colour, members in styled
    ]
    layout = _layout(axis.key, "", form, len(traces))
    if len(numbers) <= _MAX_TICKS:
        layout["xaxis"] |= {"tickvals": sorted(numbers.values())}
    return {"data": traces, "layout": layout}


def _bars(styled: _Styled, value: Callable[[SimulationResult], float], form: str) -> Figure:
    traces = [
        {"type": "bar", "name": name, "x": [name], "y": [value(members[0].result)], "marker": {"color": colour}}
        for name, colour, members in styled
    ]
    return {"data": traces, "layout": _layout("", "", form, 1) | {"showlegend": False}}


def _points(name: str, colour: str, results: Sequence[SimulationResult], labels: Sequence[str]) -> Figure:
    lags, heights = [result.mean_lag for result in results], [result.effective_throughput for result in results]
    texts = [f"{label}: {number(y)} at {number(x)}" for label, x, y in zip(labels, lags, heights, strict=True)]
    return _trace(name, colour, lags, heights) | {"hovertext": texts, "hoverinfo": "text"}


def _trace(name: str, colour: str, x: Sequence[float], y: Sequence[float]) -> Figure:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": list(x),
        "y": list(y),
        "line": {"color": colour, "width": 2},
        "marker": {"color": colour, "size": 8, "line": {"color": "@card", "width": 1.5}},
        "cliponaxis": False,
    }


def _scatter(traces: list[Figure], results: Sequence[SimulationResult]) -> Figure:
    """Return a chart of effective throughput against mean lag.

    A line shows the ideal throughput, if all results have the same ideal throughput.
    """
    layout = _layout("mean lag of groups, in versions", "", "~g", len(traces))
    ideals = [result.ideal_throughput for result in results]
    layout["xaxis"]["rangemode"] = "tozero"
    layout["yaxis"]["range"] = [0, max(ideals + [result.effective_throughput for result in results]) * 1.15]
    if max(ideals) < min(ideals) * 1.01:
        line = {"color": "@bound", "width": 1.5, "dash": "dot"}
        text = {"xref": "paper", "x": 1, "y": ideals[0], "text": f"ideal {number(ideals[0])}", "showarrow": False}
        layout["shapes"] = [
            {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": ideals[0], "y1": ideals[0], "line": line}
        ]
        layout["annotations"] = [
            text | {"xanchor": "right", "yanchor": "bottom", "font": {"color": "@bound", "size": 12}}
        ]
    return {"data": traces, "layout": layout}


def _histogram(result: SimulationResult, workload: Workload) -> Figure:
    total = sum(result.lag_histogram) or 1
    shares = [count / total for count in result.lag_histogram]
    bars = {
        "type": "bar",
        "x": list(range(len(shares))),
        "y": shares,
        "marker": {"color": "@first"},
        "width": 0.72,
        "text": [percent(share) if share else "" for share in shares],
        "textposition": "outside",
        "cliponaxis": False,
        "hovertemplate": "lag %{x}: %{y:.1%}<extra></extra>",
    }
    layout = _layout("lag in versions", "", ".0%", 1)
    bound = workload.settings.window.max_version_lag
    layout["xaxis"] |= {"dtick": max(1, len(shares) // 8), "range": [-0.6, max(len(shares) - 1, bound) + 0.85]}
    layout["yaxis"]["range"] = [0, max(shares, default=1.0) * 1.22 or 1.0]
    return {"data": [bars], "layout": layout}


def _layout(x: str, y: str, form: str, traces: int) -> Figure:
    def title(text: str) -> Figure:
        return {"text": text, "font": {"size": 12, "color": "@muted"}, "standoff": 6}

    common = {"color": "@muted", "zeroline": False, "ticks": "outside", "ticklen": 4, "tickcolor": "@grid"}
    return {
        "margin": {"l": 60, "r": 18, "t": 12, "b": 44 if traces == 1 else 76},
        "xaxis": common | {"title": title(x), "showgrid": False, "showline": True, "linecolor": "@axis"},
        "yaxis": common | {"title": title(y), "gridcolor": "@grid", "tickformat": form, "rangemode": "tozero"},
        "showlegend": traces > 1,
        "legend": {"orientation": "h", "x": 0, "y": -0.18, "yanchor": "top", "font": {"color": "@ink", "size": 12}},
        "hovermode": "closest",
    }


def _numbers_of(axis: SweepAxis) -> dict[str, float]:
    """Return value → number for each value of an axis. The result is empty if any value is not a number."""
    try:
        numbers = {value: float(value) for value in axis.values}
    except ValueError:
        return {}
    return numbers if all(map(math.isfinite, numbers.values())) else {}


def _numbers(axes: Sequence[SweepAxis], rows: Sequence[SweepRow]) -> str:
    """Return a table of all measures, with one column per row of the sweep."""
    columns = [row.result.as_dict() for row in rows]
    heads = "".join(f"<th>{escape(', '.join(row.values))}</th>" for row in rows) if axes else "<th></th>"
    lines = [f"<tr><th>{escape(', '.join(axis.key for axis in axes))}</th>{heads}</tr>"]
    for key in columns[0]:
        cells = "".join(f"<td>{escape(_cell(column[key]))}</td>" for column in columns)
        lines.append(f"<tr><th>{escape(key)}</th>{cells}</tr>")
    return "".join(lines)


def _cell(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {count}" for key, count in value.items())
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return f"{value:,.6g}" if isinstance(value, float) else MISSING if value is None else str(value)

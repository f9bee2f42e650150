"""Builds plotly figures of curves, for the report of a run and for comparisons of runs.

A colour is a name such as "@rollout". The page replaces the name by a value of its style sheet, light or dark.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from qwen35_trainer.page import Figure

_MIN_LABEL_GAP: Final = 0.085  # share of the axis: names at line ends must not touch
_MAX_MARKED_POINTS: Final = 40  # more markers would hide their line


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure with its caption.

    On a wide page, the size "small" takes a third of the page's width, "wide" takes two thirds, and "full" takes all.
    """

    name: str
    title: str
    note: str
    figure: Figure
    size: str = "small"
    key: tuple[tuple[str, str], ...] = ()
    """Legend, as (colour, name) of each curve, for curves that cannot have their names at their ends."""


@dataclass(frozen=True, slots=True)
class Series:
    """One curve of a figure. The name is shown at the end of the curve, unless the name is empty."""

    name: str
    colour: str
    x: Sequence[float]
    y: Sequence[float | None]
    markers: bool = False
    """Whether the points of the curve are marked, if there are few."""
    thin: bool = False


def rounded(value: float | None) -> float | None:
    """Round a value to the six digits that a chart can show.

    A value that is not finite becomes None, a gap in the curve.
    """
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None


def value_range(values: Sequence[float | None], *, zero: bool) -> tuple[float, float]:
    """Return the range of an axis that shows these values with a margin.

    zero: whether the range begins at 0 if no value is negative.
    """
    numbers = [value for value in values if value is not None] or [0.0]
    low, high = min(numbers), max(numbers)
    if zero and low >= 0:
        return 0.0, high * 1.08 or 1.0
    pad = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    return low - pad, high + pad


def curve_figure(series: Sequence[Series], limits: tuple[float, float], form: str, along: str = "update") -> Figure:
    """Return a plotly figure with one curve for each series.

    limits: range of the vertical axis. form: plotly's format of the numbers on that axis. along: title of the
    horizontal axis, which has whole numbers if the title is "update".
    """
    named = any(line.name for line in series)
    layout = layout_of(limits, form, right=68 if named else 16)
    places = [place for line in series for place in line.x]
    first, last = min(places), max(places)
    layout["xaxis"] |= {
        "title": axis_title(along),
        "range": [first - 0.5, last + 0.5] if first == last else [first, last],
    }
    if along == "update":
        layout["xaxis"] |= {"tickformat": ",d"} | ({"dtick": 1} if last - first < 6 else {"nticks": 8})
    layout["annotations"] = _end_labels(series, limits)
    return {"data": [_trace(line, along) for line in series], "layout": layout}


def _trace(line: Series, along: str) -> Figure:
    alone = len(line.x) < 2
    return {
        "type": "scatter",
        "mode": "lines+markers" if alone or (line.markers and len(line.x) <= _MAX_MARKED_POINTS) else "lines",
        "x": list(line.x),
        "y": list(line.y),
        "name": line.name,
        "opacity": 0.4 if line.thin else 1,
        "line": {"color": line.colour, "width": 1.25 if line.thin else 2},
        "marker": {"color": line.colour, "size": 8, "line": {"color": "@card", "width": 1.5}},
        "cliponaxis": False,
        "hovertemplate": f"{along} %{{x:.6~g}}: %{{y:.4~g}}<extra>{line.name}</extra>",
    }


def _end_labels(series: Sequence[Series], limits: tuple[float, float]) -> list[Figure]:
    """Return the labels at the ends of the lines that have a name. Labels that would overlap are moved apart."""
    low, high = limits
    ends = [(line, next((y for y in reversed(line.y) if y is not None), None)) for line in series if line.name]
    placed: list[Figure] = []
    floor = -math.inf
    for line, end in sorted(((line, end) for line, end in ends if end is not None), key=lambda pair: pair[1]):
        place = max((end - low) / (high - low), floor + _MIN_LABEL_GAP)
        floor = place
        placed.append(
            {
                "x": 1,
                "xref": "paper",
                "y": place,
                "yref": "paper",
                "text": line.name,
                "showarrow": False,
                "xanchor": "left",
                "xshift": 9,
                "opacity": 0.65 if line.thin else 1,
                "font": {"color": line.colour, "size": 12.5},
            }
        )
    return placed


def layout_of(limits: tuple[float, float], form: str, *, right: int) -> Figure:
    """Return the plotly layout that charts of curves and charts of bars have in common.

    limits: range of the vertical axis. form: plotly's format of the numbers on that axis. right: right
    margin in pixels.
    """
    return {
        "margin": {"l": 52, "r": right, "t": 10, "b": 40},
        "xaxis": {"color": "@muted", "showgrid": False, "zeroline": False, "ticks": "outside", "tickcolor": "@grid"}
        | {"showline": True, "linecolor": "@axis", "ticklen": 4, "fixedrange": False},
        "yaxis": _axis(limits) | {"tickformat": form or "~g"},
        "hovermode": "closest",
        "showlegend": False,
    }


def _axis(limits: tuple[float, float]) -> Figure:
    return {
        "color": "@muted",
        "range": list(limits),
        "gridcolor": "@grid",
        "zerolinecolor": "@axis",
        "zeroline": limits[0] < 0 < limits[1],
        "nticks": 5,
        "showline": False,
        "ticks": "outside",
        "tickcolor": "rgba(0,0,0,0)",
        "ticklen": 6,
    }


def axis_title(text: str) -> Figure:
    """Return the title of an axis."""
    return {"text": text, "font": {"size": 12, "color": "@muted"}, "standoff": 6}

"""Draws the timeline of the report, with a row (lane) for each replica, for the train pool and for other activities."""

import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final

from qwen35_trainer.formatting import duration
from qwen35_trainer.page import Figure
from qwen35_trainer.progress.curves import Chart
from qwen35_trainer.progress.records import SpanKind, SpanRecord
from qwen35_trainer.progress.span_budget import joined

_COLOURS: Final[dict[SpanKind, str]] = {
    "load": "@load",
    "generate": "@rollout",
    "train": "@train",
    "publish": "@publish",
    "evaluate": "@accuracy",
    "checkpoint": "@checkpoint",
    "turn": "@muted",
}
_ADJACENT: Final = frozenset({"generate", "train"})
"""Kinds of spans that can follow each other without a gap. A thin line separates their bars."""
_POOLS: Final = ("rollout", "train", "publish")
_MAX_SPANS_DRAWN: Final = 3000
_ROW_HEIGHT_PIXELS: Final = 26
_BAR_WIDTH: Final = 0.72
"""Height of the bar of a busy lane, as a share of the height of its row."""
_MIN_BAR_WIDTH: Final = 0.06


def timeline_charts(latest: Collection[SpanRecord], whole: Sequence[SpanRecord]) -> list[Chart]:
    """Draw the last part of a run span by span. If the run has earlier spans, also draw an overview of the whole run.

    latest: the last spans of the run, or all of them. whole: the spans of the whole run, in order of their start; in a
    long run, spans are joined (`coarse_spans.py`).
    """
    if not latest:
        return []
    drawn = recent(merge(list(latest)), _MAX_SPANS_DRAWN)
    begin, end = _limits(drawn)
    note = "drag to zoom, double-click to see all"
    if not whole or begin <= whole[0].start:
        return [_timeline("timeline", "Timeline", note, drawn)]
    overview_note = "spans are joined; a bar is as thick as the share of its time in which the lane was busy"
    return [
        _timeline("timeline-whole-run", "Timeline of the whole run", overview_note, whole),
        _timeline("timeline", "Timeline", f"the last {duration(end - begin)}; {note}", drawn),
    ]


def _limits(spans: Sequence[SpanRecord]) -> tuple[float, float]:
    return min(span.start for span in spans), max(span.end for span in spans)


def _timeline(name: str, title: str, note: str, drawn: Sequence[SpanRecord]) -> Chart:
    """Draw a timeline with one row per lane and one bar per span."""
    begin, end = _limits(drawn)
    lanes = sorted({span.lane for span in drawn}, key=_lane_order)
    unit, seconds = _unit(end - begin)
    data = [_bars(kind, [span for span in drawn if span.kind == kind], seconds) for kind in _COLOURS]
    layout: Figure = {
        "barmode": "overlay",
        "bargap": 1 - _BAR_WIDTH,
        "height": 64 + _ROW_HEIGHT_PIXELS * len(lanes),
        "margin": {"l": 84, "r": 16, "t": 6, "b": 40},
        "showlegend": False,
        "hovermode": "closest",
        "xaxis": {
            "color": "@muted",
            "gridcolor": "@grid",
            "zeroline": False,
            "nticks": 14,
            "range": [begin / seconds, end / seconds],
            "title": {
                "text": f"time since the start ({unit})",
                "font": {"size": 12, "color": "@muted"},
                "standoff": 6,
            },
        },
        "yaxis": {
            "color": "@ink",
            "categoryorder": "array",
            "categoryarray": lanes,
            "autorange": "reversed",
            "showgrid": False,
            "fixedrange": True,
            "tickfont": {"size": 12},
            "ticksuffix": " ",
        },
    }
    kinds = {span.kind for span in drawn}
    return Chart(
        name,
        title,
        note,
        {"data": [trace for trace in data if trace["x"]], "layout": layout},
        "full",
        tuple((colour, kind) for kind, colour in _COLOURS.items() if kind in kinds),
    )


def merge(spans: Sequence[SpanRecord]) -> list[SpanRecord]:
    """Join overlapping spans of the same lane (row) and kind, because their bars would hide each other.

    Returns the spans in order of their start.
    """
    rows: dict[tuple[str, SpanKind], list[SpanRecord]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.start):
        row = rows[span.lane, span.kind]
        if row and span.start < row[-1].end:
            row[-1] = joined(row[-1], span)
        else:
            row.append(span)
    return sorted((span for row in rows.values() for span in row), key=lambda span: span.start)


def recent(spans: Sequence[SpanRecord], limit: int) -> list[SpanRecord]:
    """Return the latest spans: those that end after the time at which the `limit`-th span from the end begins.

    A span that begins before this time is shortened, so that it begins at this time. spans: in order of their start. If
    there are at most `limit` spans, all are returned unchanged.
    """
    if len(spans) <= limit:
        return list(spans)
    begin = spans[-limit].start
    return [replace(span, start=max(begin, span.start)) for span in spans if span.end > begin]


def _bars(kind: SpanKind, spans: Sequence[SpanRecord], seconds: float) -> Figure:
    bars: Figure = {
        "type": "bar",
        "orientation": "h",
        "name": kind,
        "y": [span.lane for span in spans],
        "base": [round(span.start / seconds, 4) for span in spans],
        "x": [round((span.end - span.start) / seconds, 4) for span in spans],
        "marker": {"color": _COLOURS[kind], "line": {"color": "@card", "width": 0.6 if kind in _ADJACENT else 0}},
        "customdata": [_description(span) for span in spans],
        "hovertemplate": f"{kind} %{{customdata}}<extra>%{{y}}</extra>",
    }
    if any(span.busy is not None for span in spans):
        bars["width"] = [round(max(_MIN_BAR_WIDTH, _BAR_WIDTH * _busy_share(span)), 3) for span in spans]
    return bars


def _description(span: SpanRecord) -> str:
    if span.busy is None:
        return f"{span.label}, {span.end - span.start:.2f} s"
    return f"{span.label}, busy {span.busy:.2f} s of {duration(span.end - span.start)}"


def _busy_share(span: SpanRecord) -> float:
    length = span.end - span.start
    return 1.0 if span.busy is None or length <= 0 else min(1.0, span.busy / length)


def _lane_order(lane: str) -> tuple[int, list[tuple[int, str]]]:
    """Return a sort key for a lane. The order is rollout, train, publish, and then all other lanes.

    Lanes of the same pool are ordered by number, so that rollout-2 comes before rollout-10.
    """
    pool = next((place for place, name in enumerate(_POOLS) if lane.startswith(name)), len(_POOLS))
    return pool, [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", lane)]


def _unit(seconds: float) -> tuple[str, float]:
    return ("s", 1.0) if seconds < 300 else ("min", 60.0) if seconds < 3 * 3600 else ("h", 3600.0)

"""The timeline of the report: what each replica and train rank did when."""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from qwen35_trainer.formatting import duration
from qwen35_trainer.page import Figure
from qwen35_trainer.progress.charts import Chart
from qwen35_trainer.progress.records import SpanKind, SpanRecord

_COLOURS: Final[dict[SpanKind, str]] = {
    "load": "@load",
    "generate": "@rollout",
    "train": "@train",
    "publish": "@publish",
    "evaluate": "@accuracy",
    "checkpoint": "@checkpoint",
}
_ADJACENT: Final = frozenset({"generate", "train"})
"""Kinds whose spans touch each other. A thin line separates them."""
_POOLS: Final = ("rollout", "train", "publish")
_MAX_SPANS_DRAWN: Final = 3000
_ROW_HEIGHT_PIXELS: Final = 26


def timeline_chart(spans: Sequence[SpanRecord]) -> Chart | None:
    """Draw a bar per span and a row per lane. Of a long run, only the last _MAX_SPANS_DRAWN spans are drawn."""
    if not spans:
        return None
    drawn = recent(merge(spans), _MAX_SPANS_DRAWN)
    begin, end = min(span.start for span in drawn), max(span.end for span in drawn)
    whole = end - min(span.start for span in spans)
    part = "" if whole == end - begin else f"the last {duration(end - begin)}; "
    lanes = sorted({span.lane for span in drawn}, key=_lane_order)
    unit, seconds = _unit(end - begin)
    data = [_bars(kind, [span for span in drawn if span.kind == kind], seconds) for kind in _COLOURS]
    layout: Figure = {
        "barmode": "overlay",
        "bargap": 0.28,
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
        "timeline",
        "Timeline",
        f"{part}drag to zoom, double-click to see all",
        {"data": [trace for trace in data if trace["x"]], "layout": layout},
        "full",
        tuple((colour, kind) for kind, colour in _COLOURS.items() if kind in kinds),
    )


def merge(spans: Sequence[SpanRecord]) -> list[SpanRecord]:
    """Join overlapping spans of one lane and kind, whose bars would hide each other. The result is ordered by start."""
    rows: dict[tuple[str, SpanKind], list[SpanRecord]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.start):
        row = rows[span.lane, span.kind]
        if row and span.start < row[-1].end:
            first = row[-1].label.split(" … ")[0]
            label = first if first == span.label else f"{first} … {span.label}"
            row[-1] = replace(row[-1], end=max(row[-1].end, span.end), label=label)
        else:
            row.append(span)
    return sorted((span for row in rows.values() for span in row), key=lambda span: span.start)


def recent(spans: Sequence[SpanRecord], limit: int) -> list[SpanRecord]:
    """Return the last `limit` spans, and the parts of earlier spans that lie in the same period."""
    if len(spans) <= limit:
        return list(spans)
    begin = spans[-limit].start
    return [replace(span, start=max(begin, span.start)) for span in spans if span.end > begin]


def _bars(kind: SpanKind, spans: Sequence[SpanRecord], seconds: float) -> Figure:
    return {
        "type": "bar",
        "orientation": "h",
        "name": kind,
        "y": [span.lane for span in spans],
        "base": [round(span.start / seconds, 4) for span in spans],
        "x": [round((span.end - span.start) / seconds, 4) for span in spans],
        "marker": {"color": _COLOURS[kind], "line": {"color": "@card", "width": 0.6 if kind in _ADJACENT else 0}},
        "customdata": [f"{span.label}, {span.end - span.start:.2f} s" for span in spans],
        "hovertemplate": f"{kind} %{{customdata}}<extra>%{{y}}</extra>",
    }


def _lane_order(lane: str) -> tuple[int, list[tuple[int, str]]]:
    """Return a sort key for a lane: rollout comes first, then train, publish and all others.

    Lanes of the same pool are ordered by number, so that rollout-2 comes before rollout-10.
    """
    pool = next((place for place, name in enumerate(_POOLS) if lane.startswith(name)), len(_POOLS))
    return pool, [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", lane)]


def _unit(seconds: float) -> tuple[str, float]:
    return ("s", 1.0) if seconds < 300 else ("min", 60.0) if seconds < 3 * 3600 else ("h", 3600.0)

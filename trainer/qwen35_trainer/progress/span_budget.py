"""Limits how many lines of a metrics file are spans, however long the run is and however many replicas it has.

    span ─► the file has few spans ─► written as it is
        └─► otherwise ─► joined with the other spans of its lane and kind in this window ─► one line each at the window's end

A span is a time in which a lane (a replica or another row of the timeline) did one thing. The first
LINES_PER_RESOLUTION spans are exact. Then a window is 1 s long, and its length doubles after every further
LINES_PER_RESOLUTION lines, up to 2 ** MAX_DOUBLINGS s (18 hours). Until windows have this length, the file has at most
(MAX_DOUBLINGS + 2) · LINES_PER_RESOLUTION = 360,000 lines of spans, 60 MB:

    lanes   run time   length of a window   lines of spans
    4       a day      16 s                 110,000
    4       a week     64 s                 160,000
    4       a month    512 s                210,000
    66      a day      256 s                190,000
    66      a week     1,024 s              240,000
    66      a month    8,192 s              290,000
    1,002   a day      4,096 s              270,000
    1,002   a week     16,384 s             320,000
    1,002   a month    65,536 s             370,000

Windows reach their maximum length after 20 years with 4 lanes, after 15 months with 66 lanes, and after a month
with 1,002 lanes. After that, each lane adds one line in 18 hours for each kind of its spans. A crash loses only the
spans of the window in which it happens.
"""

from dataclasses import replace
from typing import Final

from qwen35_trainer.progress.records import SpanKind, SpanRecord

LINES_PER_RESOLUTION: Final = 20_000
"""Number of lines of spans after which the length of a window doubles."""
MAX_DOUBLINGS: Final = 16
"""Maximum number of times that the length of a window doubles: windows are at most 2 ** MAX_DOUBLINGS seconds long."""


def window_seconds(lines: int) -> float:
    """Return the length, in seconds, of the time windows in which spans are joined to keep the metrics file small.

    lines: number of lines of spans that the metrics file has already. The result is 0 while there are few lines, and
    spans are then not joined.
    """
    if lines < LINES_PER_RESOLUTION:
        return 0.0
    return float(2 ** min(lines // LINES_PER_RESOLUTION - 1, MAX_DOUBLINGS))


class SpanBudget:
    """Joins spans, the bars of the timeline, so that the metrics file of a long run stays small.

    lines: number of lines with spans that earlier attempts have written to the file.
    """

    def __init__(self, lines: int = 0) -> None:
        self._lines = lines
        self._open: dict[tuple[str, SpanKind], SpanRecord] = {}
        """(lane, kind) → the joined span of the present window, which is not written yet."""
        self._window_end = 0.0

    def add(self, span: SpanRecord) -> list[SpanRecord]:
        """Add a span that has just ended. Returns the spans to write to the file now."""
        seconds = window_seconds(self._lines)
        if seconds == 0.0:
            self._lines += 1
            return [span]
        due: list[SpanRecord] = []
        if span.end >= self._window_end:
            due = self.flush()
            self._window_end = (span.end // seconds + 1) * seconds
        key = span.lane, span.kind
        self._open[key] = joined(self._open[key], span) if key in self._open else span
        return due

    def flush(self) -> list[SpanRecord]:
        """End the present window, and return its joined spans, in order of their start, to be written now."""
        due = sorted(self._open.values(), key=lambda span: span.start)
        self._open.clear()
        self._lines += len(due)
        return [_rounded(span) for span in due]


def busy_seconds(span: SpanRecord) -> float:
    """Return the number of seconds of the span in which its lane (row of the timeline) was busy."""
    return span.end - span.start if span.busy is None else span.busy


def joined(first: SpanRecord, second: SpanRecord) -> SpanRecord:
    """Join two spans of the same lane (row of the timeline) and kind.

    The result lasts from the earlier start to the later end. Its busy time is the sum of the busy times of both spans,
    but at most its duration.
    """
    start, end = min(first.start, second.start), max(first.end, second.end)
    busy = busy_seconds(first) + busy_seconds(second)
    begin, last = first.label.split(" … ")[0], second.label.split(" … ")[-1]
    versions = [span.version for span in (first, second) if span.version is not None]
    return replace(
        first,
        start=start,
        end=end,
        label=begin if begin == last else f"{begin} … {last}",
        version=max(versions, default=None),
        busy=None if busy >= end - start else busy,
    )


def _rounded(span: SpanRecord) -> SpanRecord:
    """Return the span with its times rounded to milliseconds, because more digits would only lengthen its line."""
    busy = None if span.busy is None else round(span.busy, 3)
    return replace(span, start=round(span.start, 3), end=round(span.end, 3), busy=busy)

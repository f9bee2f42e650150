"""Keeps the spans (timed activities) of a whole run in bounded memory.

The first spans of a run are kept as they are. When there are too many, spans that start in the same window of time are
joined. The windows become longer as the run becomes longer.
"""

from collections.abc import Sequence
from typing import Final

from qwen35_trainer.progress.records import SpanKind, SpanRecord
from qwen35_trainer.progress.span_budget import joined

_MIN_WINDOW_SECONDS: Final = 2.0**-6
_MAX_WINDOW_SECONDS: Final = 2.0**26
"""Maximum length of a window: two years, which is longer than a run. At this length, one span is left for each
lane and kind."""


class CoarseSpans:
    """Collects the spans of a run, and joins spans when there are too many.

    When there are more than 2 · `limit` spans, spans of the same lane (row of the timeline) and kind are joined until
    at most `limit` spans are left. At least one span of each lane and kind remains, so the limit may be exceeded.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._spans: list[SpanRecord] = []
        self._next = 2 * limit
        self._window = 0.0

    def add(self, span: SpanRecord) -> None:
        self._spans.append(span)
        if len(self._spans) > self._next:
            self._coarsen()

    @property
    def spans(self) -> list[SpanRecord]:
        """The spans in order of their start. In a long run, spans of the same timeline row and kind are joined."""
        return in_windows(self._spans, self._window)

    def _coarsen(self) -> None:
        while len(self._spans) > self._limit and self._window < _MAX_WINDOW_SECONDS:
            self._window = max(_MIN_WINDOW_SECONDS, 2 * self._window)
            self._spans = in_windows(self._spans, self._window)
        self._next = 2 * max(self._limit, len(self._spans))


def in_windows(spans: Sequence[SpanRecord], seconds: float) -> list[SpanRecord]:
    """Join the spans of the same lane (row of the timeline) and kind that start in the same window of time.

    seconds: length of a window; 0: join no spans. Returns the spans in order of their start.
    """
    ordered = sorted(spans, key=lambda span: span.start)
    if seconds == 0.0:
        return ordered
    windows: dict[tuple[str, SpanKind, float], SpanRecord] = {}
    for span in ordered:
        key = span.lane, span.kind, span.start // seconds
        windows[key] = joined(windows[key], span) if key in windows else span
    return list(windows.values())

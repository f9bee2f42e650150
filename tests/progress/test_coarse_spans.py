from hypothesis import given
from hypothesis import strategies as st

from qwen35_trainer.progress.coarse_spans import CoarseSpans
from qwen35_trainer.progress.records import SpanRecord
from qwen35_trainer.progress.span_budget import busy_seconds


def span(start: float, end: float, lane: int = 0) -> SpanRecord:
    return SpanRecord(lane=f"rollout-{lane}", kind="generate", start=start, end=end)


def coarse(spans: list[SpanRecord], limit: int) -> list[SpanRecord]:
    kept = CoarseSpans(limit)
    for record in spans:
        kept.add(record)
    return kept.spans


def test_few_spans_stay_as_they_are() -> None:
    spans = [span(n, n + 1) for n in range(20)]
    assert coarse(spans, 10) == spans


@given(st.integers(1, 3000), st.integers(1, 5), st.sampled_from([0.125, 3.0, 1000.0]))
def test_many_spans_are_joined_over_the_whole_run_and_keep_their_work(number: int, lanes: int, seconds: float) -> None:
    spans = [span(n * seconds, n * seconds + seconds / 2, n % lanes) for n in range(number)]
    kept = coarse(spans, 50)
    assert len(kept) <= 100
    assert sum(map(busy_seconds, kept)) == sum(map(busy_seconds, spans))
    assert (min(s.start for s in kept), max(s.end for s in kept)) == (0.0, spans[-1].end)
    assert [s.start for s in kept] == sorted(s.start for s in kept)


def test_more_lanes_than_the_limit_keep_one_span_each() -> None:
    spans = [span(n * 1000.0, n * 1000.0 + 500, n % 300) for n in range(3000)]
    assert 300 <= len(coarse(spans, 50)) <= 600

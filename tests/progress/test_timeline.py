from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35_trainer.progress.coarse_spans import CoarseSpans
from qwen35_trainer.progress.records import SpanRecord
from qwen35_trainer.progress.timeline import _busy_share, merge, recent, timeline_charts


def span(start: float, end: float, lane: str = "rollout-0", label: str = "a") -> SpanRecord:
    return SpanRecord(lane=lane, kind="generate", start=start, end=end, label=label)


def covered(spans: list[SpanRecord], lane: str) -> set[int]:
    return {second for s in spans if s.lane == lane for second in range(int(s.start), int(s.end))}


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9), st.sampled_from(["rollout-0", "rollout-1"])), max_size=30)
)
def test_merged_spans_cover_the_same_time_without_overlap(drawn: list[tuple[int, int, str]]) -> None:
    spans = [span(start, start + length, lane) for start, length, lane in drawn]
    merged = merge(spans)
    for lane in ("rollout-0", "rollout-1"):
        assert covered(merged, lane) == covered(spans, lane)
        row = [s for s in merged if s.lane == lane]
        assert all(a.end <= b.start for a, b in pairwise(row))


def test_spans_that_touch_stay_apart_and_those_that_overlap_name_first_and_last() -> None:
    assert len(merge([span(0, 1), span(1, 2)])) == 2
    assert merge([span(0, 2, label="a"), span(1, 3, label="b"), span(2, 4, label="c")]) == [span(0, 4, label="a … c")]


def test_a_long_timeline_shows_its_last_part() -> None:
    spans = [span(0, 100, "train-0"), *(span(float(n), n + 1.0) for n in range(100))]
    shown = recent(merge(spans), 10)
    assert min(s.start for s in shown) == 90
    assert span(90, 100, "train-0") in shown


def test_lanes_follow_the_data_and_count_as_people_do() -> None:
    lanes = ["publish", "train-1", "rollout-10", "rollout-2", "other"]
    spans = [span(0, 1, lane) for lane in lanes]
    [chart] = timeline_charts(spans, spans)
    order = ["rollout-2", "rollout-10", "train-1", "publish", "other"]
    assert chart.figure["layout"]["yaxis"]["categoryarray"] == order


def test_no_spans_no_timeline() -> None:
    assert timeline_charts([], []) == []


def test_a_run_whose_spans_are_all_drawn_has_no_overview() -> None:
    spans = [span(float(n), n + 1.0) for n in range(3000)]
    assert [chart.name for chart in timeline_charts(spans, spans)] == ["timeline"]


def test_a_run_with_more_spans_than_are_drawn_has_an_overview_from_its_start() -> None:
    spans, whole = [span(float(n), n + 0.5) for n in range(8000)], CoarseSpans(100)
    for record in spans:
        whole.add(record)
    overview, detailed = timeline_charts(spans[-6000:], whole.spans)
    assert (overview.name, detailed.name) == ("timeline-whole-run", "timeline")
    (bars,) = overview.figure["data"]
    assert (bars["base"][0], bars["base"][-1] + bars["x"][-1]) == (0.0, pytest.approx(7999.5 / 60, abs=1e-3))
    assert all(0.72 * 0.45 < width < 0.72 * 0.55 for width in bars["width"]), "half of the time was work"
    (bars,) = detailed.figure["data"]
    assert len(bars["x"]) == 3000
    assert "width" not in bars, "a bar without pauses is as thick as its row"
    assert detailed.note.startswith("the last 50 min 00 s; ")


def test_a_bar_without_length_has_a_share():
    span = SpanRecord(lane="rollout-0", kind="generate", start=5.0, end=5.0, busy=0.0)
    assert _busy_share(span) == 1.0

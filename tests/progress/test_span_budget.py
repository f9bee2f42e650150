from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35_trainer.progress import span_budget
from qwen35_trainer.progress.metrics_file import read_records
from qwen35_trainer.progress.recorder import Recorder
from qwen35_trainer.progress.records import FinishRecord, SpanRecord, to_line
from qwen35_trainer.progress.span_budget import (
    LINES_PER_RESOLUTION,
    MAX_DOUBLINGS,
    SpanBudget,
    busy_seconds,
    joined,
    window_seconds,
)

DAY = 86_400


def span(start: float, end: float, lane: int = 0, label: str = "") -> SpanRecord:
    return SpanRecord(lane=f"rollout-{lane}", kind="generate", start=start, end=end, label=label)


def written(seconds: float, lanes: int, every: float) -> int:
    """The number of lines of a run whose lanes each end a span every `every` seconds, from its budget's own arithmetic."""
    lines, now = 0, 0.0
    while now < seconds:
        window = window_seconds(lines) or every
        length = min(LINES_PER_RESOLUTION - lines % LINES_PER_RESOLUTION, lanes)
        lines, now = lines + length, now + max(window, every) * length / lanes
    return lines


@pytest.mark.parametrize(
    ("lanes", "lines"),
    [(4, [110_000, 160_000, 210_000]), (66, [190_000, 240_000, 290_000]), (1002, [270_000, 320_000, 370_000])],
)
def test_a_run_of_any_length_and_size_writes_the_documented_number_of_lines(lanes: int, lines: list[int]) -> None:
    for days, most in zip((1, 7, 31), lines, strict=True):
        assert most - 10_000 < written(days * DAY, lanes, every=1.0) <= most


def test_the_budget_writes_as_many_lines_as_that_arithmetic_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_budget, "LINES_PER_RESOLUTION", 200)
    budget, lines = SpanBudget(), 0
    for second in range(2000):
        for lane in range(66):
            lines += len(budget.add(span(second, second + 0.75, lane)))
    portions = 2 + 9  # 3 s of exact spans, then 3 s at 1 s, 6 s at 2 s … 1,536 s at 512 s, and some of 1,024 s
    assert (portions - 1) * 200 < lines < (portions + 1) * 200 + 66


def test_a_week_of_64_replicas_is_within_60_megabytes() -> None:
    line = to_line(SpanRecord(lane="rollout-63", kind="generate", start=604799.123, end=604800.123, busy=1023.123))
    assert (len(line) + 1) * (MAX_DOUBLINGS + 2) * LINES_PER_RESOLUTION < 60e6


def test_few_spans_are_written_as_they_are() -> None:
    budget, spans = SpanBudget(), [span(n, n + 0.123456) for n in range(1000)]
    assert [line for record in spans for line in budget.add(record)] == spans
    assert budget.flush() == []


def test_the_length_of_a_window_doubles_with_each_portion_of_lines_up_to_its_maximum() -> None:
    portions = [window_seconds(portion * LINES_PER_RESOLUTION) for portion in range(5)]
    assert portions == [0.0, 1.0, 2.0, 4.0, 8.0]
    assert window_seconds(LINES_PER_RESOLUTION - 1) == 0.0
    assert window_seconds(10**9) == 2**MAX_DOUBLINGS, "a file of an earlier release, with every span"


lengths = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30), st.integers(0, 3)), min_size=1, max_size=60)


@given(steps=lengths, lines=st.sampled_from([20_000, 60_000, 100_000]))
def test_the_joined_lines_hold_the_work_of_all_spans(steps: list[tuple[int, int, int]], lines: int) -> None:
    """Lanes that work one span at a time, as replicas do. Seconds are binary fractions, so that sums are exact."""
    ends, spans = dict.fromkeys(range(4), 0.0), []
    for pause, work, lane in steps:
        start = ends[lane] + pause / 8
        ends[lane] = start + work / 8
        spans.append(span(start, ends[lane], lane))
    spans.sort(key=lambda record: record.end)
    budget = SpanBudget(lines)
    out = [line for record in spans for line in budget.add(record)] + budget.flush()
    for lane in {record.lane for record in spans}:
        before, after = ([record for record in all_ if record.lane == lane] for all_ in (spans, out))
        assert sum(map(busy_seconds, after)) == sum(map(busy_seconds, before))
        assert (after[0].start, after[-1].end) == (before[0].start, before[-1].end)
        assert len(after) <= before[-1].end // window_seconds(lines) + 1
    assert budget.flush() == []


def test_a_joined_span_has_the_first_and_the_last_label_and_the_work_of_both() -> None:
    first, second = span(0, 2, label="update 1"), span(4, 5, label="update 2")
    both = joined(first, second)
    assert (both.start, both.end, both.busy, both.label) == (0, 5, 3, "update 1 … update 2")
    assert joined(both, span(5, 6, label="update 3")).label == "update 1 … update 3"
    assert joined(span(0, 1), span(1, 3)).busy is None, "without a pause there is nothing to say"


def test_a_resumed_run_continues_with_the_resolution_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(span_budget, "LINES_PER_RESOLUTION", 100)
    path = tmp_path / "metrics.jsonl"
    with Recorder(path) as recorder:
        for n in range(150):
            recorder.append(span(float(n), n + 0.5))
    lines = len(list(read_records(path)))
    assert 100 < lines <= 151
    with Recorder(path) as recorder:
        for n in range(150, 950):
            recorder.append(span(float(n), n + 0.5))
    assert len(list(read_records(path))) < 430, "850 without a budget, 450 with one that begins again"


def test_the_end_of_a_run_comes_after_its_spans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_budget, "LINES_PER_RESOLUTION", 1)
    path = tmp_path / "metrics.jsonl"
    end = FinishRecord(outcome="Succeeded", message="", time=9.0)
    with Recorder(path) as recorder:
        for record in (span(0.0, 0.5), span(0.5, 0.75), end):
            recorder.append(record)
    assert list(read_records(path)) == [span(0.0, 0.5), span(0.5, 0.75), end]


def test_a_sink_gets_every_span_at_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Sink:
        def __init__(self) -> None:
            self.records: list[object] = []

        def write(self, record: object) -> None:
            self.records.append(record)

        def close(self) -> None:
            """Keep the records."""

    monkeypatch.setattr(span_budget, "LINES_PER_RESOLUTION", 1)
    sink, spans = Sink(), [span(n / 8, n / 8 + 0.125) for n in range(100)]
    with Recorder(tmp_path / "metrics.jsonl", [sink]) as recorder:
        for number, record in enumerate(spans, start=1):
            recorder.append(record)
            assert sink.records == spans[:number]
    assert len(list(read_records(tmp_path / "metrics.jsonl"))) < 20

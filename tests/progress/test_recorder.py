import errno
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35_trainer.progress import recorder as recorder_module
from qwen35_trainer.progress.metrics_file import read_records
from qwen35_trainer.progress.recorder import SPAN_SECONDS, Recorder
from qwen35_trainer.progress.records import RunRecord, SpanRecord, to_line

from .conftest import make_update


class Kept:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.records: list[RunRecord] = []
        self.closed = False

    def write(self, record: RunRecord) -> None:
        self.records.append(record)

    def close(self) -> None:
        self.closed = True


def test_a_record_is_immediately_in_the_file_and_in_every_sink(tmp_path: Path) -> None:
    first, second = Kept(), Kept()
    with Recorder(tmp_path / "run" / "metrics.jsonl", [first, second]) as recorder:
        recorder.append(make_update(1))
        assert list(read_records(tmp_path / "run" / "metrics.jsonl")) == [make_update(1)]
        assert first.records == second.records == [make_update(1)]
    assert first.closed
    assert second.closed


def span(second: float) -> SpanRecord:
    return SpanRecord(lane="rollout-0", kind="generate", start=second, end=second + 0.25)


def test_the_spans_of_a_second_are_written_together_and_reach_sinks_immediately(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, sink, now = tmp_path / "metrics.jsonl", Kept(), [100.0]
    monkeypatch.setattr(recorder_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with Recorder(path, [sink]) as recorder:
        written = []
        for second in (0.0, 0.25, 0.5, SPAN_SECONDS, SPAN_SECONDS + 0.25):
            now[0] = 100.0 + second
            recorder.append(span(second))
            written.append(len(list(read_records(path))))
        assert written == [1, 1, 1, 4, 4]
        assert len(sink.records) == 5
        recorder.append(make_update(1))
        assert list(read_records(path)) == sink.records, "a record of another kind is immediately in the file"
        recorder.append(span(9.0))
    assert list(read_records(path)) == sink.records


def test_a_resumed_run_continues_in_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for number in (1, 2):
        with Recorder(path) as recorder:
            recorder.append(make_update(number))
    assert list(read_records(path)) == [make_update(1), make_update(2)]


LINE = (to_line(make_update(1)) + "\n").encode()


@given(kept=st.integers(0, 2), torn=st.integers(0, len(LINE) - 1))
def test_a_torn_last_line_is_cut_off_wherever_it_tore(
    tmp_path_factory: pytest.TempPathFactory, kept: int, torn: int
) -> None:
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    path.write_bytes(LINE * kept + LINE[:torn])
    with Recorder(path) as recorder:
        recorder.append(make_update(2))
    assert list(read_records(path)) == [make_update(1)] * kept + [make_update(2)]


def test_a_torn_line_longer_than_a_block_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(LINE + b"\0" * 200_000)
    Recorder(path).close()
    assert path.read_bytes() == LINE


def test_a_full_disk_is_an_error_naming_the_file_and_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Recorder(path) as recorder:
        recorder.append(make_update(1))
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(LINE) + 10, before[1]))
        try:
            with pytest.raises(OSError, match=r"cannot write to the metrics file: .*metrics.jsonl") as caught:
                recorder.append(make_update(2))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert caught.value.errno == errno.EFBIG
        assert path.read_bytes() == LINE
        recorder.append(make_update(3))
    assert list(read_records(path)) == [make_update(1), make_update(3)]


def test_a_folder_that_cannot_be_made_is_an_error_naming_the_file(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file, no folder")
    with pytest.raises(OSError, match=r"cannot open the metrics file: .*metrics.jsonl"):
        Recorder(tmp_path / "run" / "metrics.jsonl")

import json
import tracemalloc
from pathlib import Path

import pytest

from qwen35_trainer.progress.metrics_file import MetricsFile, has_evaluation, has_update, number_of, read_records
from qwen35_trainer.progress.records import CheckpointRecord, EvaluationRecord, RunRecord, UpdateRecord, to_line

from .conftest import make_update


def file_of(path: Path, records: list[RunRecord]) -> Path:
    path.write_text("".join(f"{to_line(record)}\n" for record in records))
    return path


def test_a_file_can_be_read_again_and_again_and_does_not_change_while_it_grows(
    tmp_path: Path, run: list[RunRecord]
) -> None:
    path = file_of(tmp_path / "metrics.jsonl", run)
    records = read_records(path)
    with path.open("a") as file:
        file.write(to_line(make_update(9)) + "\n")
    assert list(records) == list(records) == run
    assert list(read_records(path)) == [*run, make_update(9)]


def test_the_records_of_one_class_are_read_without_parsing_others(tmp_path: Path, run: list[RunRecord]) -> None:
    path = file_of(tmp_path / "metrics.jsonl", run)
    path.write_text('{"record":"update","damaged"\n' + path.read_text())
    assert list(MetricsFile(path).of(CheckpointRecord)) == [r for r in run if isinstance(r, CheckpointRecord)]
    with pytest.raises(ValueError, match="line 1: not JSON"):
        list(MetricsFile(path).of(UpdateRecord))


def test_the_number_of_a_line_is_found_in_any_order_of_keys() -> None:
    fields = json.loads(to_line(make_update(12)))
    other_order = json.dumps({"record": "update"} | dict(reversed(fields.items())), separators=(",", ":"))
    for line in (to_line(make_update(12)), other_order):
        assert number_of(line.encode()) == (UpdateRecord, 12)
    evaluated = EvaluationRecord(update=3, version=3, time=1.0, samples=1)
    assert number_of(to_line(evaluated).encode()) == (EvaluationRecord, 3)
    for line in (b'{"record":"update","upd', b'{"record":"update","update":"x"}', b'{"record":"span","lane":"a"}', b""):
        assert number_of(line) is None


def test_a_file_has_an_update_or_not(tmp_path: Path, run: list[RunRecord]) -> None:
    assert not has_update(file_of(tmp_path / "none", [run[0]]))
    assert has_update(file_of(tmp_path / "some", run))


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ("", False),
        ("u3 u4", False),
        ("u3 e3 u4", False),
        ("u4 e4", True),
        ("u4 e4 u3 u4", False),
        ("u4 e4 u3 u4 e4", True),
    ],
)
def test_an_evaluation_counts_until_its_update_is_made_again(tmp_path: Path, numbers: str, expected: bool) -> None:
    records: list[RunRecord] = [
        make_update(int(name[1:]))
        if name[0] == "u"
        else EvaluationRecord(update=int(name[1:]), version=3, time=1.0, samples=1)
        for name in numbers.split()
    ]
    assert has_evaluation(file_of(tmp_path / "metrics.jsonl", records), 4) == expected
    assert not has_evaluation(tmp_path / "missing", 4)


def test_reading_takes_the_memory_of_a_line(tmp_path: Path) -> None:
    path = file_of(tmp_path / "metrics.jsonl", [make_update(number) for number in range(1, 3001)])
    assert path.stat().st_size > 3_000_000
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_records(path)) == 3000
        assert tracemalloc.get_traced_memory()[1] < 300_000
    finally:
        tracemalloc.stop()

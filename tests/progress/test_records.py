import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35_trainer.progress.metrics_file import read_records
from qwen35_trainer.progress.records import (
    CheckpointRecord,
    EvaluationRecord,
    FinishRecord,
    RunRecord,
    SpanRecord,
    UpdateRecord,
    from_line,
    surviving_evaluations,
    surviving_updates,
    to_line,
)

from .conftest import make_update

records = st.one_of(
    st.from_type(kind) for kind in (UpdateRecord, EvaluationRecord, SpanRecord, CheckpointRecord, FinishRecord)
)


def rewritten(record: RunRecord) -> str:
    return to_line(from_line(to_line(record)))


@given(record=records)
def test_every_record_comes_back_from_its_line(record: RunRecord) -> None:
    line = to_line(record)
    assert "\n" not in line
    assert rewritten(record) == line
    assert type(from_line(line)) is type(record)
    if "NaN" not in line:  # NaN differs from itself
        assert from_line(line) == record


@given(record=records)
def test_a_line_is_json_without_extensions(record: RunRecord) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    assert "record" in json.loads(to_line(record), parse_constant=refuse)


def test_a_diverged_loss_survives() -> None:
    back = from_line(to_line(make_update(1, loss=math.nan, gradient_norm=math.inf)))
    assert isinstance(back, UpdateRecord)
    assert math.isnan(back.loss)
    assert back.gradient_norm == math.inf


def test_unknown_keys_are_ignored() -> None:
    line = json.loads(to_line(make_update(1))) | {"invented_later": 1}
    assert from_line(json.dumps(line)) == make_update(1)


def test_a_line_that_is_not_a_record_is_refused_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(to_line(make_update(1)) + '\n{"record":"span","lane":"train-0","kind":"sleep","start":1}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2: record 'span': kind: .*; end: Field required"):
        list(read_records(path))


def test_an_unknown_record_is_refused_with_those_known() -> None:
    with pytest.raises(
        ValueError, match="record 'guess' is not one of update, evaluation, span, checkpoint, export, finish"
    ):
        from_line('{"record":"guess"}')


def test_a_missing_file_is_an_error_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere.jsonl: no such metrics file"):
        read_records(tmp_path / "nowhere.jsonl")


def test_a_line_that_is_still_being_written_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(to_line(make_update(1)) + '\n{"record":"upd')
    assert list(read_records(path)) == [make_update(1)]


def test_updates_repeated_after_a_resume_count_once() -> None:
    held_out = {"version": 0, "time": 0.0, "reward_mean": 0.0, "samples": 1, "response_tokens_mean": 1.0}
    lost = EvaluationRecord(update=3, accuracy=0.1, **held_out)
    kept = EvaluationRecord(update=1, accuracy=0.2, **held_out)
    again = make_update(2, loss=9.0)
    course = [make_update(1), kept, make_update(2), make_update(3), lost, again]
    assert surviving_updates(course) == [make_update(1), again]
    assert surviving_evaluations(course) == [kept]


def test_a_file_of_an_earlier_release_is_read_with_its_names():
    line = to_line(make_update(1, train_idle=0.25))
    assert from_line(line.replace('"train_idle"', '"trainer_idle"')) == from_line(line)

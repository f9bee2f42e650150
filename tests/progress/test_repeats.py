from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35_trainer.progress.records import (
    EvaluationRecord,
    FinishRecord,
    RunRecord,
    UpdateRecord,
    surviving_evaluations,
    surviving_updates,
)
from qwen35_trainer.progress.repeats import Repeats, marked

from .conftest import make_update


def evaluation(number: int, place: int) -> EvaluationRecord:
    return EvaluationRecord(update=number, version=0, time=float(place), samples=1)


courses = st.lists(st.tuples(st.sampled_from("ueeuuf"), st.integers(0, 8)), max_size=30)


@given(course=courses)
def test_in_any_order_the_records_that_count_are_those_that_no_later_one_replaces(
    course: list[tuple[str, int]],
) -> None:
    """The reference keeps all records, and drops those with the number of a later one or a higher number."""
    records: list[RunRecord] = [
        make_update(number, time=float(place))
        if kind == "u"
        else evaluation(number, place)
        if kind == "e"
        else FinishRecord(outcome="Failed", message="", time=float(place))
        for place, (kind, number) in enumerate(course)
    ]
    counting = [record for record, repeated in marked(records) if not repeated]
    assert [r for r in counting if isinstance(r, UpdateRecord)] == surviving_updates(records)
    assert [r for r in counting if isinstance(r, EvaluationRecord)] == surviving_evaluations(records)
    assert sum(isinstance(r, FinishRecord) for r in counting) == sum(isinstance(r, FinishRecord) for r in records)


def test_the_state_grows_with_the_attempts_and_not_with_the_updates() -> None:
    def numbers() -> Iterator[tuple[type[UpdateRecord], int]]:
        for attempt in range(5):
            for number in range(attempt * 1000, attempt * 1000 + 3000):
                yield UpdateRecord, number

    repeats = Repeats(numbers())
    assert len(repeats._updates._places) == 4
    assert repeats.repeated(1000, (UpdateRecord, 1000))
    assert not repeats.repeated(999, (UpdateRecord, 999))


def test_records_that_can_be_read_only_once_are_refused() -> None:
    with pytest.raises(TypeError, match="read only once"):
        list(marked(iter([make_update(1)])))

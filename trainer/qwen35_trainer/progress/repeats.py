"""Finds the updates and evaluations of a run that count: those that led to the final weights.

    attempt 1    … 39 40 41 42 43          checkpoint at 40; then it crashes
    attempt 2             41 42 43 44 …    41 to 43 are repeated: their first records do not count

An update is repeated if a later update has the same number or a lower one. An evaluation is repeated if a later update
or evaluation has the same number or a lower one. Only the places where numbers do not increase are stored, so the
memory depends on the number of attempts and not on the number of records.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator

from qwen35_trainer.progress.metrics_file import MetricsFile, Number
from qwen35_trainer.progress.records import EvaluationRecord, RunRecord, UpdateRecord


class Repeats:
    """Finds the records of updates and evaluations that a later attempt repeated.

    numbers: for each record, its class and its number if it is an update or an evaluation; None for any other record.
    """

    def __init__(self, numbers: Iterable[Number | None]) -> None:
        self._updates, self._evaluations = _Falls(), _Falls()
        update = evaluation = evaluated = -1  # the previous ones; the highest evaluation since the last fall
        for place, item in enumerate(numbers):
            if item is None:
                continue
            kind, number = item
            if kind is UpdateRecord:
                if number <= update:
                    self._updates.add(place, number)
                if number <= max(update, evaluated):
                    self._evaluations.add(place, number)
                    evaluated = -1
                update = number
            else:
                if number <= evaluation:
                    self._evaluations.add(place, number)
                evaluation, evaluated = number, max(evaluated, number)

    def repeated(self, place: int, item: Number | None) -> bool:
        """Return whether a later attempt repeated the update or evaluation at position `place`.

        place: position of the record among all records of the run, from 0. item: class and number of the record; None
        for a record that is neither an update nor an evaluation. The result is then False.
        """
        if item is None:
            return False
        kind, number = item
        lowest = (self._updates if kind is UpdateRecord else self._evaluations).lowest_after(place)
        return lowest is not None and lowest <= number


class _Falls:
    """The places at which the number of a record is not above the number before it, and the numbers at these places.

    A place is dropped when a later place has the same number or a lower one, so places and numbers are both ascending.
    """

    def __init__(self) -> None:
        self._places: list[int] = []
        self._numbers: list[int] = []

    def add(self, place: int, number: int) -> None:
        while self._numbers and self._numbers[-1] >= number:
            self._places.pop()
            self._numbers.pop()
        self._places.append(place)
        self._numbers.append(number)

    def lowest_after(self, place: int) -> int | None:
        index = bisect_right(self._places, place)
        return self._numbers[index] if index < len(self._numbers) else None


def marked(records: Iterable[RunRecord]) -> Iterator[tuple[RunRecord, bool]]:
    """Yield (record, repeated) for each record, where repeated is whether a later attempt repeated the record.

    records: iterated twice, so it must not be an iterator.
    """
    if iter(records) is records:
        raise TypeError("an iterator can be read only once; give a list or a MetricsFile")
    numbers = records.numbers() if isinstance(records, MetricsFile) else map(_number, records)
    repeats = Repeats(numbers)
    for place, record in enumerate(records):
        yield record, repeats.repeated(place, _number(record))


def _number(record: RunRecord) -> Number | None:
    return (type(record), record.update) if isinstance(record, UpdateRecord | EvaluationRecord) else None

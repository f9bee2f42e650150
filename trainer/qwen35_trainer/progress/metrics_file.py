"""Reads a metrics file record by record, so that a file of any length takes the memory of one line."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from qwen35_trainer.progress.records import EvaluationRecord, RunRecord, UpdateRecord, from_line, line_start

type Number = tuple[type[UpdateRecord] | type[EvaluationRecord], int]
"""Identifies the record of an update or an evaluation: the class of the record, and the number of the update. An
evaluation has the number of the update before it."""

_NUMBERED: Final = re.compile(rb'\{"record":"(update|evaluation)"(?:,"update":(\d+)[,}])?')


class MetricsFile:
    """The records in the complete lines of a metrics file. Every iteration gives the same records.

    A last line without a newline is left out, because it is still being written. Lines that are appended after this
    object was created are left out, too. Raises FileNotFoundError if the file does not exist. Iterating raises
    ValueError, with file and line, if a line is not a record.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._size = path.stat().st_size
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{path}: no such metrics file. Give the folder of a run that has started, or run it first."
            ) from None

    def __iter__(self) -> Iterator[RunRecord]:
        for place, line in enumerate(self.lines(), start=1):
            yield self._record(place, line)

    def of[R: RunRecord](self, kind: type[R]) -> Iterator[R]:
        """Yield the records of the class `kind`. Lines with records of other classes are not parsed."""
        start = line_start(kind)
        for place, line in enumerate(self.lines(), start=1):
            if line.startswith(start) and isinstance(record := self._record(place, line), kind):
                yield record

    def numbers(self) -> Iterator[Number | None]:
        """Yield, for each line, the class and number of its record; None if it is not an update or an evaluation.

        The other fields of a line are usually not parsed (`number_of`).
        """
        for line in self.lines():
            yield number_of(line)

    def lines(self) -> Iterator[bytes]:
        """Yield the complete lines, without their newlines."""
        remaining = self._size
        with self._path.open("rb") as file:
            for line in file:
                remaining -= len(line)
                if remaining < 0 or not line.endswith(b"\n"):
                    return
                yield line[:-1]

    def _record(self, place: int, line: bytes) -> RunRecord:
        try:
            return from_line(line.decode())
        except ValueError as error:
            raise ValueError(f"{self._path}, line {place}: {error}") from error


def read_records(path: Path) -> MetricsFile:
    """Return the records of a metrics file, in order. The file is read only during iteration. See `MetricsFile`."""
    return MetricsFile(path)


def number_of(line: bytes) -> Number | None:
    """Return the record class and the number of the update or evaluation in a line; None for any other record.

    Usually only the beginning of the line is parsed. In this case, damage to the rest of the line is not noticed.
    """
    match = _NUMBERED.match(line)
    if match is None:
        return None
    digits = match[2]
    if digits is None:  # another order of keys
        try:
            digits = str(int(json.loads(line)["update"])).encode()
        except (ValueError, KeyError, TypeError):
            return None
    return (UpdateRecord if match[1] == b"update" else EvaluationRecord), int(digits)


def has_evaluation(path: Path, update: int) -> bool:
    """Return whether a metrics file contains an evaluation of the weights after `update` updates.

    An evaluation before the last record of that update does not count: the update was made again after it. The result is
    False if the file does not exist. Raises OSError if the file cannot be read.
    """
    is_evaluated = False
    for number in MetricsFile(path).numbers() if path.exists() else ():
        if number == (UpdateRecord, update):
            is_evaluated = False
        is_evaluated |= number == (EvaluationRecord, update)
    return is_evaluated


def has_update(path: Path) -> bool:
    """Return whether a metrics file contains an update. Reads the file only up to the first update."""
    return any(line.startswith(line_start(UpdateRecord)) for line in MetricsFile(path).lines())

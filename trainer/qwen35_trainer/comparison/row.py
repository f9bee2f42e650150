"""A row of a comparison: one value for each run, and its text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from qwen35_trainer.formatting import MISSING, count, number

type RunValue = float | str | None
"""A number, a text, or None if the run does not have the value."""

_EQUAL: Final = 0.005
"""If a value differs from the first run's by less than this share, its ratio is not shown."""


@dataclass(frozen=True)
class ComparedRow:
    """A named row of a comparison, with one value per run in the order of the comparison."""

    name: str
    values: tuple[RunValue, ...]
    text: Callable[[float | None], str] = number
    """Formats a value that is a number."""
    ratios: bool = False
    """Whether cells also show the ratio of the value to the first run's."""

    @property
    def cells(self) -> list[str]:
        """The values as text, such as "12.5 s" for the first run and "6.1 s ×0.49" for the second.

        The ratio to the first run's value is not shown if it differs from 1 by less than 0.5 %.
        """
        return [self._cell(place, value) for place, value in enumerate(self.values)]

    def _cell(self, place: int, value: RunValue) -> str:
        if value is None:
            return MISSING
        if isinstance(value, str):
            return value
        first = self.values[0]
        if place == 0 or not self.ratios or not isinstance(first, int | float) or not first:
            return self.text(value)
        ratio = value / first
        return self.text(value) if abs(ratio - 1) < _EQUAL else f"{self.text(value)} ×{number(ratio)}"


@dataclass(frozen=True)
class RowSection:
    """Rows under one title. key: the section's name in the JSON output."""

    key: str
    title: str
    rows: tuple[ComparedRow, ...]


def with_values(rows: list[ComparedRow]) -> tuple[ComparedRow, ...]:
    """Return the rows in which at least one run has a value other than 0."""
    return tuple(row for row in rows if any(row.values))


def whole(value: float | None) -> str:
    """Format a number as a count without decimals, such as 1,234."""
    return count(None if value is None else int(value))

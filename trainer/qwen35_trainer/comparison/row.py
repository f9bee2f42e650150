"""A row of a comparison: one value for each run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from qwen35_trainer.formatting import MISSING, count, number

type RunValue = float | str | None
"""A number, a text, or None if the run does not have the value."""

_EQUAL: Final = 0.005
"""Relative difference below which no ratio is shown."""


@dataclass(frozen=True)
class ComparedRow:
    """The values of all runs, in the order of the runs."""

    name: str
    values: tuple[RunValue, ...]
    text: Callable[[float | None], str] = number
    """Formats a number."""
    ratios: bool = False
    """Whether cells show the ratio to the first run."""

    @property
    def cells(self) -> list[str]:
        """The values as text, such as "12.5 s" and "6.1 s ×0.49"."""
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
    """Rows under one title. key: its name in JSON."""

    key: str
    title: str
    rows: tuple[ComparedRow, ...]


def with_values(rows: list[ComparedRow]) -> tuple[ComparedRow, ...]:
    """Return the rows in which some run has a value other than 0. A row of zeros says nothing."""
    return tuple(row for row in rows if any(row.values))


def whole(value: float | None) -> str:
    """Format a count: 1,234."""
    return count(None if value is None else int(value))

"""A sequence whose rows are created when they are read."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import overload


class RowSequence[Row](Sequence[Row]):
    """A sequence that creates each row when it is read. Subclasses define `__len__` and `_row`."""

    @abstractmethod
    def _row(self, row: int) -> Row:
        """Return the row with this number, which is at least 0 and less than the length."""

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        rows = range(len(self))[index]
        return self._row(rows) if isinstance(rows, int) else [self._row(row) for row in rows]

"""The errors of this package."""

from collections.abc import Iterable, Mapping

_PRINTED = 20


class DataError(ValueError):
    """The data cannot be used as configured.

    problems: one text per problem, each naming the source or prompt, the value and the fix. str() prints the first
    twenty and the count.
    """

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        count = len(self.problems)
        lines = [f"{count} problem{'' if count == 1 else 's'} in the data", *self.problems[:_PRINTED]]
        if count > _PRINTED:
            lines.append(f"… and {count - _PRINTED} more")
        return "\n  ".join(lines)


class RowError(Exception):
    """Why one row is no prompt. Rows with the same reason are reported as one problem."""


def kind(value: object) -> str:
    """How a person would name the value in a data file."""
    match value:
        case None:
            return "null"
        case bool():
            return f"the boolean {str(value).lower()}"
        case int() | float():
            return f"the number {value}"
        case str():
            return f"the text {value[:40]!r}"
        case list():
            return f"a list of {len(value)}"
        case Mapping():
            return f"a mapping with {', '.join(map(str, value)) or 'no fields'}"
        case _:
            return f"a {type(value).__name__}"

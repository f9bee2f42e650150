"""The errors of the package `data`: one for data that cannot be used, and one for a single row. Texts for their messages."""

import json
from collections.abc import Iterable, Mapping

from qwen35_trainer.failure_reasons import FailureReason

_MAX_PRINTED_PROBLEMS = 20
_QUOTED_CHARACTERS = 20


class DataError(ValueError):
    """The data cannot be used as configured.

    problems: one text per problem, each with the source or prompt, the value and the fix. str() prints the first twenty
    and the count.
    """

    failure = FailureReason.DATA_ERROR

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        count = len(self.problems)
        lines = [f"{count} problem{'' if count == 1 else 's'} in the data", *self.problems[:_MAX_PRINTED_PROBLEMS]]
        if count > _MAX_PRINTED_PROBLEMS:
            lines.append(f"… and {count - _MAX_PRINTED_PROBLEMS} more")
        return "\n  ".join(lines)


class RowError(Exception):
    """A malformed or invalid row of a data file.

    All invalid rows of a source are reported together, in one DataError. Rows of a file that are invalid for the same
    reason are reported as one problem.
    """


def json_fault(error: ValueError | RecursionError) -> str:
    """Return what is wrong with a JSON text, for an error message. error: what `json.loads` raised for the text."""
    match error:
        case json.JSONDecodeError():
            return f"{error.msg.removesuffix(' at')} at column {error.colno}"
        case RecursionError():
            return "nested too deeply"
    return "an integer has too many digits"  # Python reads at most 4300


def half_character(text: str) -> str | None:
    """Return a description of the first half of a UTF-16 pair in a text, for an error message; None if there is none.

    JSON can write such a half, for example where a text was cut within an emoji, but no token stands for it.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        before = text[max(0, error.start - _QUOTED_CHARACTERS) : error.start]
        return f"half of a character in UTF-16, {text[error.start]!r} after {before!r}"
    return None


def kind(value: object) -> str:
    """Return a description of a value in a data file, for an error message: "null", "the number 3", …"""
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

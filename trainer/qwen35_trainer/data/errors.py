"""The error of this package."""

from collections.abc import Iterable

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

"""The problems of a manifest, and functions that describe them as text."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from qwen35_trainer.failure_reasons import FailureReason
from qwen35_trainer.formatting import counted


@dataclass(frozen=True)
class Problem:
    """One thing to change in a manifest: the path of the field (empty for the file itself), what is wrong, and the fix."""

    path: str
    message: str
    fix: str

    def __str__(self) -> str:
        head = f"{self.path}: {self.message}" if self.path else self.message
        return f"  {head}\n      {self.fix}"


class ManifestError(ValueError):
    """Raised for a manifest that cannot be used. `problems` has every problem found."""

    failure = FailureReason.MANIFEST_ERROR

    def __init__(self, file: Path | None, problems: Sequence[Problem]) -> None:
        self.file = file
        self.problems = tuple(problems)
        super().__init__(str(self))

    def __str__(self) -> str:
        count = counted(len(self.problems), "problem")
        head = f"{self.file}: {count}" if self.file else count
        return "\n".join([head, *map(str, self.problems)])


def beyond_release(file: Path | None, problems: Sequence[Problem]) -> str:
    """Return the message of a command about a valid manifest that this release cannot run.

    file: path of the manifest. problems: the parts that the release cannot run.
    """
    head = f"{file}: valid" if file else "valid"
    return "\n".join([f"{head}, but this release cannot run it:", *map(str, problems)])


def near(name: str, names: Iterable[str]) -> list[str]:
    """Return at most three of `names` that are similar to `name`, the most similar first. Case is ignored."""
    by_lower = {candidate.lower(): candidate for candidate in names}
    return [by_lower[match] for match in difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.6)]


def either(options: Iterable[object]) -> str:
    """Return the options as text: "a", "a or b", "a, b or c"."""
    *head, last = map(str, options)
    return f"{', '.join(head)} or {last}" if head else last


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return the fix for an unknown name as text: similar names in `names`, or all of `names` if none is similar."""
    names = sorted(names)
    if matches := near(name, names):
        return f"Did you mean {either(matches)}?"
    return f"Known names: {', '.join(names)}."

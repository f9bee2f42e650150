"""What is wrong with a manifest, told so that it can be put right."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Problem:
    """One thing to change: where (the manifest's spelling, empty for the file itself), what is wrong, what to do."""

    path: str
    message: str
    fix: str

    def __str__(self) -> str:
        head = f"{self.path}: {self.message}" if self.path else self.message
        return f"  {head}\n      {self.fix}"


class ManifestError(ValueError):
    """A manifest that cannot be used, with every problem found in it."""

    def __init__(self, file: Path | None, problems: Sequence[Problem]) -> None:
        self.file = file
        self.problems = tuple(problems)
        super().__init__(str(self))

    def __str__(self) -> str:
        count = counted(len(self.problems), "problem")
        head = f"{self.file}: {count}" if self.file else count
        return "\n".join([head, *map(str, self.problems)])


def beyond_release(file: Path | None, problems: Sequence[Problem]) -> str:
    """What commands say of a valid manifest that this release cannot run."""
    head = f"{file}: valid" if file else "valid"
    return "\n".join([f"{head}, but this release cannot run it:", *map(str, problems)])


def near(name: str, known: Iterable[str]) -> list[str]:
    """The known names that `name` may have meant, likeliest first; case does not count."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    return [by_lower[match] for match in difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.6)]


def either(options: Iterable[object]) -> str:
    """The options as running text: "a", "a or b", "a, b or c"."""
    *head, last = map(str, options)
    return f"{', '.join(head)} or {last}" if head else last


def counted(count: int, noun: str) -> str:
    """A number with its noun: 1 node, 2 nodes."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The fix for an unknown name: near names, or else all there are."""
    known = sorted(known)
    if matches := near(name, known):
        return f"Did you mean {either(matches)}?"
    return f"Known here: {', '.join(known)}."

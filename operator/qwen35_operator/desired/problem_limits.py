"""Bounds the problems of a spec: a spec of 256 KiB can have 100,000, and their texts can quote all of it each time."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

from qwen35_operator.status.text_limits import cut
from qwen35_trainer.manifest import Problem

MAX_PROBLEMS: Final = 50
MAX_TEXT_BYTES: Final = 1000
"""Maximum size of each text of a problem."""
MAX_KEY_BYTES: Final = 400
"""Maximum size of a key in the path of a problem. The longest key of a label has 317 characters."""


def first_problems(problems: Iterable[Problem]) -> Iterator[Problem]:
    """Yield the first MAX_PROBLEMS problems, with texts of at most MAX_TEXT_BYTES, and one that says if there are more."""
    every = iter(problems)
    for problem in islice(every, MAX_PROBLEMS):
        yield Problem(*(cut(text, MAX_TEXT_BYTES) for text in (problem.path, problem.message, problem.fix)))
    if next(every, None) is not None:
        yield Problem("spec", f"has more than {MAX_PROBLEMS} problems.", "Fix the others first.")


def field_of(place: str, key: str) -> str:
    """Return the path of a field. place: that of the object with the field. A long key is cut, and a long path does not grow.

    A path is built for every field: of a spec with long keys around 100,000 values, the full paths would have gigabytes.
    """
    return place if len(place) > MAX_TEXT_BYTES else f"{place}.{cut(key, MAX_KEY_BYTES)}"

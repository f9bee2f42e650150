"""Lets records share equal strings, such as the names of nodes, of which thousands of records contain the same few."""

from functools import lru_cache
from typing import Final

MAX_STRINGS: Final = 8192
MAX_CHARACTERS: Final = 256
"""Maximum length of a string that is kept to be shared."""


def shared(text: str) -> str:
    """Return a string that equals `text`, the same object for equal strings if possible.

    Unlike `sys.intern`, which keeps every string until the end of the process in Python 3.12, this keeps the latest MAX_STRINGS
    strings only: tenants can write any number of different ones into objects that the operator reads.
    """
    return _latest(text) if len(text) <= MAX_CHARACTERS else text


@lru_cache(maxsize=MAX_STRINGS)
def _latest(text: str) -> str:
    return text

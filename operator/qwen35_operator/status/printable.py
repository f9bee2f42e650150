"""Makes texts of tenants safe to print: trainers, pods and users write messages that administrators read in terminals.

Terminals interpret control characters: escape sequences can erase the screen, rename the window or write to the
clipboard.
"""

import re
from typing import cast

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""The control characters of C0 and C1 except tab and newline, and the marks that change the direction of text."""


def printable(text: str) -> str:
    """Return the text with U+FFFD in place of direction marks and of control characters other than tab and newline."""
    return _CONTROLS.sub("\ufffd", text)


def printable_object[T](value: T) -> T:
    """Return the JSON value with all strings in it made printable, names of fields included."""
    made: object = value
    if isinstance(value, str):
        made = printable(value)
    elif isinstance(value, dict):
        made = {printable_object(name): printable_object(item) for name, item in value.items()}
    elif isinstance(value, list):
        made = [printable_object(item) for item in value]
    return cast("T", made)

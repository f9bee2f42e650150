"""Parses options such as `--set PATH=VALUE`: a path has dots between names and [0] for an item of a list; a value is
YAML.
"""

import re
from typing import Final

import yaml

from qwen35_trainer.manifest.document import parse_value
from qwen35_trainer.manifest.fields import Segment

SEGMENT: Final = re.compile(r"([^.\[\]]+)((?:\[\d+\])*)")
"""Pattern of one part of a path: a name, and the indices after it, as in `rewards[0]`."""


class AssignmentError(ValueError):
    """Raised for text that is not `PATH=VALUE`. `message` explains what is wrong, and `fix` how to correct it."""

    def __init__(self, message: str, fix: str) -> None:
        super().__init__(f"{message} {fix}")
        self.message, self.fix = message, fix


def split_assignment(text: str) -> tuple[str, str]:
    """Split `PATH=VALUE` into path and value. Raises AssignmentError if there is no value."""
    path, equals, value = text.partition("=")
    if not equals:
        raise AssignmentError("has no value.", f"Write {text}=VALUE.")
    return path.strip(), value


def read_value(text: str) -> object:
    """Parse a value. Raises AssignmentError if it is not YAML."""
    try:
        return parse_value(text)
    except yaml.YAMLError:
        raise AssignmentError(f"{text} is not valid YAML.", "Quote the value, for the shell too.") from None


def segments(match: re.Match[str]) -> list[Segment]:
    """Return the name and the indices in a match of SEGMENT. For `rewards[0]` they are ["rewards", 0]."""
    return [match[1], *map(int, re.findall(r"\d+", match[2]))]


def split_path(path: str) -> tuple[Segment, ...]:
    """Split a path into names and indices.

    A part of another form is returned unchanged; it is not the name of any field.
    """
    parts: list[Segment] = []
    for text in path.split("."):
        match = SEGMENT.fullmatch(text)
        parts += segments(match) if match else [text]
    return tuple(parts)

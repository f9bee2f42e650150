"""Parses options such as `--set PATH=VALUE`.

PATH consists of names with dots between them; an index such as [0] selects an item of a list. VALUE is YAML.
"""

import re
from typing import Final

import yaml

from qwen35_trainer.manifest.document import parse_value
from qwen35_trainer.manifest.fields import Segment

SEGMENT: Final = re.compile(r"([^.\[\]]+)((?:\[\d+\])*)")
"""Pattern of one part of a path: a name and the indices after the name, as in `rewards[0]`."""


class AssignmentError(ValueError):
    """Raised for text that is not `PATH=VALUE`, or whose VALUE is empty or not valid YAML.

    `message` explains what is wrong, and `fix` how to correct it.
    """

    def __init__(self, message: str, fix: str) -> None:
        super().__init__(f"{message} {fix}")
        self.message, self.fix = message, fix


def split_assignment(text: str) -> tuple[str, str]:
    """Split `PATH=VALUE` into path and value. Raises AssignmentError if the text has no equals sign."""
    path, equals, value = text.partition("=")
    if not equals:
        raise AssignmentError("has no value.", f"Write {text}=VALUE.")
    return path.strip(), value


def read_value(text: str) -> object:
    """Parse the value of an assignment as YAML. Raises AssignmentError if the value is empty or not valid YAML."""
    if not text.strip():  # usually a variable of the shell that is not set; as YAML it would mean null
        raise AssignmentError("has an empty value.", "Write null for no value, or '\"\"' for an empty text.")
    try:
        return parse_value(text)
    except yaml.YAMLError:
        raise AssignmentError(f"{text} is not valid YAML.", "Quote the value, for the shell too.") from None


def segments(match: re.Match[str]) -> list[Segment]:
    """Return the name and the indices of a match of SEGMENT: ["rewards", 0] for `rewards[0]`."""
    return [match[1], *map(int, re.findall(r"\d+", match[2]))]


def split_path(path: str) -> tuple[Segment, ...]:
    """Split a path into names and indices.

    A part that SEGMENT does not match is returned as text. No field has such a name, so the caller rejects it.
    """
    parts: list[Segment] = []
    for text in path.split("."):
        match = SEGMENT.fullmatch(text)
        parts += segments(match) if match else [text]
    return tuple(parts)

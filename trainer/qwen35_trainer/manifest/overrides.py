"""Applies `--set PATH=VALUE` to a manifest's document before the document is validated (see `assignment`)."""

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any

from qwen35_trainer.formatting import counted
from qwen35_trainer.manifest import fields
from qwen35_trainer.manifest.assignment import SEGMENT, AssignmentError, read_value, segments, split_assignment
from qwen35_trainer.manifest.fields import Segment
from qwen35_trainer.manifest.problems import ManifestError, Problem, did_you_mean
from qwen35_trainer.manifest.resource import Manifest


class OverrideError(ValueError):
    """Raised for an override that cannot be applied. `problem` has the path, the reason and a fix."""

    def __init__(self, path: Sequence[Segment], message: str, fix: str) -> None:
        super().__init__(message)
        self.problem = Problem(fields.spell(path), message, fix)


def apply_overrides(document: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return a copy of the document in which each `PATH=VALUE` has been applied in turn.
    `spec.` may be omitted from a path.

    Raises ManifestError with every override that cannot be applied. The error names no file.
    """
    changed, problems = override(document, overrides)
    if problems:
        raise ManifestError(None, problems)
    return changed


def override(document: Mapping[str, Any], overrides: Sequence[str]) -> tuple[dict[str, Any], list[Problem]]:
    """Apply `PATH=VALUE` overrides to a copy of the document.

    Returns the changed copy, and a problem for each override that cannot be applied and was left out.
    """
    changed, problems = copy.deepcopy(dict(document)), []
    for text in overrides:
        try:
            path, value = _read(text)
            _put(changed, path, value)
        except OverrideError as error:
            problems.append(error.problem)
    return changed, problems


def _read(text: str) -> tuple[list[Segment], object]:
    path: list[Segment] = [text]
    try:
        spelled, value = split_assignment(text)
        path = _path(spelled)
        return path, read_value(value)
    except AssignmentError as error:
        raise OverrideError(path, error.message, error.fix) from None


def _path(spelled: str) -> list[Segment]:
    """Return the segments of a path to a field of the manifest. Raises OverrideError if there is no such field.

    In a map with arbitrary keys, the rest of the path is one key, even if it contains dots.
    """
    first = re.split(r"[.\[]", spelled)[0]
    remainder = spelled if first in fields.fields(Manifest) else f"spec.{spelled}"
    path: list[Segment] = []
    annotation: object = Manifest
    while remainder:
        if fields.is_map(annotation):
            return [*path, remainder]
        match = SEGMENT.match(remainder)
        if match is None:
            raise OverrideError([spelled], "is not a path.", "Write it like train.updates or rewards[0].weight.")
        for segment in segments(match):
            annotation = _step(annotation, path, segment)
            path.append(segment)
        remainder = remainder[match.end() :]
        if remainder and not remainder.startswith("."):
            raise OverrideError([spelled], "is not a path.", "Write it like train.updates or rewards[0].weight.")
        remainder = remainder[1:]
    return path


def _step(annotation: object, path: list[Segment], segment: Segment) -> object:
    inside = fields.at(annotation, [segment])
    if inside is not None:
        return inside
    if (model := fields.section(annotation)) is not None and isinstance(segment, str):
        raise OverrideError([*path, segment], "this is not a known field.", did_you_mean(segment, fields.fields(model)))
    if fields.item(annotation) is not None:
        raise OverrideError(path, f"is a list and has no {segment}.", f"Name an item: {fields.spell([*path, 0])}.")
    raise OverrideError(path, f"has nothing inside, so no {segment}.", f"Set it whole: {fields.spell(path)}=VALUE.")


def _put(document: dict[str, Any], path: list[Segment], value: object) -> None:
    """Set the value at the path, and create missing mappings.

    Raises OverrideError if the path leads through a value that is not a mapping, or to
    an item that a list does not have.
    """
    container: Any = document
    for depth, (segment, following) in enumerate(zip(path, [*path[1:], None], strict=True)):
        if isinstance(segment, int) and not (isinstance(container, list) and segment < len(container)):
            length = len(container) if isinstance(container, list) else 0
            name = fields.spell(path[:depth])
            raise OverrideError(
                path[: depth + 1],
                f"{name} has {counted(length, 'item')}, counted from 0.",
                f"Set it whole: {name}=[...].",
            )
        if isinstance(segment, str) and not isinstance(container, dict):
            raise OverrideError(
                path[:depth], "is not a mapping in this manifest.", "Correct it there, or set it whole."
            )
        if following is None:
            container[segment] = value
            return
        if isinstance(segment, str) and container.get(segment) is None:
            container[segment] = [] if isinstance(following, int) else {}
        container = container[segment]

"""`--set path=value`: changing a document before it is parsed."""

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from qwen35_trainer.spec import fields
from qwen35_trainer.spec.document import parse_value
from qwen35_trainer.spec.fields import Segment
from qwen35_trainer.spec.manifest import Manifest
from qwen35_trainer.spec.problems import ManifestError, Problem, counted, did_you_mean

SEGMENT = re.compile(r"([^.\[\]]+)((?:\[\d+\])*)")


class RefusedError(ValueError):
    """An override that cannot be applied."""

    def __init__(self, path: Sequence[Segment], message: str, fix: str) -> None:
        super().__init__(message)
        self.problem = Problem(fields.spell(path), message, fix)


def apply_overrides(document: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of the document with each `path=value` applied in turn; the value is YAML, `spec.` may be left out.

    Raises ManifestError, without a file, that names every override that does not fit.
    """
    changed, problems = override(document, overrides)
    if problems:
        raise ManifestError(None, problems)
    return changed


def override(document: Mapping[str, Any], overrides: Sequence[str]) -> tuple[dict[str, Any], list[Problem]]:
    """As `apply_overrides`, but hands back the problems beside what could be applied."""
    changed, problems = copy.deepcopy(dict(document)), []
    for text in overrides:
        try:
            path, value = _read(text)
            _put(changed, path, value)
        except RefusedError as refused:
            problems.append(refused.problem)
    return changed, problems


def _read(text: str) -> tuple[list[Segment], object]:
    spelled, equals, written = text.partition("=")
    if not equals:
        raise RefusedError([text], "has no value.", f"Write {text}=VALUE.")
    path = _path(spelled.strip())
    try:
        return path, parse_value(written)
    except yaml.YAMLError:
        raise RefusedError(path, f"{written} is not valid YAML.", "Quote the value, for the shell too.") from None


def _path(spelled: str) -> list[Segment]:
    """The segments of a path that exists in the models; below a map with free keys the rest is one key."""
    first = re.split(r"[.\[]", spelled)[0]
    rest = spelled if first in fields.fields(Manifest) else f"spec.{spelled}"
    path: list[Segment] = []
    annotation: object = Manifest
    while rest:
        if fields.is_map(annotation):
            return [*path, rest]
        match = SEGMENT.match(rest)
        if match is None:
            raise RefusedError([spelled], "is not a path.", "Write it like train.updates or rewards[0].weight.")
        for segment in (match[1], *map(int, re.findall(r"\d+", match[2]))):
            annotation = _step(annotation, path, segment)
            path.append(segment)
        rest = rest[match.end() :]
        if rest and not rest.startswith("."):
            raise RefusedError([spelled], "is not a path.", "Write it like train.updates or rewards[0].weight.")
        rest = rest[1:]
    return path


def _step(annotation: object, path: list[Segment], segment: Segment) -> object:
    inside = fields.at(annotation, [segment])
    if inside is not None:
        return inside
    if (model := fields.section(annotation)) is not None and isinstance(segment, str):
        raise RefusedError([*path, segment], "this is not a known field.", did_you_mean(segment, fields.fields(model)))
    if fields.item(annotation) is not None:
        raise RefusedError(path, f"is a list and has no {segment}.", f"Name an item: {fields.spell([*path, 0])}.")
    raise RefusedError(path, f"has nothing inside, so no {segment}.", f"Set it whole: {fields.spell(path)}=VALUE.")


def _put(document: dict[str, Any], path: list[Segment], value: object) -> None:
    """Set the value; mappings on the way that are missing are made, list items are not."""
    here: Any = document
    for depth, (segment, following) in enumerate(zip(path, [*path[1:], None], strict=True)):
        if isinstance(segment, int) and not (isinstance(here, list) and segment < len(here)):
            length = len(here) if isinstance(here, list) else 0
            name = fields.spell(path[:depth])
            raise RefusedError(
                path[: depth + 1],
                f"{name} has {counted(length, 'item')}, counted from 0.",
                f"Set it whole: {name}=[...].",
            )
        if isinstance(segment, str) and not isinstance(here, dict):
            raise RefusedError(path[:depth], "is not a mapping in this manifest.", "Correct it there, or set it whole.")
        if following is None:
            here[segment] = value
            return
        if isinstance(segment, str) and here.get(segment) is None:
            here[segment] = [] if isinstance(following, int) else {}
        here = here[segment]

"""Translates the validation errors of pydantic into problems of the manifest."""

import json
from collections.abc import Sequence
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from qwen35_trainer.manifest import absent, fields, foreign, renamed
from qwen35_trainer.manifest.base import NOT_IN_HOME
from qwen35_trainer.manifest.fields import Segment
from qwen35_trainer.manifest.problems import Problem, did_you_mean, near

EXPECTED_TYPES = {
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
}
BOUNDS = {
    "greater_than_equal": ("{value} is less than {ge}.", "Use at least {ge}."),
    "greater_than": ("{value} is not above {gt}.", "Use more than {gt}."),
    "less_than_equal": ("{value} is more than {le}.", "Use at most {le}."),
    "less_than": ("{value} is not below {lt}.", "Use less than {lt}."),
    "too_short": ("has {length} items.", "Give at least {min_length}."),
    "too_long": ("has {length} items.", "Give at most {max_length}."),
    "string_too_short": ("{value} is too short.", "Give at least {min_length} characters."),
    "string_too_long": ("{value} has {length} characters.", "Give at most {max_length}."),
    "string_pattern_mismatch": ("{value} has an invalid form.", "It must match {pattern}"),
    "finite_number": ("{value} is not finite.", "Give a finite number."),
}


def explain(
    error: ValidationError | Sequence[ErrorDetails],
    document: object,
    model: type[BaseModel],
    prefix: tuple[Segment, ...],
) -> list[Problem]:
    """Return one problem for each invalid field that pydantic reports.

    error: pydantic's error, or some of its details. document: the parsed YAML that was validated with the class
    `model`. prefix: path of the document in the manifest.
    """
    problems: dict[str, Problem] = {}
    details = error.errors() if isinstance(error, ValidationError) else error
    for detail in details:
        loc = _in_document(detail["loc"], document)
        # A list whose items are all wrong counts as empty.
        if detail["type"] == "too_short" and any(
            other["loc"][: len(loc)] == loc and other != detail for other in details
        ):
            continue
        path = fields.spell((*prefix, *loc)) or "manifest"
        message, fix = _message_and_fix(detail, loc, model)
        # Each member of a union reports its own error for the same value.
        problems.setdefault(path, Problem(path, message, fix))
    return list(problems.values())


def _in_document(loc: tuple[Segment, ...], document: object) -> tuple[Segment, ...]:
    """Return pydantic's location of an error without the names of union members and keys, which are not part of the
    document's path.
    """
    kept: list[Segment] = []
    for segment in loc:
        if isinstance(document, (list, tuple)) and isinstance(segment, int):
            document = document[segment] if segment < len(document) else None
        elif isinstance(document, dict) and segment != "[key]":
            document = document.get(segment)
        else:
            break
        kept.append(segment)
    return tuple(kept)


def _message_and_fix(detail: ErrorDetails, loc: tuple[Segment, ...], model: type[BaseModel]) -> tuple[str, str]:
    kind, value, bounds = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "missing":
        return "is required.", f"Add it: {_what(model, loc)}"
    if kind == "extra_forbidden":
        return "this is not a known field.", _instead(loc, model)
    if kind == "literal_error":
        return _for_literal(value, get_args(fields.bare(fields.at(model, loc))))
    if kind == "recursion_loop":
        return "lists and mappings are nested too deeply.", "Remove levels of nesting."
    if get_origin(fields.bare(fields.at(model, loc))) in (Union, UnionType):
        wrong = "too long" if isinstance(value, str) else _kind(value)
        return f"{show(value)} is {wrong}.", "Give a short string, a number, true or false."
    if kind == "string_pattern_mismatch" and (better := _for_pattern(value, bounds["pattern"], _field(model, loc))):
        return better
    if kind in EXPECTED_TYPES:
        return f"expected {EXPECTED_TYPES[kind]}, got {_typed(value)}.", _retyped(kind, value)
    return _for_bound(kind, value, bounds) or (f"{show(value)}: {detail['msg']}.", f"It is: {_what(model, loc)}")


def _instead(loc: tuple[Segment, ...], model: type[BaseModel]) -> str:
    """Return what to write in place of an unknown field, as text.

    This is the field's present name if it was renamed, another way if this project does not have the setting, this
    project's name if it is a field of verl or TRL, or else similar names of fields.
    """
    if (new := renamed.field(loc)) is not None:
        return f"Renamed to spec.{new}."
    path = [part for part in loc if isinstance(part, str)]
    if (instead := absent.answer(path)) is not None:
        return instead
    parent, name = fields.section(fields.at(model, loc[:-1])), str(loc[-1])
    names = fields.fields(parent) if parent else {}
    theirs = foreign.answer(path, model)
    if theirs is None:
        return did_you_mean(name, names)
    return f"{theirs} {did_you_mean(name, names)}" if near(name, names) else theirs


def _for_literal(value: object, names: tuple[Any, ...]) -> tuple[str, str]:
    if isinstance(value, str) and (new := renamed.VALUES.get(value)) in names:
        return f"{show(value)} is not one of {', '.join(map(str, names))}.", f"Renamed to {new}."
    return f"{show(value)} is not one of {', '.join(map(str, names))}.", did_you_mean(str(value), map(str, names))


def _for_pattern(value: object, pattern: str, field: FieldInfo | None) -> tuple[str, str] | None:
    if pattern == NOT_IN_HOME:
        return (
            f"{show(value)} starts with ~, which is not expanded.",
            "Write the path in full, or relative to the manifest.",
        )
    if field and field.examples:
        return f"{show(value)} has an invalid form.", f"Write it like {field.examples[0]}."
    return None


def _for_bound(kind: str, value: object, bounds: dict[str, Any]) -> tuple[str, str] | None:
    if kind not in BOUNDS:
        return None
    message, fix = BOUNDS[kind]
    details = bounds | {"value": show(value), "length": len(value) if isinstance(value, (str, list, dict)) else 0}
    return message.format(**details), fix.format(**details)


def show(value: object) -> str:
    """Return a value as a manifest would spell it: as JSON text, shortened to 60 characters."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _kind(value: object) -> str:
    names = {bool: "true or false", int: "an integer", float: "a number", str: "a string", dict: "a mapping"}
    return (
        "empty"
        if value is None
        else "a list"
        if isinstance(value, (list, tuple))
        else names.get(type(value), f"a {type(value).__name__}")
    )


def _typed(value: object) -> str:
    """Return a value with its type, such as `the string "300"`."""
    if value is None or isinstance(value, bool):
        return "no value" if value is None else show(value)
    return f"the {_kind(value).removeprefix('a ').removeprefix('an ')} {show(value)}"


def _retyped(kind: str, value: object) -> str:
    if kind == "string_type" and isinstance(value, (bool, int, float)):
        return f'Quote it: "{show(value)}".'
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        return f"Write {int(value)}."
    if kind in ("int_type", "float_type") and isinstance(value, str):
        try:
            number = float(value) if kind == "float_type" else int(value)
        except ValueError:
            return f"Give {EXPECTED_TYPES[kind]}."
        return f"Write it without quotes: {number}."
    return f"Give {EXPECTED_TYPES[kind]}."


def _what(model: type[BaseModel], loc: tuple[Segment, ...]) -> str:
    """Return the first sentence of the description of the field at the path `loc`, or "" if there is no such field."""
    field = _field(model, loc)
    description = (field.description or "") if field else ""
    return description.split(". ")[0].rstrip(".") + "."


def _field(model: type[BaseModel], loc: tuple[Segment, ...]) -> FieldInfo | None:
    parent = fields.section(fields.at(model, loc[:-1]))
    return fields.fields(parent).get(str(loc[-1])) if parent and loc else None

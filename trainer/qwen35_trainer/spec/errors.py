"""Field errors of pydantic, told as problems of the manifest."""

import json
from collections.abc import Sequence
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from qwen35_trainer.spec import fields, foreign
from qwen35_trainer.spec.fields import Segment
from qwen35_trainer.spec.problems import Problem, did_you_mean, near

WANTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a text",
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
    "string_pattern_mismatch": ("{value} has characters that do not belong.", "It must match {pattern}"),
    "finite_number": ("{value} is not finite.", "Give a finite number."),
}
# Plain words that YAML reads as booleans, among them a value of ours.


def explain(
    error: ValidationError | Sequence[ErrorDetails],
    document: object,
    model: type[BaseModel],
    prefix: tuple[Segment, ...],
) -> list[Problem]:
    """One problem for each field that is wrong; `prefix` is where the document stands in the manifest."""
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
        message, fix = _told(detail, loc, model)
        # Each member of a union reports its own error for the same value.
        problems.setdefault(path, Problem(path, message, fix))
    return list(problems.values())


def _in_document(loc: tuple[Segment, ...], document: object) -> tuple[Segment, ...]:
    """The location without the parts that pydantic adds for members of unions and for keys."""
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


def _told(detail: ErrorDetails, loc: tuple[Segment, ...], model: type[BaseModel]) -> tuple[str, str]:
    kind, value, bounds = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "missing":
        return "is required.", f"Add it: {_what(model, loc)}"
    if kind == "extra_forbidden":
        return "this is not a known field.", _instead(loc, model)
    if kind == "literal_error":
        return _told_literal(value, get_args(fields.bare(fields.at(model, loc))))
    if kind == "recursion_loop":
        return "lists and mappings are nested too deeply.", "Remove levels of nesting."
    if get_origin(fields.bare(fields.at(model, loc))) in (Union, UnionType):
        wrong = "too long" if isinstance(value, str) else _kind(value)
        return f"{show(value)} is {wrong}.", "Give a short text, a number, true or false."
    if kind == "string_pattern_mismatch" and (examples := (field.examples if (field := _field(model, loc)) else None)):
        return f"{show(value)} has another form.", f"Write it like {examples[0]}."
    if kind in WANTED:
        return f"{show(value)} is {_kind(value)}, not {WANTED[kind]}.", _retyped(kind, value)
    return _told_bound(kind, value, bounds) or (f"{show(value)}: {detail['msg']}.", f"It is: {_what(model, loc)}")


def _instead(loc: tuple[Segment, ...], model: type[BaseModel]) -> str:
    """What to write for a field that does not exist: ours for another trainer's name, one of a similar name."""
    parent, name = fields.section(fields.at(model, loc[:-1])), str(loc[-1])
    known = fields.fields(parent) if parent else {}
    theirs = foreign.answer([part for part in loc if isinstance(part, str)], model)
    if theirs is None:
        return did_you_mean(name, known)
    return f"{theirs} {did_you_mean(name, known)}" if near(name, known) else theirs


def _told_literal(value: object, known: tuple[Any, ...]) -> tuple[str, str]:
    return f"{show(value)} is not one of {', '.join(map(str, known))}.", did_you_mean(str(value), map(str, known))


def _told_bound(kind: str, value: object, bounds: dict[str, Any]) -> tuple[str, str] | None:
    if kind not in BOUNDS:
        return None
    message, fix = BOUNDS[kind]
    told = bounds | {"value": show(value), "length": len(value) if isinstance(value, (str, list, dict)) else 0}
    return message.format(**told), fix.format(**told)


def show(value: object) -> str:
    """A value as the manifest would have it, cut to a readable length."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _kind(value: object) -> str:
    names = {bool: "true or false", int: "an integer", float: "a number", str: "a text", dict: "a mapping"}
    return (
        "empty"
        if value is None
        else "a list"
        if isinstance(value, (list, tuple))
        else names.get(type(value), f"a {type(value).__name__}")
    )


def _retyped(kind: str, value: object) -> str:
    if kind == "string_type" and isinstance(value, (bool, int, float)):
        return f'Quote it: "{show(value)}".'
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        return f"Write {int(value)}."
    if kind in ("int_type", "float_type") and isinstance(value, str):
        try:
            number = float(value) if kind == "float_type" else int(value)
        except ValueError:
            return f"Give {WANTED[kind]}."
        return f"Write it without quotes: {number}."
    return f"Give {WANTED[kind]}."


def _what(model: type[BaseModel], loc: tuple[Segment, ...]) -> str:
    """The first sentence of the field's description."""
    field = _field(model, loc)
    description = (field.description or "") if field else ""
    return description.split(". ")[0].rstrip(".") + "."


def _field(model: type[BaseModel], loc: tuple[Segment, ...]) -> FieldInfo | None:
    parent = fields.section(fields.at(model, loc[:-1]))
    return fields.fields(parent).get(str(loc[-1])) if parent and loc else None

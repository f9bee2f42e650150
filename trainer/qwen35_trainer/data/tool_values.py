"""Converts the text of a tool's argument to the type in the tool's JSON schema.

Only `tool_calls` uses this module, which only tests use today.
"""

import ast
import json
import math
import re
import warnings
from collections.abc import Mapping

type JsonValue = bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None

_INTEGER = re.compile(r"[+-]?[0-9]+")
_DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_INTEGER_TYPES = ("int", "uint", "long", "short", "unsigned")
_NUMBER_TYPES = ("num", "float", "double")


def typed_value(text: str, schema: Mapping[str, object]) -> tuple[JsonValue, str | None]:
    """Convert the text of an argument to a type that its JSON schema allows. Returns the value, and a problem or None.

    If the schema allows several types, the first that fits is used, in the order null, boolean, integer, number,
    object, array, string. A text that fits no type is returned unchanged, with a problem. If the schema allows only
    boolean, or only boolean and null, False is returned instead of the text, with the problem, as in vLLM's qwen3_coder
    parser and in verl. "null" in upper or lower case is read as null for every type, as in these two parsers. If the
    schema allows null, "None" is also read as null, because Qwen3.5's template writes null as "None". Objects and arrays
    are read as JSON, or otherwise as Python literals, which are parsed and never executed.
    """
    types = _types(schema)
    written = text.strip()
    if written.lower() == "null" or (written == "None" and types & {"null", "any"}):
        return None, None
    reasons: list[str] = []
    for kind, read in _READERS.items():
        try:
            if kind in types:
                return read(written), None
        except ValueError as reason:
            reasons.append(str(reason))
    if types & {"string", "any"}:
        return text, None
    return False if types - {"null"} == {"boolean"} else text, " and ".join(reasons) or f"{_shown(text)} is not null"


def _types(schema: Mapping[str, object]) -> set[str]:
    """Return the names of the types that a schema allows (null, boolean, integer, number, object, array, string).

    Returns {"any"} if the schema names no type.
    """
    named = schema.get("type")
    types = [named] if isinstance(named, str) else list(named) if isinstance(named, list | tuple) else []
    kinds = {_kind(str(each)) for each in types}
    for branch in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(branch)
        for part in parts if isinstance(parts, list | tuple) else ():
            kinds |= _types(part) if isinstance(part, Mapping) else set()
    choices = schema.get("enum")
    if not kinds and isinstance(choices, list | tuple) and all(isinstance(choice, str) for choice in choices):
        return {"string"}
    return kinds or {"any"}


def _kind(name: str) -> str:
    """Return the JSON schema type that the name `name` stands for; "any" if it is unknown.

    The name may also be one of a programming language, such as `int`.
    """
    name = name.strip().lower()
    if name.startswith(_INTEGER_TYPES):
        return "integer"
    if name.startswith(_NUMBER_TYPES):
        return "number"
    beginnings = {"bool": "boolean", "dict": "object", "object": "object", "arr": "array", "list": "array"}
    for beginning, kind in beginnings.items():
        if name.startswith(beginning):
            return kind
    return name if name in ("null", "string", "any") else "string" if name in ("str", "text", "enum") else "any"


def _boolean(text: str) -> JsonValue:
    if text.lower() not in ("true", "false"):
        raise ValueError(f"{_shown(text)} is neither true nor false")
    return text.lower() == "true"


def _integer(text: str) -> JsonValue:
    if not _INTEGER.fullmatch(text):
        raise ValueError(f"{_shown(text)} is not an integer")
    return int(text)


def _number(text: str) -> JsonValue:
    if _INTEGER.fullmatch(text):
        return int(text)
    if not _DECIMAL.fullmatch(text) or not math.isfinite(number := float(text)):
        raise ValueError(f"{_shown(text)} is not a number")
    return int(number) if number.is_integer() else number


def _object(text: str) -> JsonValue:
    if isinstance(value := _structure(text), dict):
        return value
    raise ValueError(f"{_shown(text)} is not an object")


def _array(text: str) -> JsonValue:
    if isinstance(value := _structure(text), list):
        return value
    raise ValueError(f"{_shown(text)} is not an array")


def _structure(text: str) -> JsonValue:
    """Parse a text as JSON, or otherwise as a Python literal. Raises ValueError if it is neither."""
    for read in (json.loads, ast.literal_eval):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)  # a literal of the model may have a doubtful escape
                return _plain(read(text))
        # These are the errors of both parsers for invalid or deeply nested text.
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
    raise ValueError(f"{_shown(text)} is neither JSON nor a Python literal")


def _plain(value: object) -> JsonValue:
    """Return the value, with tuples as lists, if JSON can represent it. Raises ValueError otherwise."""
    match value:
        case None | bool() | int() | str():
            return value
        case float() if math.isfinite(value):
            return value
        case list() | tuple():
            return [_plain(each) for each in value]
        case dict() if all(isinstance(key, str) for key in value):
            return {key: _plain(each) for key, each in value.items()}
    raise ValueError(f"JSON has no {type(value).__name__}")


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:40]}…")


_READERS = {
    "boolean": _boolean,
    "integer": _integer,
    "number": _number,
    "object": _object,
    "array": _array,
    "any": _structure,
}

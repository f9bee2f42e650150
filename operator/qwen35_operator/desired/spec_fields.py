"""Turns a spec into plain data, without some of its fields.

The values are taken from the models directly, so that the result does not depend on the serialization of a pydantic
version.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from qwen35_operator.desired.first_defaults import FIRST_DEFAULTS
from qwen35_trainer.manifest.base import Section

type LeftOut = Callable[[Section, str, str, object], bool]
"""Function that returns whether to leave a field out.

It is called with the section, the field's name in Python, the field's path, and the field's value as plain data.
"""

_REQUIRED: Final = object()
"""Stands for the first default of a required field. It differs from every value."""


def plain_fields(section: Section, left_out: LeftOut, path: str = "") -> dict[str, Any]:
    """Return the fields of a section that are not left out, as plain data.

    An inner section is left out too if none of its fields remain and its own default is not None. left_out: returns
    whether a field is left out. path: the section's path, with a dot at its end; empty for the spec.
    """
    fields = {}
    for name, field in type(section).model_fields.items():
        written = field.alias or name
        value = _plain(getattr(section, name), left_out, f"{path}{written}")
        is_empty = value == {} and isinstance(field.default, Section)
        if not is_empty and not left_out(section, name, f"{path}{written}", value):
            fields[written] = value
    return fields


def has_first_default(path: str, value: object) -> bool:
    """Return whether `value` is the default that the field at `path` had in the release that introduced the field."""
    return bool(FIRST_DEFAULTS.get(path, _REQUIRED) == value)


def _plain(value: object, left_out: LeftOut, path: str) -> object:
    """Return a field's value as plain data: sections as mappings, tuples as lists."""
    if isinstance(value, Section):
        return plain_fields(value, left_out, f"{path}.")
    if isinstance(value, tuple | list):
        return [_plain(item, left_out, f"{path}[]") for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item, left_out, f"{path}{{}}") for key, item in value.items()}
    return value

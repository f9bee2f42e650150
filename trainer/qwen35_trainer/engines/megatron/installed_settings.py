"""The settings of the installed megatron-core: names and types of the fields of its class TransformerConfig.

They are read from the source of the package. An import would take seconds and load torch, and on NPUs it would come before
MindSpeed's (`engines/accelerator_libraries.py`).
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from qwen35_trainer.manifest import Problem
from qwen35_trainer.manifest.megatron import FIELD, RESERVED_SETTINGS, SettingValue
from qwen35_trainer.manifest.problems import either, near

SOURCES = (
    ("model_parallel_config.py", "ModelParallelConfig"),
    ("transformer/transformer_config.py", "TransformerConfig"),
)
"""Files in the package megatron.core, and the class in each, whose fields are the settings. The second class is derived from the first."""
ENUMS = "transformer/enums.py"
"""File in the package megatron.core with the enumerations that are types of settings."""
WORDS = {"bool": "true or false", "int": "an integer", "float": "a number", "str": "a string"}
"""Name of a type in Python → its values, as the text of a message."""


@dataclass(frozen=True)
class SettingType:
    """The type of a setting, as far as a manifest can contain its values."""

    types: frozenset[str]
    """Those of bool, int, float and str whose values the setting may have."""
    values: tuple[SettingValue, ...]
    """Further values that it may have: those of a `Literal`, and the names of an enumeration's members."""
    annotation: str
    """The type as it stands in the source."""

    def accepts(self, value: SettingValue) -> bool:
        """Whether a setting of this type may have a value of a manifest."""
        if any(type(value) is type(each) and value == each for each in self.values):
            return True
        return type(value).__name__ in self.types or (type(value) is int and "float" in self.types)

    def __str__(self) -> str:
        """The possible values as text; an empty text if a manifest can contain none of them."""
        words = [text for name, text in WORDS.items() if name in self.types]
        return either([*words, *map(str, self.values)]) if words or self.values else ""


def problems(settings: Mapping[str, SettingValue], version: str) -> Iterator[Problem]:
    """Yield a problem for each setting that the installed megatron-core does not have, or not with a value of this type.

    Reserved settings, which the checks of the manifest refuse, are left out. version: of the installed megatron-core, for
    messages.
    """
    if not settings:
        return
    types = installed()
    for name, value in settings.items():
        if name.replace("-", "_") in RESERVED_SETTINGS:
            continue
        path = f"{FIELD}.{name}"
        if name not in types:
            matches = near(name, types.keys() - RESERVED_SETTINGS.keys())
            fix = "Use the name of a field of megatron-core's class TransformerConfig."
            if matches:
                fix = f"Did you mean {either(matches)}?"
            yield Problem(path, f"megatron-core {version} has no such setting.", fix)
        elif not types[name].accepts(value):
            yield _mistyped(path, value, types[name], version)


def _mistyped(path: str, value: SettingValue, expected: SettingType, version: str) -> Problem:
    if not (possible := str(expected)):
        message = f"megatron-core {version} expects {expected.annotation}, which a manifest cannot contain."
        return Problem(path, message, "Remove it.")
    message = f"megatron-core {version} expects {possible}, not {json.dumps(value, ensure_ascii=False)}."
    return Problem(path, message, f"Set it to {possible}.")


@cache
def installed() -> Mapping[str, SettingType]:
    """Return name → type of every setting of the installed megatron-core; {} if it is not installed."""
    package = find_spec("megatron.core") if find_spec("megatron") is not None else None
    if package is None or package.origin is None:
        return {}
    folder = Path(package.origin).parent
    members = {node.name: _members(node) for node in _classes(folder / ENUMS)}
    types: dict[str, SettingType] = {}
    for file, name in SOURCES:
        [settings] = [node for node in _classes(folder / file) if node.name == name]
        for field in settings.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                types[field.target.id] = _type_of(field.annotation, members)
    return {name: kind for name, kind in types.items() if not name.startswith("_")}


def _classes(file: Path) -> list[ast.ClassDef]:
    return [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)]


def _members(enumeration: ast.ClassDef) -> list[str]:
    """Return the names of an enumeration's members; [] of any other class."""
    if not any(ast.unparse(base).endswith("Enum") for base in enumeration.bases):
        return []
    targets = [node.targets[0] for node in enumeration.body if isinstance(node, ast.Assign)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _type_of(annotation: ast.expr, members: Mapping[str, list[str]]) -> SettingType:
    """Return the type that an annotation in the source stands for.

    Lists, functions and classes of torch are left out, because a manifest cannot contain them. members: name of an
    enumeration → names of its members.
    """
    types: set[str] = set()
    values: list[SettingValue] = []
    remaining = [annotation]
    while remaining:
        node = remaining.pop(0)
        if isinstance(node, ast.Name) and node.id in WORDS:
            types.add(node.id)
        elif isinstance(node, ast.Name):
            values += members.get(node.id, [])
        elif isinstance(node, ast.BinOp):
            remaining += [node.left, node.right]
        elif isinstance(node, ast.Subscript):
            inside = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            kind = ast.unparse(node.value).rpartition(".")[2]
            if kind == "Literal":
                constants = [each.value for each in inside if isinstance(each, ast.Constant)]
                values += [each for each in constants if isinstance(each, (str, int, float))]
            elif kind in ("Optional", "Union"):
                remaining += inside
    return SettingType(frozenset(types), tuple(values), ast.unparse(annotation))

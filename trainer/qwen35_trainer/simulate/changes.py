"""`path=value`: changing a load by the names of its fields.

    lane.after_tokens=6000    pools[1].engine.slots=128    pools.engine.base=0.02 (every pool)    cv=1.5 (a short name)

A dash in a name is an underscore, a value is YAML. All changes are made before anything is checked: their order does not
decide which of them are legal.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final, get_args, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from qwen35_trainer.pipeline.buffer import OnMissedDeadline
from qwen35_trainer.simulate.load import Load, Policy
from qwen35_trainer.spec.document import parse_value
from qwen35_trainer.spec.problems import counted, did_you_mean

SHORT: Final = {
    "mean": "lengths.mean",
    "cv": "lengths.cv",
    "cap": "lengths.cap",
    "missed_deadline": "on_missed_deadline",
    "engines": "pools.count",
    "slots": "pools.engine.slots",
    "after_tokens": "lane.after_tokens",
}
"""Names of what is changed most. Fields of the load itself, such as policy and seed, are short already."""
_SEGMENT: Final = re.compile(r"([a-z_]+)(?:\[(\d+)\])?")
# What only deadline-first has: under another policy it does not apply, unless it was asked for, which is refused.
_DEADLINE_FIRST_ONLY: Final = {"on_missed_deadline": OnMissedDeadline.WAIT, "adaptive": False}


class LoadRefused(ValueError):
    """A load that cannot be simulated, with every problem found."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n  ".join([counted(len(self.problems), "problem"), *self.problems]))


class ChangeRefused(LoadRefused):
    """A name or a value that cannot be read, whatever the load is."""


@dataclass(frozen=True)
class Change:
    """A field by its path, and its value: YAML text, or the value itself."""

    path: str
    value: object

    @classmethod
    def parse(cls, text: str) -> Change:
        """From `path=value`. Raises ChangeRefused where there is no value."""
        path, equals, value = text.partition("=")
        if not equals:
            raise ChangeRefused([f"{text}: has no value; write {text}=VALUE"])
        return cls(path, value)

    @property
    def segments(self) -> tuple[str, ...]:
        """The path, written out."""
        first, *rest = self.path.strip().replace("-", "_").split(".")
        return (*SHORT.get(first, first).split("."), *rest)

    @property
    def field(self) -> str:
        """The path without places in lists: two changes of the same kind of field have the same."""
        return ".".join(segment.partition("[")[0] for segment in self.segments)


def changed(load: Load, changes: Sequence[Change]) -> Load:
    """The load with every change made.

    Raises LoadRefused with every problem of changes and load, as ChangeRefused when one of a change is among them.
    """
    draft = _Draft(load)
    problems: list[str] = []
    for change in changes:
        try:
            draft.put(change.segments, change.value)
        except ValueError as error:
            problems.append(f"{change.path}: {error}")
    refused = ChangeRefused if problems else LoadRefused
    draft.forget_deadlines({change.segments[0] for change in changes})
    built: Load = draft.build(problems)
    if problems:
        raise refused(problems)
    return built


class _Draft:
    """A dataclass under change. Its parts that are dataclasses are drafts too."""

    def __init__(self, original: Any) -> None:  # noqa: ANN401  (any dataclass)
        self._original = original
        self._parts: dict[str, Any] = {each.name: _drafted(getattr(original, each.name)) for each in fields(original)}

    def put(self, path: Sequence[str], value: object) -> None:
        """Raises ValueError that says what is wrong with path or value."""
        segment, *rest = path
        match = _SEGMENT.fullmatch(segment)
        name = match[1] if match else segment
        if name not in self._parts:
            raise ValueError(f"there is no {name} in {self._kind}. {did_you_mean(name, self._known(path))}")
        if not rest and not (match and match[2]):
            self._parts[name] = _drafted(self._typed(name, value))
            return
        if self._parts[name] is None:
            self._parts[name] = self._begun(name)
        for draft in self._inside(name, int(match[2]) if match and match[2] else None):
            if not rest:
                raise ValueError(f"name a field of it: {', '.join(draft._parts)}")
            draft.put(rest, value)

    def forget_deadlines(self, asked: set[str]) -> None:
        """Under another policy than deadline-first, drop what only that has and nobody asked for."""
        if self._parts["policy"] is not Policy.DEADLINE_FIRST:
            self._parts |= {name: value for name, value in _DEADLINE_FIRST_ONLY.items() if name not in asked}

    def build(self, problems: list[str]) -> Any:  # noqa: ANN401  (what it was made of)
        """The dataclass. What it refuses goes to problems, and the original stands in."""
        values = {name: _each(part, lambda draft: draft.build(problems)) for name, part in self._parts.items()}
        try:
            return type(self._original)(**values)
        except ValueError as error:
            problems += [problem for problem in str(error).split("; ") if problem not in problems]
            return self._original

    @property
    def _kind(self) -> str:
        return type(self._original).__name__.lower()

    def _known(self, path: Sequence[str]) -> list[str]:
        return [*self._parts, *(SHORT if isinstance(self._original, Load) and len(path) == 1 else ())]

    def _typed(self, name: str, value: object) -> object:
        if not isinstance(value, str):
            return value
        try:
            return TypeAdapter(self._hint(name)).validate_python(parse_value(value))
        except yaml.YAMLError:
            raise ValueError(f"{value} is not valid YAML; quote it, for the shell too") from None
        except ValidationError as error:
            found = [each for each in error.errors() if each["type"] != "none_required"]
            # A refusal of our own dataclasses comes as it is.
            said = dict.fromkeys(each["msg"].removeprefix("Value error, ") for each in found)
            raise ValueError(f"{value!r}: {', or '.join(said)}") from None

    def _hint(self, name: str) -> Any:  # noqa: ANN401  (an annotation)
        return get_type_hints(type(self._original))[name]

    def _begun(self, name: str) -> _Draft | None:
        """What a part that is absent begins as, when one of its fields is set."""
        kinds = [kind for kind in get_args(self._hint(name)) if is_dataclass(kind)]
        return _Draft(kinds[0]()) if kinds else None  # type: ignore[operator]  # a class, not an instance

    def _inside(self, name: str, index: int | None) -> list[_Draft]:
        part = self._parts[name]
        drafts = part if isinstance(part, list) else [part]
        if not all(isinstance(draft, _Draft) for draft in drafts):
            raise ValueError(f"{name} has nothing inside; set it whole: {name}=VALUE")
        if index is None:
            return drafts
        if index >= len(drafts):
            raise ValueError(f"{name} has {counted(len(drafts), 'item')}, counted from 0")
        return [drafts[index]]


def _drafted(value: object) -> object:
    if is_dataclass(value):
        return _Draft(value)
    if isinstance(value, tuple) and value and is_dataclass(value[0]):
        return [_Draft(each) for each in value]
    return value


def _each(part: object, build: Callable[[_Draft], object]) -> object:
    if isinstance(part, _Draft):
        return build(part)
    return tuple(build(each) for each in part) if isinstance(part, list) else part

"""Changes to a workload by `PATH=VALUE`, in the same syntax as `--set` (see `manifest.assignment`).

    lane.after_tokens=6000    pools[1].replica.slots=128    pools.replica.base=0.02 (every pool)    cv=1.5 (a short name)

A dash in a name counts as an underscore. The workload is checked only after all changes are made. If two changes set the
same field, the later one counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

from qwen35_trainer.formatting import counted
from qwen35_trainer.manifest.assignment import AssignmentError, read_value, split_assignment, split_path
from qwen35_trainer.manifest.fields import Segment
from qwen35_trainer.manifest.problems import did_you_mean
from qwen35_trainer.pipeline.buffer import MissedDeadlinePolicy
from qwen35_trainer.simulate.workload import BatchPolicy, Workload

SHORT_NAMES: Final = {
    "mean": "lengths.mean",
    "cv": "lengths.cv",
    "cap": "lengths.cap",
    "missed_deadline": "on_missed_deadline",
    "replicas": "pools.count",
    "slots": "pools.replica.slots",
    "after_tokens": "lane.after_tokens",
}
"""Short name → path, for the fields that are changed most often."""
_DEADLINE_FIRST_ONLY: Final = {"on_missed_deadline": MissedDeadlinePolicy.WAIT, "adaptive": False}
"""Fields that have an effect only with the policy deadline-first, each with its default.

With another policy, the default replaces the value in the manifest.
"""


class WorkloadRefused(ValueError):
    """Raised for a workload that cannot be simulated. `problems` lists every problem found."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n  ".join([counted(len(self.problems), "problem"), *self.problems]))


class ChangeRefused(WorkloadRefused):
    """Raised for a change that is wrong for every workload: its path does not exist, or its value does not fit the field."""


@dataclass(frozen=True)
class FieldChange:
    """A change of one field of the workload.

    path: path of the field, or a short name. value: the new value, as YAML text or as a Python value.
    """

    path: str
    value: object

    @classmethod
    def parse(cls, text: str) -> FieldChange:
        """Parse a change of the form `PATH=VALUE`. Raises ChangeRefused if the text has no equals sign."""
        try:
            return cls(*split_assignment(text))
        except AssignmentError as error:
            raise ChangeRefused([f"{text}: {error}"]) from None

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The names and indices of the full path.

        A short name is replaced by the path that it stands for, and dashes by underscores.
        """
        first, *later = split_path(self.path.strip().replace("-", "_"))
        return (*split_path(SHORT_NAMES.get(str(first), str(first))), *later)

    @property
    def field(self) -> str:
        """The full path without indices, so that it is the same for every item of a list:
        `pools.count` for `pools[1].count`.
        """
        return ".".join(segment for segment in self.segments if isinstance(segment, str))


def is_workload_path(path: str) -> bool:
    """Return whether a path begins with the name of a field of the workload, or with the short name of a field."""
    first = str(FieldChange(path, None).segments[0])
    return first in {field.name for field in fields(Workload)}


def apply_changes(workload: Workload, changes: Sequence[FieldChange]) -> Workload:
    """Return the workload with all changes applied.

    Raises WorkloadRefused with all problems of the changes and of the changed workload. The error is a ChangeRefused if
    a change is wrong for every workload.
    """
    draft = _Draft(workload)
    problems: list[str] = []
    for change in changes:
        try:
            draft.put(change.segments, change.value)
        except ValueError as error:
            problems.append(f"{change.path}: {error}")
    refusal = ChangeRefused if problems else WorkloadRefused
    draft.drop_deadline_fields({str(change.segments[0]) for change in changes})
    built: Workload = draft.build(problems)
    if problems:
        raise refusal(problems)
    return built


class _Draft:
    """A mutable copy of a dataclass.

    A field that contains a dataclass, or a list of dataclasses, contains drafts of them instead.
    """

    def __init__(self, original: Any) -> None:  # noqa: ANN401  (any dataclass)
        self._original = original
        self._parts: dict[str, Any] = {part.name: _drafted(getattr(original, part.name)) for part in fields(original)}

    def put(self, path: Sequence[Segment], value: object, parent: str = "the workload") -> None:
        """Set the field at `path` to `value`.

        Raises ValueError for a wrong path or value. parent: name of the object that contains the field, for the error.
        """
        name, *remainder = path
        if not isinstance(name, str) or name not in self._parts:
            raise ValueError(f"{parent} has no field {name}. {did_you_mean(str(name), self._known_names())}")
        if not remainder:
            self._parts[name] = _drafted(self._validated(name, value))
            return
        if self._parts[name] is None:
            self._parts[name] = self._default_part(name)
        index = remainder[0] if isinstance(remainder[0], int) else None
        if index is not None:
            remainder = remainder[1:]
        for draft in self._inner_drafts(name, index):
            if not remainder:
                raise ValueError(f"name a field of it: {', '.join(draft._parts)}")
            draft.put(remainder, value, name)

    def drop_deadline_fields(self, changed: set[str]) -> None:
        """If the workload's policy is not deadline-first, reset the fields that only this policy uses.

        A reset field has its default. changed: names of the fields that a change sets; these fields keep their values.
        """
        if self._parts["policy"] is not BatchPolicy.DEADLINE_FIRST:
            self._parts |= {name: value for name, value in _DEADLINE_FIRST_ONLY.items() if name not in changed}

    def build(self, problems: list[str]) -> Any:  # noqa: ANN401  (the type of the original)
        """Return the changed dataclass.

        If its values are invalid, append the reasons to `problems` and return the original.
        """
        values = {name: _map_drafts(part, lambda draft: draft.build(problems)) for name, part in self._parts.items()}
        try:
            return type(self._original)(**values)
        except ValueError as error:
            problems += [problem for problem in str(error).split("; ") if problem not in problems]
            return self._original

    def _known_names(self) -> list[str]:
        return [*self._parts, *(SHORT_NAMES if isinstance(self._original, Workload) else ())]

    def _validated(self, name: str, value: object) -> object:
        """Convert YAML text to the type of the field `name`. A value that is not text is returned unchanged.

        Raises ValueError for a text that does not have this type.
        """
        if not isinstance(value, str):
            return value
        try:
            return TypeAdapter(self._annotation(name)).validate_python(read_value(value))
        except ValidationError as error:
            details = [detail for detail in error.errors() if detail["type"] != "none_required"]
            # Messages of our own dataclasses need no prefix.
            messages = dict.fromkeys(detail["msg"].removeprefix("Value error, ") for detail in details)
            raise ValueError(f"{value!r}: {', or '.join(messages)}") from None

    def _annotation(self, name: str) -> Any:  # noqa: ANN401  (an annotation)
        return get_type_hints(type(self._original))[name]

    def _default_part(self, name: str) -> _Draft | None:
        """Return a draft with default values for the field `name`, whose value is None, so that its parts can be set.

        Returns None if the field cannot contain a dataclass.
        """
        classes = [option for option in get_args(self._annotation(name)) if is_dataclass(option)]
        return _Draft(classes[0]()) if classes else None  # type: ignore[operator]  # a class, not an instance

    def _inner_drafts(self, name: str, index: int | None) -> list[_Draft]:
        """Return the drafts in the field `name`: the draft of the field itself, or of the items of a list.

        index: the only item to return; None: all items. Raises ValueError if the field has no fields of its own, or no such item.
        """
        part = self._parts[name]
        drafts = part if isinstance(part, list) else [part]
        if not all(isinstance(draft, _Draft) for draft in drafts):
            raise ValueError(f"{name} has no fields; set it whole: {name}=VALUE")
        if index is None:
            return drafts
        if index >= len(drafts):
            raise ValueError(f"{name} has {counted(len(drafts), 'item')}, counted from 0")
        return [drafts[index]]


def _drafted(value: object) -> object:
    if is_dataclass(value):
        return _Draft(value)
    if isinstance(value, tuple) and value and is_dataclass(value[0]):
        return [_Draft(item) for item in value]
    return value


def _map_drafts(part: object, build: Callable[[_Draft], object]) -> object:
    """Apply `build` to a draft, or to each draft in a list. Any other `part` is returned unchanged."""
    if isinstance(part, _Draft):
        return build(part)
    return tuple(build(draft) for draft in part) if isinstance(part, list) else part

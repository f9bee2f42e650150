"""Finds the fields of the manifest in which runs differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from qwen35_trainer.comparison.row import ComparedRow
from qwen35_trainer.manifest.fixed import shown
from qwen35_trainer.manifest.training import TrainingSpec


def differing_settings(specs: Sequence[TrainingSpec]) -> tuple[ComparedRow, ...]:
    """Return a row for each field that not all specs set to the same value.

    Values are text; "not set" stands for a field that a spec does not have.

    Each spec includes all defaults. A field that an earlier release did not have counts with today's default.
    """
    flat = [dict(_fields("", spec.model_dump(mode="json", by_alias=True))) for spec in specs]
    paths = list(dict.fromkeys(path for fields in flat for path in fields))
    rows = []
    for path in paths:
        values = [fields.get(path) for fields in flat]
        if any(json.dumps(value) != json.dumps(values[0]) for value in values):
            rows.append(ComparedRow(path, tuple(shown(value) for value in values)))
    return tuple(rows)


def _fields(path: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield (path, value) of every field below `path`. Fields that are None or an empty list are left out.

    In a list of sections, the path of an item contains its index, such as rewards[0].
    """
    if isinstance(value, Mapping):
        for key, inside in value.items():
            yield from _fields(f"{path}.{key}" if path else str(key), inside)
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for place, item in enumerate(value):
            yield from _fields(f"{path}[{place}]", item)
    elif value is not None and value != []:
        yield path, value

"""Hashes the part of a spec with which an attempt runs. A changed hash ends the attempt, so no release may change the hash.

    stored spec ─► fields that are written ─► without live fields ─► without first defaults ─► hash

The API server writes the defaults of its release into every stored spec. A field with its *first* default, that of the
release that introduced it, therefore counts as absent: if a later release changes the default or adds a field, the
hashes of stored trainings stay the same. The hash reads the values of the models directly, so that it does not depend on
how a version of pydantic writes them. tests/upgrade compares it with the hashes of earlier releases.
"""

from collections.abc import Mapping
from typing import Any, Final
from weakref import WeakKeyDictionary

from qwen35_operator.api.training_resource import TrainingResource
from qwen35_operator.desired.first_defaults import FIRST_DEFAULTS
from qwen35_operator.desired.object_names import digest
from qwen35_trainer.manifest.base import Section

LIVE_FIELDS: Final = frozenset(
    {
        "suspend",
        "evaluation",
        "failurePolicy",
        "cleanupSecondsAfterFinished",
        "activeDeadlineSeconds",
        "rollout.nodes",
        "rollout.minNodes",
        "rollout.maxNodes",
        "rollout.autoscale",
        "checkpoint.everyUpdates",
        "checkpoint.keep",
        "checkpoint.export",
        "checkpoint.graceSeconds",
    }
)
"""Fields and sections of the spec that may change while an attempt runs, because the attempt takes over the new value or
does not use the field."""
_REQUIRED: Final = object()
"""Stands for the first default of a required field. It differs from every value, so that such a field always counts."""

_hashes: WeakKeyDictionary[TrainingResource, str] = WeakKeyDictionary()
"""Cache of the results by training: every reconcile of a running training needs the hash."""


def spec_hash(training: TrainingResource) -> str:
    """Return a hash of all fields whose change a running attempt cannot take over, so that it needs a new attempt."""
    if (known := _hashes.get(training)) is None:
        sections = _fields(training.spec, "")
        known = _hashes[training] = digest({section: value for section, value in sections.items() if value != {}})
    return known


def _fields(section: Section, path: str) -> dict[str, Any]:
    """Return the fields of a section that count, as plain data. path: the section's path, with a dot at its end."""
    counted = {}
    for name, field in type(section).model_fields.items():
        written = field.alias or name
        if name not in section.model_fields_set or f"{path}{written}" in LIVE_FIELDS:
            continue
        value = _plain(getattr(section, name), f"{path}{written}")
        absent = {} if isinstance(field.default, Section) else FIRST_DEFAULTS.get(f"{path}{written}", _REQUIRED)
        if value != absent:
            counted[written] = value
    return counted


def _plain(value: object, path: str) -> object:
    """Return a field's value as plain data: sections as mappings of the fields that count, tuples as lists."""
    if isinstance(value, Section):
        return _fields(value, f"{path}.")
    if isinstance(value, tuple | list):
        return [_plain(item, f"{path}[]") for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item, f"{path}{{}}") for key, item in value.items()}
    return value

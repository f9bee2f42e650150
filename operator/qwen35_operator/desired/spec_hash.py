"""Hashes the fields of a spec that a running attempt cannot change. A changed hash ends the attempt and starts another.

The API server admits a change of most of these fields only while `spec.suspend` is true (api/rules.py).

    stored spec ─► fields that are written ─► without live fields ─► without first defaults ─► hash

An upgrade of the operator must not change the hash of a stored training. The API server writes the defaults of the
installed CRD into every stored spec. A field with its *first* default (the default in the release that introduced the
field) therefore counts as absent. If a later release changes a default or adds a field, the hashes of stored trainings
stay the same. tests/upgrade compares the hashes with those of earlier releases.
"""

from typing import Final
from weakref import WeakKeyDictionary

from qwen35_operator.api.training_resource import TrainingResource
from qwen35_operator.desired.object_names import digest
from qwen35_operator.desired.spec_fields import has_first_default, plain_fields
from qwen35_trainer.manifest.base import Section

LIVE_FIELDS: Final = frozenset(
    {
        "suspend",
        "evaluation",
        "failurePolicy",
        "disruptionBudget",
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
"""Fields and sections of the spec that may change while an attempt runs.

Either the attempt takes over the new value, or only the operator uses the field.
"""
_hashes: WeakKeyDictionary[TrainingResource, str] = WeakKeyDictionary()
"""Cache of the results by training: every reconcile of a running training needs the hash."""


def spec_hash(training: TrainingResource) -> str:
    """Return a hash of all fields of the spec whose change needs a new attempt (all except LIVE_FIELDS)."""
    if (result := _hashes.get(training)) is None:
        sections = plain_fields(training.spec, _left_out)
        result = _hashes[training] = digest({section: value for section, value in sections.items() if value != {}})
    return result


def _left_out(section: Section, name: str, path: str, value: object) -> bool:
    return name not in section.model_fields_set or path in LIVE_FIELDS or has_first_default(path, value)

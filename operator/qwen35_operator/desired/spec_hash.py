"""Hashes the part of a spec with which an attempt runs. A changed hash ends the attempt, so no release may change the hash.

    stored spec ─► fields that are written ─► without live fields ─► without first defaults ─► hash

The API server writes the defaults of its release into every stored spec. A field with its *first* default, that of the
release that introduced it, therefore counts as absent: if a later release changes the default or adds a field, the
hashes of stored trainings stay the same. tests/upgrade compares them with the hashes of earlier releases.
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
_hashes: WeakKeyDictionary[TrainingResource, str] = WeakKeyDictionary()
"""Cache of the results by training: every reconcile of a running training needs the hash."""


def spec_hash(training: TrainingResource) -> str:
    """Return a hash of all fields whose change a running attempt cannot take over, so that it needs a new attempt."""
    if (result := _hashes.get(training)) is None:
        sections = plain_fields(training.spec, _left_out)
        result = _hashes[training] = digest({section: value for section, value in sections.items() if value != {}})
    return result


def _left_out(section: Section, name: str, path: str, value: object) -> bool:
    return name not in section.model_fields_set or path in LIVE_FIELDS or has_first_default(path, value)

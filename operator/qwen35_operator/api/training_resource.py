"""A Qwen35Training with its parsed spec."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from qwen35_trainer.manifest import TrainingSpec


@dataclass(frozen=True, eq=False)
class TrainingResource:
    """A Qwen35Training whose spec could be parsed.

    Instances are compared by identity, so that they can be the keys of caches.
    """

    name: str
    namespace: str
    uid: str
    generation: int
    spec: TrainingSpec
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    """Paths of fields that the installed CRD has and this operator does not know, so that `spec` lacks them: the CRD is that of a
    later release."""

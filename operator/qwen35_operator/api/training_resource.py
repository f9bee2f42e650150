"""A Qwen35Training with its parsed spec."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from qwen35_trainer.manifest import TrainingSpec


@dataclass(frozen=True, eq=False)
class TrainingResource:
    """One training whose spec could be read. Compared by identity, so that expensive results can be cached per object."""

    name: str
    namespace: str
    uid: str
    generation: int
    spec: TrainingSpec
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)

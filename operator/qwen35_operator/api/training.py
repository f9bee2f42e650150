"""A Qwen35Training as the operator works with it: who it is, and what it asks for."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from qwen35_trainer.spec import TrainingSpec


@dataclass(frozen=True, eq=False)
class Training:
    """One object whose spec could be read. Equal to itself only: what is costly to make of one is kept by it."""

    name: str
    namespace: str
    uid: str
    generation: int
    spec: TrainingSpec
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)

"""Conditions as metav1.Condition has them: one per type, whose transition time moves only with its status."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from qwen35_operator.api.v1alpha1 import Condition, ConditionStatus, TrainingStatus
from qwen35_operator.status.times import rfc3339
from qwen35_operator.status.vocabulary import ConditionType

LONGEST = 4096
"""Characters of a message: the schema allows eight times as many, but people read these."""


@dataclass(frozen=True)
class Finding:
    """A condition before it has a time."""

    status: ConditionStatus
    reason: str
    message: str = ""


def yes(reason: str, message: str = "") -> Finding:
    return Finding("True", reason, message)


def no(reason: str, message: str = "") -> Finding:
    return Finding("False", reason, message)


def conditions(
    findings: Mapping[ConditionType, Finding], earlier: TrainingStatus, generation: int, now: datetime
) -> tuple[Condition, ...]:
    """The findings as conditions, in their order."""
    before = {condition.type: condition for condition in earlier.conditions}
    return tuple(_condition(kind, finding, before.get(kind), generation, now) for kind, finding in findings.items())


def holds(status: TrainingStatus, kind: ConditionType) -> bool:
    """Whether the condition is True."""
    return any(condition.type == kind and condition.status == "True" for condition in status.conditions)


def since(status: TrainingStatus, kind: ConditionType) -> str | None:
    """When the condition last changed."""
    return next((condition.lastTransitionTime for condition in status.conditions if condition.type == kind), None)


def _condition(
    kind: ConditionType, finding: Finding, before: Condition | None, generation: int, now: datetime
) -> Condition:
    same = before is not None and before.status == finding.status
    return Condition(
        type=kind,
        status=finding.status,
        observedGeneration=generation,
        lastTransitionTime=before.lastTransitionTime if same and before is not None else rfc3339(now),
        reason=finding.reason,
        message=finding.message[:LONGEST],
    )

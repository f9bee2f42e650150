"""The results of deciding. A policy returns a `Verdict`, from which `decide` makes a `Decision`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from qwen35_operator.api.v1alpha1 import State, TrainingStatus
from qwen35_operator.reconcile.writes import ClusterWrite
from qwen35_operator.status.conditions import Finding


@dataclass(frozen=True)
class Verdict:
    """The decision of one policy: the training's state with its reason, and the writes to the cluster."""

    state: State
    reason: str
    message: str
    """Explanation of the state for people. `reason` is an explanation in one word, for programs."""
    writes: tuple[ClusterWrite, ...] = ()
    changes: Mapping[str, Any] = field(default_factory=dict)
    """New values of fields of the status, by name. Conditions, pools and progress are not among them: `new_status`
    computes these."""
    after: float | None = None
    """Seconds after which to decide again, even if nothing changes; None to wait for an event."""
    accepted: Finding | None = None
    """The condition Accepted; None means that the training is accepted."""
    degraded: Finding | None = None
    """The condition Degraded; None means that its status is False."""


@dataclass(frozen=True)
class Decision:
    """Writes to the cluster, in order, and the status to write after them."""

    writes: tuple[ClusterWrite, ...]
    status: TrainingStatus
    after: float | None = None
    """Seconds after which to decide again, even if nothing changes; None to wait for an event."""

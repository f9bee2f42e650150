"""The results of deciding: a policy returns a `Verdict`, `decide` turns it into a `Decision`."""

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
    """Explanation of the state for people. `reason` is the same in one word."""
    writes: tuple[ClusterWrite, ...] = ()
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the status to change, apart from conditions, pools and progress."""
    after: float | None = None
    """Seconds after which to decide again, even if nothing changes; None to wait for an event."""
    accepted: Finding | None = None
    """The condition Accepted; None means that the training is accepted."""
    degraded: Finding | None = None
    """The condition Degraded; None means that it is False."""


@dataclass(frozen=True)
class Decision:
    """Writes to the cluster, in order, and the status to write after them."""

    writes: tuple[ClusterWrite, ...]
    status: TrainingStatus
    after: float | None = None
    """Seconds after which to decide again, even if nothing changes; None to wait for an event."""

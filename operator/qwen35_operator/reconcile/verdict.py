"""What a policy says: where the training stands, and what follows."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from qwen35_operator.api.v1alpha1 import State
from qwen35_operator.reconcile.actions import Action
from qwen35_operator.reconcile.observed import Observed
from qwen35_operator.settings import Settings
from qwen35_operator.status.conditions import Finding


@dataclass(frozen=True)
class Verdict:
    """`reason` and `message` explain the state; `changes` are status fields beside conditions, pools and progress."""

    state: State
    reason: str
    message: str
    actions: tuple[Action, ...] = ()
    changes: Mapping[str, Any] = field(default_factory=dict)
    after: float | None = None
    accepted: Finding | None = None
    """None: accepted."""
    degraded: Finding | None = None
    """None: what the pods and the report say."""


type Policy = Callable[[Observed, Settings, datetime], Verdict | None]

"""What to do next, and what to report."""

from dataclasses import dataclass

from qwen35_operator.api.v1alpha1 import TrainingStatus
from qwen35_operator.reconcile.actions import Action


@dataclass(frozen=True)
class Decision:
    """Actions in order, then the status; `after` asks for another look in so many seconds, None for none."""

    actions: tuple[Action, ...]
    status: TrainingStatus
    after: float | None = None

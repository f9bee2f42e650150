"""Texts about a status: what a training waits for, how old a time is, how long the run will still take."""

from collections.abc import Mapping
from datetime import datetime
from typing import Final

from qwen35_operator.console.training_view import TrainingView
from qwen35_operator.status.times import seconds_since
from qwen35_trainer import formatting

UNMET: Final[Mapping[str, str]] = {
    "Accepted": "the spec is not accepted",
    "QuotaReserved": "the queue has not admitted it yet",
    "ClusterReady": "the head does not work yet",
    "RolloutReady": "too few rollout nodes work",
    "TrainReady": "not all train nodes work",
}
"""For each condition that a training needs, in their order: what it means if the condition is not true."""
PREREQUISITES: Final = ("Accepted", "QuotaReserved")
"""Conditions without which no attempt starts. While one of them is not true, the later conditions add nothing."""
NO_OPERATOR: Final = "no operator has handled it; is an operator running, and does it serve this namespace?"
FRESH_SECONDS: Final = 60.0
"""Maximum age of a current report, in seconds, for a trainer with short updates."""
FRESH_UPDATES: Final = 3
"""Maximum age of a current report, in updates, for a trainer whose updates take long."""


def explanation(view: TrainingView) -> str:
    """Explain why the training is in its state, for people."""
    ready = view.condition("Ready")
    if ready is None:
        return NO_OPERATOR
    if ready.message:
        return ready.message
    return "" if ready.reason in (view.state, "Running") else ready.reason


def unmet_conditions(view: TrainingView) -> list[tuple[str, str]]:
    """Return the type and meaning of each condition that is not true and that a running training would need.

    Conditions after an unmet one of `PREREQUISITES` are left out, because they only wait for it.
    """
    if view.state in ("Succeeded", "Failed", "Suspended"):
        return []
    unmet = []
    for kind, meaning in UNMET.items():
        condition = view.condition(kind)
        if condition is None or condition.status == "True" or condition.reason == "NoAttempt":
            continue
        message = "" if condition.message == explanation(view) else condition.message
        reason = f"{condition.reason}: {message}" if message else condition.reason
        unmet.append((kind, f"{meaning} ({reason})"))
        if kind in PREREQUISITES:
            break
    return unmet


def age(seconds: float) -> str:
    """Format a duration in whole seconds, or in larger units."""
    whole = max(0, round(seconds))
    return f"{whole} s" if whole < 60 else formatting.duration(whole)


def brief(seconds: float) -> str:
    """Format a duration in the largest unit that fits: 45 s, 12 min, 3 h, 4 d."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return age(seconds)


def ago(time: datetime | str, now: datetime) -> str:
    """Format how long ago a time was. A time in the future is described as ahead of the API server's clock."""
    seconds = (now - time).total_seconds() if isinstance(time, datetime) else seconds_since(time, now)
    return f"{age(-seconds)} ahead of the API server's clock" if seconds < -2 else f"{age(seconds)} ago"


def remaining_seconds(view: TrainingView, now: datetime) -> float | None:
    """Return the seconds until the last update at the present pace.

    Returns None if the training does not run, if its pace or its last update is unknown, or if its report is too old.
    """
    progress = view.status.progress
    if (
        view.state != "Running"
        or progress is None
        or progress.totalUpdates is None
        or progress.secondsPerUpdate is None
    ):
        return None
    report_age = report_age_seconds(view, now)
    if report_age is None or report_age > max(FRESH_SECONDS, FRESH_UPDATES * progress.secondsPerUpdate):
        return None
    remaining = (progress.totalUpdates - progress.update) * progress.secondsPerUpdate
    return max(0.0, remaining - max(0.0, report_age))


def report_age_seconds(view: TrainingView, now: datetime) -> float | None:
    """Return the seconds since the trainer reported the numbers in the status; None if it has not reported any."""
    progress = view.status.progress
    return None if progress is None or progress.time is None else seconds_since(progress.time, now)

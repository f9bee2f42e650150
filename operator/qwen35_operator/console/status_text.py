"""Texts about a status: what a training waits for, how long ago something happened, how long the run will take."""

import math
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
"""The conditions that a running training needs, in the order of display, each with the text that is shown while it is
not true."""
PREREQUISITES: Final = ("Accepted", "QuotaReserved")
"""Conditions without which no pod starts. While one of them is not true, the conditions after it in UNMET are not
shown."""
NO_OPERATOR: Final = "no operator has handled it; is an operator running, and does it serve this namespace?"
FRESH_SECONDS: Final = 120.0
"""A report counts as current up to this age, or up to the duration of FRESH_UPDATES updates if that is longer.

It is more than the time between two copies of numbers with 1,000 running trainings (`new_status.progress_interval`).
"""
FRESH_UPDATES: Final = 3
"""A report counts as current up to the duration of this number of updates, or up to FRESH_SECONDS if that is longer."""


def explanation(view: TrainingView) -> str:
    """Return a text for people that explains why the training is in its state; empty if there is nothing to explain."""
    ready = view.condition("Ready")
    if ready is None:
        return NO_OPERATOR
    if ready.message:
        return ready.message
    return "" if ready.reason in (view.state, "Running") else ready.reason


def unmet_conditions(view: TrainingView) -> list[tuple[str, str]]:
    """Return the conditions for which a training still waits: the type of each, and a text that says what is missing.

    The list is empty for a training that has ended or is suspended. After an unmet condition of `PREREQUISITES` the
    list ends, because all later conditions depend on it.
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
    """Format a duration: whole seconds below a minute, larger units above. A negative duration counts as 0."""
    whole = max(0, round(seconds))
    return f"{whole} s" if whole < 60 else formatting.duration(whole)


def brief(seconds: float) -> str:
    """Format a duration in the largest unit that fits: 45 s, 12 min, 3 h, 4 d."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return age(seconds)


def ago(time: datetime | str, now: datetime) -> str:
    """Format how long ago something was, such as "5 min 02 s ago".

    time: when it was; a text is in RFC 3339. now: the API server's time. The result for a time in the future says that
    the time is ahead of the API server's clock.
    """
    seconds = (now - time).total_seconds() if isinstance(time, datetime) else seconds_since(time, now)
    return f"{age(-seconds)} ahead of the API server's clock" if seconds < -2 else f"{age(seconds)} ago"


def remaining_seconds(view: TrainingView, now: datetime) -> float | None:
    """Return the expected seconds until the last update is done, from the mean duration of recent updates.

    Returns None if the training does not run, if the duration or the total number of updates is unknown, if the trainer's
    report is not current (FRESH_SECONDS, FRESH_UPDATES), or if it has numbers whose product is infinite.
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
    return max(0.0, remaining - max(0.0, report_age)) if math.isfinite(remaining) else None


def report_age_seconds(view: TrainingView, now: datetime) -> float | None:
    """Return the seconds since the trainer reported the numbers in the status; None if it has not reported any."""
    progress = view.status.progress
    return None if progress is None or progress.time is None else seconds_since(progress.time, now)

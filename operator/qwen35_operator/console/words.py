"""A status in words: what a training waits for, how long ago something was, how long the rest will take."""

from collections.abc import Mapping
from datetime import datetime
from typing import Final

from qwen35_operator.console.seen import Seen
from qwen35_operator.status.times import seconds_since
from qwen35_trainer.progress import formatting

UNMET: Final[Mapping[str, str]] = {
    "Accepted": "the spec is not accepted",
    "QuotaReserved": "the queue has not let it in yet",
    "ClusterReady": "the head does not work yet",
    "RolloutReady": "too few rollout nodes work",
    "TrainReady": "not all train nodes work",
}
"""Conditions that a training needs, in their order, and what it means that one does not hold."""
FIRST: Final = ("Accepted", "QuotaReserved")
"""Without these there are no pods to wait for."""
UNSEEN: Final = "no operator has looked at it; is one running, and does it serve this namespace?"
FRESH: Final = 60.0
"""Seconds after which a trainer that trains has reported again."""
STALE_UPDATES: Final = 3
"""Updates in whose time it has, where they take longer than that."""


def why(seen: Seen) -> str:
    """The state's reason, for people."""
    ready = seen.condition("Ready")
    if ready is None:
        return UNSEEN
    if ready.message:
        return ready.message
    return "" if ready.reason in (seen.state, "Running") else ready.reason


def waits(seen: Seen) -> list[tuple[str, str]]:
    """Each condition that is missing, by its type, and what that means; of one that the others wait for, that one alone."""
    if seen.state in ("Succeeded", "Failed", "Suspended"):
        return []
    found = []
    for kind, meaning in UNMET.items():
        condition = seen.condition(kind)
        if condition is None or condition.status == "True" or condition.reason == "NoAttempt":
            continue
        said = "" if condition.message == why(seen) else condition.message
        reason = f"{condition.reason}: {said}" if said else condition.reason
        found.append((kind, f"{meaning} ({reason})"))
        if kind in FIRST:
            break
    return found


def age(seconds: float) -> str:
    """In whole seconds at least."""
    whole = max(0, round(seconds))
    return f"{whole} s" if whole < 60 else formatting.duration(whole)


def brief(seconds: float) -> str:
    """In the largest unit that it has one of: 45 s, 12 min, 3 h, 4 d."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return age(seconds)


def ago(time: datetime | str, now: datetime) -> str:
    """How long ago; a time that is still to come is of a clock that is ahead."""
    seconds = (now - time).total_seconds() if isinstance(time, datetime) else seconds_since(time, now)
    return f"{age(-seconds)} ahead of the API server's clock" if seconds < -2 else f"{age(seconds)} ago"


def left(seen: Seen, now: datetime) -> float | None:
    """Seconds until the last update, at the pace of the latest ones; None when nobody can know."""
    progress = seen.status.progress
    if seen.state != "Running" or progress is None or progress.updates is None or progress.secondsPerUpdate is None:
        return None
    old = report_age(seen, now)
    if old is None or old > max(FRESH, STALE_UPDATES * progress.secondsPerUpdate):
        return None
    return max(0.0, (progress.updates - progress.update) * progress.secondsPerUpdate - max(0.0, old))


def report_age(seen: Seen, now: datetime) -> float | None:
    """Seconds since the trainer reported the numbers that are shown."""
    progress = seen.status.progress
    return None if progress is None or progress.time is None else seconds_since(progress.time, now)

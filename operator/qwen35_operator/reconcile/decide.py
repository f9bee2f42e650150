"""What to do next, and what to report. Same inputs, same answer: no clock, no cluster.

    cleanup     over: stays over; children go after ttlSecondsAfterFinished
    acceptance  cannot be read, run or watched: say why, touch nothing
    completion  the open attempt has ended: record how
    stopping    suspend, deadline, changed spec: order, wait, record; suspended: stay so
    start       no attempt is open: clean up, back off, create the next one
    running     an attempt is open: objects, size, state

The order is the priority, and it stands here only. What an attempt's end means is written to the status before anything
is done about it: a crash in between finds either the evidence or the record.
"""

from datetime import datetime
from typing import Final

from qwen35_operator.reconcile import acceptance, attempts, cleanup, completion, running, start, stopping
from qwen35_operator.reconcile.decision import Decision
from qwen35_operator.reconcile.observed import Observed
from qwen35_operator.reconcile.report import report
from qwen35_operator.reconcile.verdict import Policy, Verdict
from qwen35_operator.settings import Settings

POLICIES: Final[tuple[Policy, ...]] = (
    cleanup.decide,
    acceptance.decide,
    completion.decide,
    stopping.decide,
    start.decide,
    running.decide,
)


def decide(seen: Observed, settings: Settings, now: datetime) -> Decision:
    """The first policy that has something to say decides."""
    if seen.deleting:
        return Decision((), seen.status)  # the children go with their owner
    known = seen.status.attempts
    seen = attempts.with_adopted(seen)
    verdict = _first(seen, settings, now)
    status, mirror = report(seen, verdict, now)
    if seen.unavailable:
        return Decision((), status, verdict.after)
    doomed, settle = cleanup.leftovers(seen, now)
    waits = [wait for wait in (verdict.after, mirror, settle) if wait is not None]
    if status.attempts != known:
        waits.append(0.0)  # what follows from the record is the next look's to decide
    return Decision((*doomed, *verdict.actions), status, min(waits, default=None))


def _first(seen: Observed, settings: Settings, now: datetime) -> Verdict:
    for policy in POLICIES:
        if (verdict := policy(seen, settings, now)) is not None:
            return verdict
    raise AssertionError("the last policy always answers")

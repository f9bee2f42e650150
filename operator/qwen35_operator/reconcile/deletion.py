"""Saves a last checkpoint before a training is deleted, if its user wants that.

    finalizer LAST_CHECKPOINT, deletion ─► order to stop ─► saved, failed, or grace period over ─► finalizer removed ─► Kubernetes
                                                                                             deletes training and children

Without the finalizer, the deletion does not wait for the operator. In a foreground deletion, Kubernetes deletes the RayJob immediately,
which an event reports.
"""

from datetime import datetime
from typing import Final

from qwen35_operator.operator_settings import OperatorSettings
from qwen35_operator.reconcile import acceptance, attempts, completion, stop
from qwen35_operator.reconcile.decision import Verdict
from qwen35_operator.reconcile.observed import Observed
from qwen35_operator.reconcile.situation import AttemptSituation, situation_of
from qwen35_operator.reconcile.writes import PostEvent

FOREGROUND: Final = "foregroundDeletion"
"""Finalizer that Kubernetes adds when an object is deleted in the foreground: its children are deleted before it."""


def decide(observed: Observed, settings: OperatorSettings, now: datetime) -> Verdict | None:
    """Return the verdict that stops the open attempt of a training that is being deleted; None if nothing is left to save.

    Nothing is saved if the operator refuses the training, for example because the edited spec cannot be read. While the
    operator cannot watch one of the kinds of objects that it needs, the deletion waits.
    """
    accepted = acceptance.accept(observed, settings)
    if isinstance(accepted, Verdict):
        return accepted if observed.unavailable else None
    situation = situation_of(observed, accepted, settings, now)
    if not isinstance(situation, AttemptSituation):
        return None
    return completion.decide(situation) or stop.decide(situation)


def warnings(observed: Observed) -> tuple[PostEvent, ...]:
    """Return the event about a deletion that leaves the open attempt no time to save a checkpoint."""
    if FOREGROUND not in observed.finalizers or attempts.open_attempt(observed) is None:
        return ()
    message = (
        "the training was deleted in the foreground, so Kubernetes deletes the RayJob before a last checkpoint can be saved. "
        "Delete trainings in the background: kubectl delete without --cascade=foreground, Argo CD with "
        "PrunePropagationPolicy=background"
    )
    return (PostEvent("Warning", "NoLastCheckpoint", message),)

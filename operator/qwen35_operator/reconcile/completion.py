"""The open attempt has ended: how, and what follows. Recorded in the status before anything is done about it.

report Succeeded ───────────────► Succeeded
report Stopped, as ordered ─────► the order's consequence: suspended, or out of time
report Failed, or Stopped alone ─┐
RayJob ended without such words ─┤
head pod lost, or replaced ──────┼► failure rules ─► next attempt after a backoff, or Failed
RayJob gone · no new version ────┘
"""

from datetime import datetime

from qwen35_operator.api.v1alpha1 import Attempt
from qwen35_operator.reconcile import attempts, failure, stall, stopping
from qwen35_operator.reconcile.actions import Announce
from qwen35_operator.reconcile.failure import Evidence
from qwen35_operator.reconcile.observed import Observed, Pod
from qwen35_operator.reconcile.verdict import Verdict
from qwen35_operator.settings import Settings
from qwen35_trainer.contract import Progress


def decide(seen: Observed, settings: Settings, now: datetime) -> Verdict | None:
    """Nothing while the attempt goes on."""
    attempt = attempts.opened(seen)
    if attempt is None:
        return None
    report = attempts.report_of(seen, attempt)
    if report is not None and report.state == "Succeeded":
        message = f"attempt {attempt.number}: {report.message or f'{report.update} updates'}"
        changes = attempts.ended(seen, attempt, now, outcome="Succeeded", reason="Succeeded", message=message)
        return Verdict("Succeeded", "Succeeded", message, (Announce("Normal", "Succeeded", message),), changes)
    order = stopping.ordered(seen, attempt)
    if report is not None and report.state == "Stopped" and order is not None and report.stopAcknowledged == order.id:
        return stopping.stopped(seen, attempt, order, now, "saved and stopped as asked")
    found = _failure(seen, attempt, now)
    if not found:
        return None
    if order is not None:  # it was on its way out; why it did not save changes nothing
        return stopping.stopped(seen, attempt, order, now, f"{found[0].reason} while stopping: {found[0].message}")
    return _failed(seen, attempt, found, now)


def _failure(seen: Observed, attempt: Attempt, now: datetime) -> list[Evidence]:
    """What shows that the attempt has failed; empty while it has not."""
    report = attempts.report_of(seen, attempt)
    if report is not None and report.state in ("Failed", "Stopped"):
        return failure.evidence(seen, attempt, now)
    job = attempts.job_of(seen, attempt.number)
    if job is None or job.deleting is not None:
        gone = Evidence("JobDeleted", f"RayJob {attempt.job} was deleted by somebody else")
        return failure.evidence(seen, attempt, now, gone)
    if job.deployment in attempts.OVER:
        said = Evidence(
            "NoFinalState",
            f"RayJob {job.name} is {job.deployment} {job.status}, and the trainer reported no final state",
        )
        found = failure.evidence(seen, attempt, now)
        if job.deployment == "ValidationFailed":
            return [Evidence("ValidationFailed", job.message), *found]
        return [said, *found] if job.status == "SUCCEEDED" or not found else found
    # Without a cluster of its own its pods are those of the one that its queue has taken away.
    return [] if job.held or not job.cluster else _lost_or_stalled(seen, attempt, report, now)


def _lost_or_stalled(seen: Observed, attempt: Attempt, report: Progress | None, now: datetime) -> list[Evidence]:
    """Why an attempt whose cluster runs does not: its head has failed or was replaced, or its driver is silent."""
    if any(pod.pool == "head" and pod.reason in failure.FAULTS for pod in failure.faulty(seen, attempt)):
        return failure.evidence(seen, attempt, now)
    if report is None:
        return []
    if (head := _another_head(seen, attempt, report)) is not None:
        lost = Evidence("HeadLost", f"pod {head.name} has come in the place of the one that reported", "head")
        return failure.evidence(seen, attempt, now, lost)
    if (pace := stall.pace(seen, report, now)) is not None and pace.stalled:
        message = f"no new version for {pace.age:.0f} s; more than {pace.limit:.0f} s is a stall"
        return failure.evidence(seen, attempt, now, Evidence("Stalled", message))
    return []


def _another_head(seen: Observed, attempt: Attempt, report: Progress) -> Pod | None:
    """A head that is not the one that the attempt reports from, in the same cluster.

    KubeRay starts another for one that is gone, however it went, and submits to it again, without end and without counting.
    An attempt that its queue evicted comes back with another cluster, younger than its last report: that is no failure.
    """
    written = None if seen.reported is None else seen.reported.written
    cluster = attempts.cluster_of(seen, attempt.number)
    if report.head is None or written is None or cluster is None or cluster.created > written:
        return None
    pods = attempts.pods_of(seen, attempt.number)
    return next((pod for pod in pods if pod.pool == "head" and pod.name != report.head), None)


def _failed(seen: Observed, attempt: Attempt, found: list[Evidence], now: datetime) -> Verdict:
    training = seen.training
    assert training is not None, "acceptance comes first"
    policy = training.spec.failurePolicy
    judged = failure.judge(policy.rules, found)
    counted = judged.action == "Restart"
    said = judged.evidence
    message = f"attempt {attempt.number} failed: {said.reason}: {said.message} (rule {judged.rule})"
    changes = attempts.ended(
        seen, attempt, now, outcome="Failed", reason=said.reason, message=said.message, counted=counted
    )
    event = Announce("Warning", "AttemptFailed", message)
    if judged.action == "Fail":
        return Verdict("Failed", "FailedByRule", message, (event,), changes)
    if counted and seen.status.restarts >= policy.maxRestarts:
        message = f"{message}; failurePolicy.maxRestarts {policy.maxRestarts} is used up"
        # The last failure has no restart of its own to count.
        changes = attempts.ended(seen, attempt, now, outcome="Failed", reason=said.reason, message=said.message)
        return Verdict("Failed", "RestartsExhausted", message, (event,), changes)
    wait = failure.backoff(policy.backoffSeconds, seen.status.restarts + counted)
    return Verdict("Restarting", "Backoff", f"{message}; next attempt in {wait:g} s", (event,), changes, after=wait)

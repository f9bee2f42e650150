"""Detects that the open attempt has ended, and decides what follows.

Until the status records the end and what follows, nothing else is done.

report: Succeeded ──────────────────────► Succeeded
report: Stopped, after an order ────────► the order's consequence: suspended, the next attempt, or past the deadline
RayJob held back by its queue ──────────► nothing: the attempt continues when the queue admits it again
report: Failed, or Stopped on its own ──┐
RayJob ended without a final report ────┤
head pod lost or replaced ──────────────┤
train pod failed before a report ───────┼► failure rules ─► next attempt after a backoff, or Failed
RayJob deleted, or training stalled ────┘

When its queue evicts an attempt, the trainer reports that it was stopped, or that it lost its workers. Such a report is
not a failure. After the queue has admitted the attempt again, the report is ignored, because it names the RayCluster that
the eviction ended.

A lost rollout pod does not end the attempt: KubeRay replaces the pod, and the trainer replaces the replica that ran in
the pod (`qwen35_trainer/runtime/rollout_pool.py`). A lost train pod ends the attempt: the trainer reports the failure
WorkerLost. Before KubeRay has submitted the trainer, which it does when all pods work, nobody would report it, and KubeRay
would replace the pod again and again without a backoff: the fault itself ends the attempt then. If the cluster ended the pod, the failure rules first consider the reason of the pod, such as NodeLost when
its node vanished or stays NotReady. The next attempt waits for proof that the pod has ended (`leftovers.py`).
"""

from qwen35_operator.kube.object_records import Pod
from qwen35_operator.reconcile import attempts, failure_rules, stall, stop
from qwen35_operator.reconcile.decision import Verdict
from qwen35_operator.reconcile.failure_rules import Evidence
from qwen35_operator.reconcile.situation import AttemptSituation
from qwen35_operator.reconcile.writes import PostEvent
from qwen35_trainer.contract import ProgressReport

MAX_UNCOUNTED_IN_A_ROW = 24
"""Maximum number of restarts in a row that do not count towards maxRestarts and bring no progress.

With backoffs that double up to an hour, this takes most of a day. A cluster that evicts an attempt for so long has a
reason that waiting does not remove.
"""


def decide(situation: AttemptSituation) -> Verdict | None:
    """Return a verdict that records how the attempt ended and what follows, or None while the attempt continues."""
    attempt, job, order = situation.attempt, situation.job, situation.stop
    # An eviction does not undo what the trainer had completed before.
    report = situation.attempt_report
    if report is not None and report.state == "Succeeded":
        message = f"attempt {attempt.number}: {report.message or f'{report.update} updates'}"
        changes = attempts.ended(
            situation.observed, attempt, situation.now, outcome="Succeeded", reason="Succeeded", message=message
        )
        return Verdict("Succeeded", "Succeeded", message, (PostEvent("Normal", "Succeeded", message),), changes)
    if report is not None and report.state == "Stopped" and order is not None and report.stopAcknowledged == order.id:
        how = "saved and stopped as asked" if stop.saves(situation) else "stopped as asked, without checkpoint.storage"
        return stop.stopped(situation, order, how)
    if job is not None and job.held and job.deleting is None:
        return None
    evidence = _evidence_of_failure(situation)
    if not evidence:
        return None
    if order is not None:  # the attempt was stopping; a failure to save changes nothing about that
        return stop.stopped(situation, order, f"{evidence[0].reason} while stopping: {evidence[0].message}")
    return _failed(situation, evidence)


def _evidence_of_failure(situation: AttemptSituation) -> list[Evidence]:
    """Return the evidence that the attempt has failed. The list is empty while the attempt has not failed."""
    report, job = situation.report, situation.job
    if job is not None and job.ended and job.suspended and _is_retryable(report):
        # KubeRay saw the job end before it saw the eviction, which ended the job. It does not resume such a job.
        evicted = Evidence("Evicted", f"the queue of RayJob {job.name} evicted it")
        return failure_rules.evidence(situation, evicted)
    if report is not None and report.state in ("Failed", "Stopped"):
        return failure_rules.evidence(situation)
    if job is None or job.deleting is not None:
        deleted = Evidence("JobDeleted", f"RayJob {situation.attempt.job} was deleted, and not by the operator")
        return failure_rules.evidence(situation, deleted)
    if job.ended:
        message = f"RayJob {job.name} is {job.deployment} {job.status}, and the trainer reported no final state"
        unreported = Evidence("NoFinalState", message)
        evidence = failure_rules.evidence(situation, unreported if job.status == "SUCCEEDED" else None)
        if job.deployment == "ValidationFailed":
            return [Evidence("ValidationFailed", job.message), *evidence]
        return evidence or [unreported]
    # If the job names no cluster, the remaining pods belong to the one that its queue has evicted.
    return _lost_or_stalled(situation) if job.cluster else []


def _is_retryable(report: ProgressReport | None) -> bool:
    return report is None or report.reason not in failure_rules.NOT_RETRYABLE


def _lost_or_stalled(situation: AttemptSituation) -> list[Evidence]:
    """Return the evidence that the attempt has failed although its cluster runs.

    Such evidence exists if the head pod failed or was replaced, if a train pod failed before the trainer was submitted, or
    if the driver makes no progress.
    """
    job, needed = situation.job, ["head"]
    if situation.report is None and job is not None and job.deployment in ("", "Initializing"):
        needed.append("train")  # KubeRay has not submitted the trainer yet
    failing = failure_rules.failing_pods(situation)
    if any(pod.pool in needed and pod.reason in failure_rules.FAULTS for pod in failing):
        return failure_rules.evidence(situation)
    if situation.report is None:
        return []
    if (head := _replacement_head(situation)) is not None:
        lost = Evidence("HeadLost", f"pod {head.name} has replaced the head pod that reported", "head")
        return failure_rules.evidence(situation, lost)
    if (seconds := stall.seconds_until_head_lost(situation)) is not None and seconds <= 0:
        message = f"the head pod that reported is gone, and KubeRay has created no other within {stall.NO_HEAD_SECONDS:g} s of its last report"
        return failure_rules.evidence(situation, Evidence("HeadLost", message, "head"))
    if (pace := stall.pace(situation)) is not None and pace.stalled:
        message = f"no new version for {pace.age:.0f} s; more than {pace.limit:.0f} s is a stall"
        return failure_rules.evidence(situation, Evidence("Stalled", message))
    return []


def _replacement_head(situation: AttemptSituation) -> Pod | None:
    """Return the head pod that has replaced the one that sent the attempt's last report; None if there is no such pod.

    KubeRay replaces a lost head pod any number of times, submits the job to the replacement, and does not count this as
    a failure. After an eviction by a queue, a new head pod is not a failure either: the attempt continues in a new
    RayCluster, which is younger than the last report.
    """
    report, written, cluster = situation.report, situation.report_written, situation.cluster
    if report is None or report.head is None or written is None or cluster is None or cluster.created > written:
        return None
    heads = (pod for pod in situation.pods if pod.pool == "head")
    # KubeRay may give every head of a cluster the same name (ENABLE_DETERMINISTIC_HEAD_POD_NAME).
    return next((pod for pod in heads if pod.name != report.head or pod.created > written), None)


def _failed(situation: AttemptSituation, evidence: list[Evidence]) -> Verdict:
    attempt, observed, now = situation.attempt, situation.observed, situation.now
    policy, restarts = situation.spec.failurePolicy, attempts.counted_restarts(observed, attempt, now)
    decision = failure_rules.apply_rules(policy.rules, evidence)
    counted = decision.action == "Restart"
    cause = decision.evidence
    message = f"attempt {attempt.number} failed: {cause.reason}: {cause.message} (rule {decision.rule})"
    changes = attempts.ended(
        observed, attempt, now, outcome="Failed", reason=cause.reason, message=cause.message, counted=counted
    )
    in_a_row = attempts.failures_in_a_row(changes["attempts"], situation.status.retriedAttempt)
    event = PostEvent("Warning", "AttemptFailed", message)
    if decision.action == "Fail":
        return Verdict("Failed", "FailedByRule", message, (event,), changes)
    if counted and restarts >= policy.maxRestarts:
        message = f"{message}; failurePolicy.maxRestarts {policy.maxRestarts} is used up"
        # No restart follows the last failure, so none is counted.
        changes = attempts.ended(observed, attempt, now, outcome="Failed", reason=cause.reason, message=cause.message)
        return Verdict("Failed", "RestartsExhausted", message, (event,), changes)
    if not counted and sum(not failed.counted for failed in in_a_row) > MAX_UNCOUNTED_IN_A_ROW:
        message = f"{message}; {len(in_a_row)} attempts in a row got no further than those before them"
        return Verdict("Failed", "RestartsExhausted", message, (event,), changes)
    wait = failure_rules.backoff(policy.backoffSeconds, len(in_a_row))
    return Verdict("Restarting", "Backoff", f"{message}; next attempt in {wait:g} s", (event,), changes, after=wait)

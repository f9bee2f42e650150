"""Keeps the objects of an open attempt as desired and its rollout pool at the target size, and reports how the attempt runs."""

from qwen35_operator.api.v1alpha1 import Fault, State
from qwen35_operator.desired.network_policy import DASHBOARD_PORT
from qwen35_operator.reconcile import attempts, child_writes, disruptions, elasticity, failure_rules, stall
from qwen35_operator.reconcile.decision import Verdict
from qwen35_operator.reconcile.situation import AttemptSituation
from qwen35_operator.reconcile.stop import time_to_deadline
from qwen35_operator.reconcile.writes import PostEvent
from qwen35_operator.status.conditions import Finding, yes
from qwen35_operator.status.times import rfc3339, seconds_since

KUBERAY_SECONDS = 60.0
"""Time after the creation of a RayJob within which KubeRay gives it a status."""
KUBERAY_INACTIVE = (
    "KubeRay has not acted on RayJob {job} for a minute. Check that its operator runs and watches this namespace, and that "
    "spec.managedBy of the RayJob names no other controller: MultiKueue is not supported"
)
SHOWN_PODS = 3
"""Maximum number of failing pods that a message lists."""


def decide(situation: AttemptSituation) -> Verdict:
    """Return the verdict that keeps the open attempt running.

    The writes bring the rollout pool to its target size, pass on the settings that may change while an attempt runs, and
    protect the pods from drains if the spec wants it.
    """
    training, attempt, status = situation.training, situation.attempt, situation.status
    changes: dict[str, object] = {}
    if (fault := _new_fault(situation)) is not None:
        changes["attempts"] = attempts.replaced(status.attempts, attempt.model_copy(update={"fault": fault}))
    events = []
    nodes = elasticity.target(training, status)
    if (autoscale := elasticity.autoscaled(situation)) is not None:
        changes["autoscale"], nodes = autoscale, autoscale.nodes
        events = [PostEvent("Normal", "Autoscaled", autoscale.reason)]
    elif status.autoscale is not None and elasticity.autoscale_choice(training, status) is None:
        changes["autoscale"] = None
    resize = elasticity.resize(situation, nodes)
    control = child_writes.control_message(training, attempt.number, resize.nodes, resize.leaving, resize.leaving_since)
    children = child_writes.ensure(situation.observed, training, situation.settings, control)
    held_back = situation.job is not None and situation.job.held
    waits = [None if held_back else time_to_deadline(situation), resize.after]
    limits = _seconds_until_overdue(situation), None if held_back else stall.seconds_until_head_lost(situation)
    waits += [seconds for seconds in limits if seconds is not None and seconds > 0]
    if (pace := stall.pace(situation)) is not None:
        waits.append(pace.limit - pace.age + 1)
    if situation.spec.rollout is not None and situation.spec.rollout.autoscale is not None:
        waits.append(float(situation.spec.rollout.autoscale.stabilizationSeconds))
    state, reason, message = _state(situation)
    return Verdict(
        state,
        reason,
        message,
        (*children, *resize.writes, *disruptions.protection(situation), *events),
        changes,
        after=min((seconds for seconds in waits if seconds is not None), default=None),
        degraded=_degraded(situation, resize.held),
    )


def _seconds_until_overdue(situation: AttemptSituation) -> float | None:
    """Return the seconds until KubeRay should have acted on the RayJob, 0 or less if it has not; None if it has, or need not.

    KubeRay also removes the status, for seconds, when a queue has admitted a job again.
    """
    job, active_since = situation.job, situation.attempt.activeSince
    if job is None or job.held or job.deployment or active_since is None:
        return None
    return KUBERAY_SECONDS - min(
        seconds_since(active_since, situation.now), (situation.now - job.created).total_seconds()
    )


def _state(situation: AttemptSituation) -> tuple[State, str, str]:
    number, job, report = situation.attempt.number, situation.job, situation.report
    if job is not None and job.held:
        return "Queued", "QuotaPending", f"RayJob {job.name} waits for its queue"
    if report is not None and report.state == "Running":
        return "Running", "Running", report.phase or f"attempt {number} runs"
    if job is not None and job.message:
        return "Starting", "Starting", f"attempt {number}: {job.message}"
    if job is not None and job.deployment == "Running":
        return "Starting", "Starting", f"attempt {number}: the trainer is starting"
    if situation.cluster is not None and situation.cluster.state == "ready":
        return (
            "Starting",
            "Starting",
            f"attempt {number}: KubeRay submits the trainer to port {DASHBOARD_PORT} of the head",
        )
    return "Starting", "Starting", f"attempt {number}: its cluster is starting"


def _new_fault(situation: AttemptSituation) -> Fault | None:
    """Return the fault of the newest failed pod; None if no pod has failed or the attempt's record contains the fault."""
    failing = [pod for pod in failure_rules.failing_pods(situation) if pod.reason in failure_rules.FAULTS]
    if not failing:
        return None
    pod = max(failing, key=lambda pod: (pod.created, pod.name))
    recorded = situation.attempt.fault
    if recorded is not None and (recorded.pod, recorded.reason) == (pod.name, pod.reason):
        return None
    return Fault(
        pool=pod.pool,
        pod=pod.name,
        reason=pod.reason,
        exitCode=pod.exit_code,
        message=pod.message[:1024],
        time=rfc3339(situation.now),
    )


def _degraded(situation: AttemptSituation, held: str | None) -> Finding | None:
    """Return the most important problem that the attempt has while it continues; None if it has no problem.

    held: why the rollout pool must keep a size other than its target; None if nothing prevents the change.
    """
    if (problem := attempts.report_problem(situation.observed)) is not None:
        return yes("ProgressUnreadable", problem)
    if (seconds := _seconds_until_overdue(situation)) is not None and seconds <= 0:
        return yes("KubeRayInactive", KUBERAY_INACTIVE.format(job=situation.attempt.job))
    if situation.cluster is not None and situation.cluster.failure:
        return yes("PodFault", situation.cluster.failure)
    failing = failure_rules.failing_pods(situation)
    if failing:
        shown = "; ".join(f"pod {pod.name}: {pod.reason}: {pod.message}" for pod in failing[:SHOWN_PODS])
        more = len(failing) - SHOWN_PODS
        return yes("PodFault", shown if more <= 0 else f"{shown}; and {more} more")
    if (skew := stall.skew(situation.observed.report)) is not None and abs(skew) > stall.MAX_SKEW_SECONDS:
        ahead = "behind" if skew > 0 else "ahead of"
        return yes("ClockSkew", f"the head's clock is {abs(skew):.0f} s {ahead} the API server's; set it by NTP")
    if situation.report is not None and situation.report.warning:
        return yes("TrainerWarning", situation.report.warning)
    return None if held is None else yes("NodesFixedByQueue", held)

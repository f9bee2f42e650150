"""An attempt is open: keep its objects as desired, its pool at its size, and say how it is."""

from datetime import datetime

from qwen35_operator.api.v1alpha1 import Attempt, Fault, State
from qwen35_operator.reconcile import attempts, children, elasticity, failure, stall
from qwen35_operator.reconcile.actions import Announce
from qwen35_operator.reconcile.observed import Observed
from qwen35_operator.reconcile.stopping import time_left
from qwen35_operator.reconcile.verdict import Verdict
from qwen35_operator.settings import Settings
from qwen35_operator.status.conditions import Finding, yes
from qwen35_operator.status.times import rfc3339


def decide(seen: Observed, settings: Settings, now: datetime) -> Verdict:
    """The last of the policies: it always has something to say."""
    training, attempt = seen.training, attempts.opened(seen)
    assert training is not None, "acceptance comes first"
    assert attempt is not None, "start comes first"
    report = attempts.report_of(seen, attempt)
    changes: dict[str, object] = {}
    if (fault := _fault(seen, attempt, now)) is not None:
        changes["attempts"] = attempts.replaced(seen.status.attempts, attempt.model_copy(update={"fault": fault}))
    events = []
    nodes = elasticity.target(seen, training)
    if (chosen := elasticity.autoscaled(seen, training, attempt, report, now)) is not None:
        changes["autoscale"], nodes = chosen, chosen.nodes
        events = [Announce("Normal", "Autoscaled", chosen.reason)]
    resize = elasticity.resize(seen, training, attempt, nodes)
    wanted = children.controlling(training, attempt.number, resize.nodes, resize.leaving)
    waits = [time_left(seen.status, training, attempt, now)]
    if report is not None and (pace := stall.pace(seen, report, now)) is not None:
        waits.append(pace.limit - pace.age + 1)
    if training.spec.rollout is not None and training.spec.rollout.autoscale is not None:
        waits.append(float(training.spec.rollout.autoscale.stabilizationSeconds))
    state, reason, message = _state(seen, attempt)
    return Verdict(
        state,
        reason,
        message,
        (*children.ensured(seen, training, wanted), *resize.actions, *events),
        changes,
        after=min((wait for wait in waits if wait is not None), default=None),
        degraded=_degraded(seen, attempt, resize.held),
    )


def _state(seen: Observed, attempt: Attempt) -> tuple[State, str, str]:
    job = attempts.job_of(seen, attempt.number)
    report = attempts.report_of(seen, attempt)
    if job is not None and job.held:
        # Before the report, which is from before the eviction.
        return "Queued", "QuotaPending", f"RayJob {job.name} waits for its queue"
    if report is not None and report.state == "Running":
        return "Running", "Running", report.phase or f"attempt {attempt.number} runs"
    said = "" if job is None else job.message
    started = "its cluster is starting" if job is None or job.deployment != "Running" else "the trainer is starting"
    return "Starting", "Starting", f"attempt {attempt.number}: {said or started}"


def _fault(seen: Observed, attempt: Attempt, now: datetime) -> Fault | None:
    """A fault that the attempt's record does not have yet."""
    faulty = [pod for pod in failure.faulty(seen, attempt) if pod.reason in failure.FAULTS]
    known = attempt.fault
    for pod in sorted(faulty, key=lambda pod: (pod.created, pod.name), reverse=True):
        if known is not None and (known.pod, known.reason) == (pod.name, pod.reason):
            return None
        return Fault(
            pool=pod.pool,
            pod=pod.name,
            reason=pod.reason,
            exitCode=pod.exit_code,
            message=pod.message[:1024],
            time=rfc3339(now),
        )
    return None


def _degraded(seen: Observed, attempt: Attempt, held: str | None) -> Finding | None:
    """The first thing that is not as it should be, though the attempt goes on."""
    if seen.reported is not None and seen.reported.problem is not None:
        return yes("ProgressUnreadable", seen.reported.problem)
    for cluster in seen.clusters:
        if cluster.attempt == attempt.number and cluster.failure:
            return yes("PodFault", cluster.failure)
    broken = failure.faulty(seen, attempt)
    if broken:
        shown = "; ".join(f"pod {pod.name}: {pod.reason}: {pod.message}" for pod in broken[:3])
        return yes("PodFault", shown if len(broken) <= 3 else f"{shown}; and {len(broken) - 3} more")
    if (skew := stall.skew(seen.reported)) is not None and abs(skew) > stall.SKEW:
        ahead = "behind" if skew > 0 else "ahead of"
        return yes("ClockSkew", f"the head's clock is {abs(skew):.0f} s {ahead} the API server's; set it by NTP")
    return None if held is None else yes("NodesFixedByQueue", held)

"""The facts that policies decide by, looked up once per decision.

`Situation` describes an accepted training without an open attempt; `AttemptSituation` describes one whose attempt is
open.
"""

from dataclasses import dataclass
from datetime import datetime

from qwen35_operator.api.training_resource import TrainingResource
from qwen35_operator.api.v1alpha1 import Attempt, TrainingStatus
from qwen35_operator.kube.object_records import Pod, RayCluster, RayJob
from qwen35_operator.operator_settings import OperatorSettings
from qwen35_operator.reconcile import attempts
from qwen35_operator.reconcile.observed import Observed
from qwen35_operator.status.times import parse as parse_time
from qwen35_trainer.contract import ProgressReport, StopOrder
from qwen35_trainer.manifest import TrainingSpec

MAX_AHEAD_SECONDS = 60.0
"""Maximum time, in seconds, by which an order may be ahead of the clock of the API server, which may have been set back since."""


@dataclass(frozen=True)
class Situation:
    """The facts by which policies decide about an accepted training.

    `AttemptSituation` adds the facts about an open attempt.
    """

    observed: Observed
    training: TrainingResource
    settings: OperatorSettings
    now: datetime

    @property
    def spec(self) -> TrainingSpec:
        return self.training.spec

    @property
    def status(self) -> TrainingStatus:
        return self.observed.status

    @property
    def active_seconds(self) -> int:
        """Seconds for which all attempts together have been active, without time in which a queue held them back.

        spec.activeDeadlineSeconds limits this time.
        """
        return self.status.activeSeconds


@dataclass(frozen=True)
class AttemptSituation(Situation):
    """The facts from which the next step of an accepted training is decided while its attempt has not ended."""

    attempt: Attempt
    job: RayJob | None
    """The attempt's RayJob; None if it was deleted."""
    cluster: RayCluster | None
    """The attempt's RayCluster; None while KubeRay has not created it, or while a queue has evicted the attempt."""
    pods: tuple[Pod, ...]
    """The pods of the attempt's present RayCluster, without those that are being deleted."""
    report: ProgressReport | None
    """The latest report from the attempt's present RayCluster; None if there is none, or if it is unreadable."""
    attempt_report: ProgressReport | None
    """The attempt's latest report, also from a RayCluster that an eviction by the queue has ended."""
    report_written: datetime | None
    """When `-progress` was last written, by the API server's clock; None if the time is unknown."""
    stop: StopOrder | None
    """The order to stop that is in force, in `-control` or in the status; None if there is none."""

    @property
    def active_seconds(self) -> int:
        return self.status.activeSeconds + attempts.active_seconds(self.attempt, self.now)


def situation_of(
    observed: Observed, training: TrainingResource, settings: OperatorSettings, now: datetime
) -> Situation | AttemptSituation:
    """Return the facts about an accepted training: an AttemptSituation if an attempt is open, otherwise a Situation."""
    attempt = attempts.open_attempt(observed)
    if attempt is None:
        return Situation(observed, training, settings, now)
    return AttemptSituation(
        observed,
        training,
        settings,
        now,
        attempt=attempt,
        job=attempts.job_of(observed, attempt.number),
        cluster=attempts.cluster_of(observed, attempt.number),
        pods=attempts.pods_of(observed, attempt.number),
        report=attempts.present_report_of(observed, attempt),
        attempt_report=attempts.report_of(observed, attempt),
        report_written=None if observed.report is None else observed.report.written,
        stop=_order_to(attempt, observed, now),
    )


def order_id(attempt: int, reason: str) -> str:
    """Return the id of an order of the operator. The trainer repeats it in its answer."""
    return f"{attempt}-{reason}"[:64]


def _order_to(attempt: Attempt, observed: Observed, now: datetime) -> StopOrder | None:
    """Return the order to stop that is in force; None if there is none.

    An order in `-control` is in force, also that of a person, because the trainer obeys it. So is one that the status records,
    although somebody has removed it from `-control`, or although it could not be written there. An order from the future, whose
    grace period would never end, counts from now, and one whose time was changed from the recorded time.
    """
    control, recorded = observed.control, attempt.stop
    written = None if control is None or control.attempt != attempt.number else control.stop
    began = None if recorded is None else parse_time(recorded.time).timestamp()
    if written is None:
        if recorded is None or began is None:
            return None
        return StopOrder(id=order_id(attempt.number, recorded.reason), reason=recorded.reason, time=began)
    latest = now.timestamp() + MAX_AHEAD_SECONDS if began is None else began + 1  # the record has whole seconds
    if written.time <= latest:
        return written
    return written.model_copy(update={"time": now.timestamp() if began is None else began})

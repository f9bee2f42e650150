"""Computes the state of an attempt from its records, for the reports to the operator.

The same records always give the same report: this module reads no clock and no file.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, Self

from qwen35_trainer.contract import AttemptState, CheckpointReport, ProgressReport, ReplicaReport
from qwen35_trainer.progress.held_out import accuracy_is_meaningful, reward_is_meaningful
from qwen35_trainer.progress.records import (
    CheckpointRecord,
    EvaluationRecord,
    ExportRecord,
    RunRecord,
    SpanRecord,
    UpdateRecord,
)
from qwen35_trainer.progress.totals import RunTotals
from qwen35_trainer.runtime.measurements import TrainingClock

PACE_WINDOW = 20
"""Number of latest versions in the median time per version, and of latest updates in the mean time per update."""
FAILING_BATCHES = 5
"""Number of batches in a row in which every call of a reward failed, after which the report contains a warning."""
MIN_PACE_SAMPLES = 3
"""Minimum number of versions or updates for a time per version or per update. With fewer, that time is None."""


@dataclass(frozen=True)
class AttemptEnd:
    """The end of an attempt: its final state, the reason, and a message for people.

    reason: a `FailureReason` if the attempt failed, otherwise "".
    """

    state: AttemptState
    reason: str = ""
    message: str = ""


@dataclass(frozen=True)
class Standing:
    """The state of an attempt, from which its reports to the operator are made.

    prompts, samples and tokens are totals over all attempts of the run.
    """

    attempt: int
    clock: TrainingClock = field(default_factory=lambda: TrainingClock(0.0))
    head: str | None = None
    """Name of the pod in which the driver runs. None: the driver does not run in a pod."""
    cluster: str | None = None
    """Name of the RayCluster in which the driver runs. None: the driver does not run in a RayCluster."""
    phase: str = "starting"
    updates: int | None = None
    update: int = 0
    version: int = 0
    prompts: int = 0
    samples: int = 0
    tokens: int = 0
    latest: UpdateRecord | None = None
    seconds_per_update: tuple[float, ...] = ()
    """Durations of the latest updates, in seconds, the oldest first."""
    failing: Mapping[str, int] = field(default_factory=dict)
    """Name of a reward → number of latest batches in a row before which every one of its calls failed."""
    first_reward_error: str = ""
    """Reward, prompt and reason of a failed call before the latest batch that had one."""
    accuracy: float | None = None
    """Held-out accuracy in the latest evaluation. None before the first evaluation, in SFT, and if the accuracy is 0
    although the mean reward is not (graded rewards)."""
    held_out_reward: float | None = None
    """Mean reward of the held-out prompts in the latest evaluation. None if the mean reward equals the accuracy, before
    the first evaluation, and in SFT."""
    published: tuple[float, ...] = ()
    """Times at which the latest versions were published, in Unix seconds."""
    checkpoint: CheckpointReport | None = None
    export: CheckpointReport | None = None
    stop: str | None = None
    """Id of the operator's order to stop that this attempt is carrying out. None: no such order has arrived."""
    end: AttemptEnd | None = None
    hosts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Name of a rollout replica → names of its pods: one for each of its nodes."""
    drained: frozenset[str] = frozenset()
    """Names of the replicas in leaving pods that hold no sequences."""
    busy: Mapping[str, float] = field(default_factory=dict)
    """Name of a rollout replica → seconds of work since the latest batch."""
    idle: Mapping[str, float] = field(default_factory=dict)
    """Name of a rollout replica → share, 0 to 1, of the time between the latest two batches in which the
    replica was idle."""

    def resumed(self, clock: TrainingClock, earlier: RunTotals, checkpoint: CheckpointReport | None) -> Self:
        """Return the state at the beginning of an attempt, including the totals of earlier attempts.

        clock: converts training time to Unix time. earlier: totals of the earlier attempts, up to the checkpoint.
        checkpoint: the checkpoint from which the attempt resumes; None: it starts from the beginning.
        """
        evaluation = earlier.evaluation
        return replace(
            self,
            clock=clock,
            checkpoint=checkpoint,
            update=0 if checkpoint is None else checkpoint.update,
            version=earlier.update.version if earlier.update else 0,
            accuracy=_accuracy(evaluation) if evaluation else None,
            held_out_reward=_held_out_reward(evaluation) if evaluation else None,
            prompts=earlier.prompts,
            samples=earlier.samples,
            tokens=earlier.tokens,
        )

    def after(self, record: RunRecord) -> Self:
        """Return the state after `record`, the next record of the attempt."""
        match record:
            case UpdateRecord():
                return self._updated(record)
            case SpanRecord(kind="publish", version=int(version)):
                published = (*self.published, max(0.0, self.clock.wall(record.end)))[-PACE_WINDOW:]
                return replace(self, version=max(self.version, version), published=published)
            case SpanRecord(kind="generate"):
                seconds = self.busy.get(record.lane, 0.0) + max(0.0, record.end - record.start)
                return replace(self, busy={**self.busy, record.lane: seconds})
            case EvaluationRecord():
                return replace(self, accuracy=_accuracy(record), held_out_reward=_held_out_reward(record))
            case CheckpointRecord():
                return replace(
                    self, checkpoint=checkpoint_report(Path(record.path), record.update, self.clock.wall(record.time))
                )
            case ExportRecord(problem=""):
                return replace(
                    self, export=checkpoint_report(Path(record.path), record.update, self.clock.wall(record.time))
                )
            case _:
                return self

    def _updated(self, record: UpdateRecord) -> Self:
        first = record.seconds > 0  # the other updates of a batch are recorded at the same moment and give no times
        return replace(
            self,
            phase=self.phase if self.stop else "training",
            updates=record.updates_total,
            update=max(self.update, record.update),
            version=max(self.version, record.version),
            prompts=self.prompts + record.prompts,
            samples=self.samples + record.samples,
            tokens=self.tokens + record.tokens,
            latest=record,
            failing=_failing(self.failing, record),
            first_reward_error=record.first_reward_error or self.first_reward_error,
            seconds_per_update=(*self.seconds_per_update, max(0.0, record.seconds))[-PACE_WINDOW:],
            busy={} if first else self.busy,
            idle={name: _share(1 - self.busy.get(name, 0.0) / record.seconds) for name in self.hosts}
            if first
            else self.idle,
        )

    def progress(self, now: float) -> ProgressReport:
        """Return a report of this state to the operator. now: time of the report, in Unix seconds."""
        end, latest = self.end or AttemptEnd("Running"), self.latest
        measured = {} if latest is None else _measured(latest)
        return ProgressReport(
            attempt=self.attempt,
            state=end.state,
            time=max(0.0, now),
            stopAcknowledged=self.stop,
            reason=end.reason[:128] or None,
            message=end.message[:4096],
            head=self.head,
            cluster=self.cluster,
            warning=self._warning()[:1024],
            phase=self.phase[:256],
            update=self.update,
            updates=self.updates,
            version=self.version,
            versionTime=self.published[-1] if self.published else None,
            versionSeconds=_pace(self.published),
            secondsPerUpdate=_finite(fmean(self.seconds_per_update))
            if len(self.seconds_per_update) >= MIN_PACE_SAMPLES
            else None,
            accuracy=None if self.accuracy is None else _share(self.accuracy),
            heldOutReward=self.held_out_reward,
            prompts=self.prompts,
            samples=self.samples,
            tokens=self.tokens,
            checkpoint=self.checkpoint,
            export=self.export,
            replicas=tuple(
                ReplicaReport(pods=pods, idle=self.idle.get(name, 0.0), drained=name in self.drained)
                for name, pods in list(self.hosts.items())[:1024]
            ),
            **measured,
        )

    def _warning(self) -> str:
        names = ", ".join(sorted(name for name, batches in self.failing.items() if batches >= FAILING_BATCHES))
        if not names:
            return ""
        return (
            f"every call of reward {names} failed before each of the latest {FAILING_BATCHES} batches or more, so the run does "
            f"not learn what the manifest says. A failure: {self.first_reward_error}"
        )


def checkpoint_report(path: Path, update: int, time: float) -> CheckpointReport:
    """Return the entry of a checkpoint or an export in a report. time: when it became complete, in Unix seconds."""
    return CheckpointReport(uri=path.as_uri(), update=update, time=max(0.0, time))


def _measured(latest: UpdateRecord) -> dict[str, Any]:
    """Return the measures of the latest update, by the names of their fields in ProgressReport.

    Values that are not finite become None, because JSON cannot represent them.
    """
    return {
        "reward": _finite(latest.reward_mean),
        "lagMean": _finite(latest.lag_mean),
        "lagMax": latest.lag_max,
        "rolloutIdle": None if latest.rollout_idle is None else _share(latest.rollout_idle),
        "trainIdle": None if latest.train_idle is None else _share(latest.train_idle),
        "tokensPerSecond": _finite(latest.tokens_per_second),
    }


def _failing(before: Mapping[str, int], record: UpdateRecord) -> Mapping[str, int]:
    """Return `Standing.failing` after a record. A reward without calls since the previous batch keeps its number."""
    failed = {
        name: record.errors_by_reward.get(name, 0) + record.timeouts_by_reward.get(name, 0) == calls
        for name, calls in record.calls_by_reward.items()
    }
    counted = {name: before.get(name, 0) + 1 if all_failed else 0 for name, all_failed in failed.items()}
    return {**before, **counted}


def _accuracy(evaluation: EvaluationRecord) -> float | None:
    meaningful = accuracy_is_meaningful([(evaluation.accuracy, evaluation.reward_mean)])
    return _finite(evaluation.accuracy) if meaningful else None


def _held_out_reward(evaluation: EvaluationRecord) -> float | None:
    meaningful = reward_is_meaningful([(evaluation.accuracy, evaluation.reward_mean)])
    return _finite(evaluation.reward_mean) if meaningful else None


def _pace(published: tuple[float, ...]) -> float | None:
    if len(published) < MIN_PACE_SAMPLES:
        return None
    return max(0.0, median(later - earlier for earlier, later in pairwise(published)))


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _share(value: float) -> float:
    return min(1.0, max(0.0, value)) if math.isfinite(value) else 0.0

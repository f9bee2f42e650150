"""The summary of a run, summary.json, derived from the records."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import NamedTuple, TypedDict

from qwen35_trainer import __version__
from qwen35_trainer.progress.records import (
    CheckpointRecord,
    EvaluationRecord,
    ExportRecord,
    FinishRecord,
    RunOutcome,
    RunRecord,
    SpanRecord,
    UpdateRecord,
    latest,
    surviving_evaluations,
    surviving_updates,
)


class Summary(TypedDict):
    """The numbers of a run. None means that the run does not have the number: no evaluation, no rollout, or no update yet."""

    version: str
    """The release of qwen35."""
    startedAt: str | None
    """When the training first started, as 2026-01-31T09:30:00Z."""
    outcome: RunOutcome | None
    """None: the run has not finished."""
    message: str
    seconds: float
    updates: int
    updatesTotal: int | None
    weightVersion: int
    accuracyBefore: float | None
    """Held-out accuracy of the original model."""
    accuracyAfter: float | None
    """The last held-out accuracy after at least one update."""
    heldOutRewardBefore: float | None
    """Mean reward of the held-out prompts, at the same evaluations as the accuracies."""
    heldOutRewardAfter: float | None
    heldOutScores: dict[str, float]
    """Reward → mean of its scores in the latest evaluation, before its weight."""
    heldOutRewardBySource: dict[str, float]
    """Data source → mean reward in the latest evaluation."""
    heldOutLossBefore: float | None
    """SFT: negative log-likelihood of the validation examples, nats per target token."""
    heldOutLossAfter: float | None
    rewardMean: float | None
    """Mean reward of the last update."""
    scoreByReward: dict[str, float]
    """Of the last update."""
    rewardBySource: dict[str, float]
    """Of the last update."""
    loss: float | None
    """Of the last update; None if it is not finite."""
    promptsTrained: int
    samplesTrained: int
    tokensTrained: int
    maskedTokens: int
    maxVersionLag: int | None
    """The bound in the manifest; `maxTokenLag` is the maximum that occurred."""
    maxTokenLag: int | None
    meanTokenLag: float | None
    staleness: dict[str, int]
    """Trained tokens by lag in versions."""
    rolloutIdle: float | None
    """Share of the slot time of the rollout pool without a sequence, 0 to 1."""
    trainIdle: float | None
    """Share of the time during which the train pool waited, 0 to 1."""
    tokensPerSecond: float | None
    """Generated tokens per second."""
    trainedTokensPerSecond: float | None
    """Trained tokens per second, over the duration of all updates."""
    samplesPerSecond: float | None
    """Trained samples per second, over the duration of all updates."""
    timeToFirstUpdateSeconds: float | None
    peakRssMiB: float | None
    rewardErrors: int
    """Failed reward calls, including those of evaluations: the sum of the next two fields."""
    errorsByReward: dict[str, int]
    timeoutsByReward: dict[str, int]
    firstRewardError: str | None
    """Reward, prompt and reason of the first failed call."""
    groupsWithoutSignal: int
    groupsLeft: dict[str, int]
    """Groups that left untrained up to the last update, by reason. Prompts of discarded groups were dispatched again."""
    checkpoint: str | None
    export: str | None
    """The newest Hugging Face folder that the run wrote (checkpoint.export)."""
    exportProblem: str
    """Why the last export was not written, or empty."""


def summarise(records: Sequence[RunRecord], *, max_version_lag: int | None, peak_rss_mib: float | None) -> Summary:
    """Summarise a run so far. Updates that a resumed attempt repeated count once.

    Shares and rates are means over time: the weight of an update is its duration.
    """
    updates = surviving_updates(records)
    evaluations = surviving_evaluations(records)
    finish = _finish(records)
    checkpoint = latest(records, CheckpointRecord)
    exports = [record for record in records if isinstance(record, ExportRecord)]
    lags = _lags(updates)
    seconds = sum(update.seconds for update in updates)
    samples = sum(update.samples for update in updates)
    tokens = sum(update.tokens for update in updates)
    failures = _failures(updates, evaluations)
    return Summary(
        version=__version__,
        startedAt=_started(records),
        outcome=finish.outcome if finish else None,
        message=finish.message if finish else "",
        seconds=max((_time(record) for record in records), default=0.0),
        updates=len(updates),
        updatesTotal=updates[-1].updates_total if updates else None,
        weightVersion=_version(records),
        accuracyBefore=next((e.accuracy for e in evaluations if e.update == 0), None),
        accuracyAfter=next((e.accuracy for e in reversed(evaluations) if e.update > 0), None),
        heldOutRewardBefore=next((_finite(e.reward_mean) for e in evaluations if e.update == 0), None),
        heldOutRewardAfter=next((_finite(e.reward_mean) for e in reversed(evaluations) if e.update > 0), None),
        heldOutScores=dict(evaluations[-1].score_by_reward) if evaluations else {},
        heldOutRewardBySource=dict(evaluations[-1].reward_by_source) if evaluations else {},
        heldOutLossBefore=next((_finite(e.loss) for e in evaluations if e.update == 0), None),
        heldOutLossAfter=next((_finite(e.loss) for e in reversed(evaluations) if e.update > 0), None),
        rewardMean=_finite(updates[-1].reward_mean) if updates else None,
        scoreByReward=dict(updates[-1].score_by_reward) if updates else {},
        rewardBySource=dict(updates[-1].reward_by_source) if updates else {},
        loss=_finite(updates[-1].loss) if updates else None,
        promptsTrained=sum(update.prompts for update in updates),
        samplesTrained=samples,
        tokensTrained=tokens,
        maskedTokens=sum(update.masked_tokens for update in updates),
        maxVersionLag=max_version_lag,
        maxTokenLag=max(lags, default=None),
        meanTokenLag=sum(lag * count for lag, count in lags.items()) / lags.total() if lags else None,
        staleness={str(lag): lags[lag] for lag in sorted(lags)},
        rolloutIdle=_mean_over_time(updates, lambda update: update.rollout_idle),
        trainIdle=_mean_over_time(updates, lambda update: update.train_idle),
        tokensPerSecond=_mean_over_time(updates, lambda update: update.tokens_per_second),
        trainedTokensPerSecond=tokens / seconds if seconds else None,
        samplesPerSecond=samples / seconds if seconds else None,
        timeToFirstUpdateSeconds=updates[0].time if updates else None,
        peakRssMiB=peak_rss_mib,
        rewardErrors=sum(update.reward_errors for update in updates)
        + sum(sum(e.errors_by_reward.values()) + sum(e.timeouts_by_reward.values()) for e in evaluations),
        errorsByReward=failures.errors,
        timeoutsByReward=failures.timeouts,
        firstRewardError=failures.first,
        groupsWithoutSignal=sum(update.groups_without_signal for update in updates),
        groupsLeft=_groups_left(updates),
        checkpoint=checkpoint.path if checkpoint else None,
        export=next((record.path for record in reversed(exports) if not record.problem), None),
        exportProblem=exports[-1].problem if exports else "",
    )


def _finish(records: Sequence[RunRecord]) -> FinishRecord | None:
    """Return the record of how the run ended. None if the last attempt has not ended."""
    for record in reversed(records):
        if isinstance(record, FinishRecord):
            return record
        if isinstance(record, UpdateRecord):
            return None
    return None


def _started(records: Sequence[RunRecord]) -> str | None:
    """Return the start time of the training, computed from the first record that has a `wall_time`."""
    for record in records:
        if isinstance(record, UpdateRecord | FinishRecord) and record.wall_time is not None:
            started = datetime.fromtimestamp(record.wall_time - record.time, UTC)
            return started.isoformat(timespec="seconds").replace("+00:00", "Z")
    return None


class _Failures(NamedTuple):
    """Failed reward calls by reward, and a description of the first one."""

    errors: dict[str, int]
    timeouts: dict[str, int]
    first: str | None


def _failures(updates: Sequence[UpdateRecord], evaluations: Sequence[EvaluationRecord]) -> _Failures:
    errors: Counter[str] = Counter()
    timeouts: Counter[str] = Counter()
    records: list[UpdateRecord | EvaluationRecord] = [*updates, *evaluations]
    for record in records:
        errors.update(record.errors_by_reward)
        timeouts.update(record.timeouts_by_reward)
    failed = sorted((record for record in records if record.first_reward_error), key=lambda record: record.time)
    return _Failures(
        {name: errors[name] for name in sorted(errors)},
        {name: timeouts[name] for name in sorted(timeouts)},
        failed[0].first_reward_error if failed else None,
    )


def _lags(updates: Sequence[UpdateRecord]) -> Counter[int]:
    lags: Counter[int] = Counter()
    for update in updates:
        lags.update({lag: count for lag, count in update.lag_histogram.items() if count})
    return lags


def _groups_left(updates: Sequence[UpdateRecord]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for update in updates:
        counts.update(update.groups_left)
    return {reason: counts[reason] for reason in sorted(counts)}


def _version(records: Sequence[RunRecord]) -> int:
    return next((r.version for r in reversed(records) if not isinstance(r, SpanRecord | FinishRecord)), 0)


def _time(record: RunRecord) -> float:
    return record.end if isinstance(record, SpanRecord) else record.time


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _mean_over_time(updates: Sequence[UpdateRecord], value: Callable[[UpdateRecord], float | None]) -> float | None:
    pairs = [(number, update.seconds) for update in updates if (number := value(update)) is not None]
    seconds = sum(weight for _, weight in pairs)
    return sum(number * weight for number, weight in pairs) / seconds if seconds else None

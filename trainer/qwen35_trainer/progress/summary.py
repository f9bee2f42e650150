"""The summary of a run, summary.json, derived from the records."""

import math
from collections.abc import Iterable, Mapping
from typing import TypedDict

from qwen35_trainer import __version__
from qwen35_trainer.progress.records import TIME_PARTS, RunOutcome, RunRecord
from qwen35_trainer.progress.repeats import marked
from qwen35_trainer.progress.totals import RunTotals


class Summary(TypedDict):
    """The numbers of a run. None means that the run does not have a number, for example before its first evaluation."""

    version: str
    """The release of qwen35."""
    startedAt: str | None
    """Time at which the training first started, such as 2026-01-31T09:30:00Z."""
    outcome: RunOutcome | None
    """How the run ended. None: the run has not finished."""
    message: str
    seconds: float
    updates: int
    updatesTotal: int | None
    weightVersion: int
    """The newest version that trained, was evaluated, saved or exported.

    It decreases only if an attempt resumes from a checkpoint.
    """
    accuracyBefore: float | None
    """Accuracy on the held-out prompts before training: share, 0 to 1, of the responses to which every reward gave
    at least 1."""
    accuracyAfter: float | None
    """Accuracy on the held-out prompts, as for `accuracyBefore`, in the last evaluation after at least one update."""
    heldOutRewardBefore: float | None
    """Mean reward of the held-out prompts before training."""
    heldOutRewardAfter: float | None
    heldOutScores: dict[str, float]
    """Name of a reward → mean of its unweighted scores in the latest evaluation."""
    heldOutRewardBySource: dict[str, float]
    """Data source → mean reward in the latest evaluation."""
    heldOutLossBefore: float | None
    """Negative log-likelihood of the validation examples before training, in nats per target token (SFT)."""
    heldOutLossAfter: float | None
    rewardMean: float | None
    """Mean reward of the last update."""
    scoreByReward: dict[str, float]
    """Name of a reward → mean of its unweighted scores in the last update."""
    rewardBySource: dict[str, float]
    """Data source → mean reward in the last update."""
    loss: float | None
    """Loss of the last update. None: it is not finite, or no update has trained."""
    promptsTrained: int
    samplesTrained: int
    tokensTrained: int
    maskedTokens: int
    maxVersionLag: int | None
    """Maximum lag that the manifest allows. The maximum that occurred is `maxTokenLag`."""
    maxTokenLag: int | None
    meanTokenLag: float | None
    staleness: dict[str, int]
    """Lag in versions → number of trained tokens."""
    rolloutIdle: float | None
    """Share, 0 to 1, of the duration of all updates during which a replica had no sequence to generate, averaged
    over the replicas."""
    trainIdle: float | None
    """Share, 0 to 1, of the duration of all updates during which the train pool waited for a batch."""
    trainTime: dict[str, float]
    """Activity → its share, 0 to 1, of the duration of all updates.

    The activities are training, waiting (for a batch), assembling (the batch), copying (weights for publications), saving
    (copying the state for checkpoints), evaluating (SFT only), and driver (the remaining time). Activities that took no time
    are left out.
    """
    tokensPerSecond: float | None
    """Tokens that the rollout pool generated per second, averaged over the duration of all updates."""
    trainedTokensPerSecond: float | None
    """Trained tokens per second, over the duration of all updates."""
    samplesPerSecond: float | None
    """Trained samples per second, over the duration of all updates."""
    timeToFirstUpdateSeconds: float | None
    peakRssMiB: float | None
    rewardErrors: int
    """Number of failed reward calls in training and in evaluations: errors and time-outs together."""
    errorsByReward: dict[str, int]
    timeoutsByReward: dict[str, int]
    firstRewardError: str | None
    """Reward, prompt and reason of the first failed reward call, in training or in an evaluation. None:
    no call failed."""
    groupsWithoutSignal: int
    groupsLeft: dict[str, int]
    """Reason → number of groups that left the pipeline untrained up to the last update. Prompts of discarded groups
    were dispatched again."""
    checkpoint: str | None
    export: str | None
    """Path of the newest Hugging Face folder that the run wrote (`checkpoint.export`)."""
    exportProblem: str
    """Why the last export failed; empty if it succeeded or if there was none."""


def summarise(records: Iterable[RunRecord], *, max_version_lag: int | None, peak_rss_mib: float | None) -> Summary:
    """Summarise a run so far. An update that a resumed attempt repeated counts once.

    records: iterated twice, so it must not be an iterator. Shares and rates are means over the updates, weighted with
    the duration of each update.
    """
    totals = RunTotals()
    for record, repeated in marked(records):
        totals.add(record, repeated=repeated)
    return summary_of(totals, max_version_lag=max_version_lag, peak_rss_mib=peak_rss_mib)


def summary_of(totals: RunTotals, *, max_version_lag: int | None, peak_rss_mib: float | None) -> Summary:
    """Return the summary of the run whose records were added to `totals`.

    max_version_lag: the manifest's maximum lag; None in SFT. peak_rss_mib: peak memory of the run in MiB;
    None: not measured.
    """
    update, evaluation, finish = totals.update, totals.evaluation, totals.finish
    before, after = totals.evaluation_before, totals.evaluation_after
    lags, seconds, failures = totals.lags, totals.update_seconds, totals.failures
    return Summary(
        version=__version__,
        startedAt=totals.started,
        outcome=finish.outcome if finish else None,
        message=finish.message if finish else "",
        seconds=totals.seconds,
        updates=totals.updates,
        updatesTotal=update.updates_total if update else None,
        weightVersion=totals.version,
        accuracyBefore=before.accuracy if before else None,
        accuracyAfter=after.accuracy if after else None,
        heldOutRewardBefore=_finite(before.reward_mean) if before else None,
        heldOutRewardAfter=_finite(after.reward_mean) if after else None,
        heldOutScores=dict(evaluation.score_by_reward) if evaluation else {},
        heldOutRewardBySource=dict(evaluation.reward_by_source) if evaluation else {},
        heldOutLossBefore=_finite(before.loss) if before else None,
        heldOutLossAfter=_finite(after.loss) if after else None,
        rewardMean=_finite(update.reward_mean) if update else None,
        scoreByReward=dict(update.score_by_reward) if update else {},
        rewardBySource=dict(update.reward_by_source) if update else {},
        loss=_finite(update.loss) if update else None,
        promptsTrained=totals.prompts,
        samplesTrained=totals.samples,
        tokensTrained=totals.tokens,
        maskedTokens=totals.masked_tokens,
        maxVersionLag=max_version_lag,
        maxTokenLag=max(lags, default=None),
        meanTokenLag=sum(lag * count for lag, count in lags.items()) / lags.total() if lags else None,
        staleness={str(lag): lags[lag] for lag in sorted(lags)},
        rolloutIdle=totals.rollout_idle.value,
        trainIdle=totals.train_idle.value,
        trainTime=_shares(totals.time_parts, seconds),
        tokensPerSecond=totals.tokens_per_second.value,
        trainedTokensPerSecond=totals.tokens / seconds if seconds else None,
        samplesPerSecond=totals.samples / seconds if seconds else None,
        timeToFirstUpdateSeconds=totals.first_update_time,
        peakRssMiB=peak_rss_mib,
        rewardErrors=totals.reward_errors,
        errorsByReward=_by_name(failures.errors),
        timeoutsByReward=_by_name(failures.timeouts),
        firstRewardError=failures.first,
        groupsWithoutSignal=totals.groups_without_signal,
        groupsLeft=_by_name(totals.groups_left),
        checkpoint=totals.checkpoint.path if totals.checkpoint else None,
        export=totals.exported,
        exportProblem=totals.export.problem if totals.export else "",
    )


def _shares(parts: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Return, for each activity, its seconds in `parts` as a share of `seconds`.

    Activities that took no time are left out.
    """
    return {part: parts[part] / seconds for part in TIME_PARTS if parts[part] > 0} if seconds else {}


def _by_name(counts: Mapping[str, int]) -> dict[str, int]:
    return {name: counts[name] for name in sorted(counts)}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None

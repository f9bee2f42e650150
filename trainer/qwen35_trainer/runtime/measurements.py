"""The measurements of a run: its clock, how busy both pools were, and the records of updates and evaluations.

    PoolMeter: the rollout pool ─► PipelineMeasures ─┐
    UpdateTimes: the train pool ─────────────────────┼─► update_record, evaluation_record ─► progress/records.py
    TrainBatch, ScoredGroup, UpdateMetrics ──────────┘

TrainingClock gives the times of all records. The functions that build a record have no side effects.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import comb
from statistics import fmean

import numpy as np

from qwen35_trainer.engines.train_batch import TrainBatch
from qwen35_trainer.engines.train_engine import UpdateMetrics
from qwen35_trainer.progress.records import EvaluationRecord, UpdateRecord, writable
from qwen35_trainer.rewards.combiner import Failures
from qwen35_trainer.rewards.reward import CombinedScore
from qwen35_trainer.runtime.assembly import ScoredGroup, TokenAge
from qwen35_trainer.weights.probe import ProbeResult


@dataclass(frozen=True)
class TrainingClock:
    """Converts wall-clock time to training time: seconds since the run first started, without pauses between attempts.

    started: time at which this attempt began, in Unix seconds. earlier: duration of all previous attempts
    together, in seconds.
    """

    started: float
    earlier: float = 0.0

    def now(self) -> float:
        return self.at(time.time())

    def at(self, wall: float) -> float:
        """Convert wall-clock time, in Unix seconds, to training time: seconds of the run without pauses between attempts."""
        return wall - self.started + self.earlier

    def wall(self, at: float) -> float:
        """Convert training time to wall-clock time, in Unix seconds. The inverse of `at`.

        at: the training time, in seconds since the run first started, without pauses between attempts.
        """
        return at + self.started - self.earlier


@dataclass
class PoolMeter:
    """Measures the idle share and the tokens per second of a pool of `workers` workers since the previous `read`.

    The caller adds the number of generated tokens to `tokens`. Times are in Unix seconds.
    """

    workers: int
    tokens: int = 0
    _busy: float = 0.0
    _since: float = field(default_factory=time.time)

    def add(self, start: float, end: float) -> None:
        """Record that one worker was busy from `start` to `end`, in Unix seconds."""
        self._busy += max(0.0, end - max(start, self._since))

    def read(self) -> tuple[float, float]:
        """Return the idle share of the pool, 0 to 1, and the tokens per second since the previous call."""
        now = time.time()
        seconds = max(now - self._since, 1e-6)
        idle = min(1.0, max(0.0, 1.0 - self._busy / (seconds * self.workers)))
        rate = self.tokens / seconds
        self._since, self._busy, self.tokens = now, 0.0, 0
        return idle, rate


@dataclass
class UpdateTimes:
    """Seconds since the previous update, split into what the train pool did or waited for.

        previous update ─► copying ─► saving ─► evaluating ─► waiting ─► assembling ─► training ─► this update
                              └─► publishing: overlaps the other parts

    The method `driver` computes the rest, which belongs to none of these parts. Publishing is not a part, because
    training continues meanwhile.
    """

    waiting: float = 0.0
    assembling: float = 0.0
    training: float = 0.0
    copying: float = 0.0
    saving: float = 0.0
    evaluating: float = 0.0
    publishing: float = 0.0

    def trained(self, waited: float, seconds: float) -> None:
        """Add `waited` seconds of waiting for a batch, and `seconds` of training that batch."""
        self.waiting += waited
        self.training += seconds

    def assembled(self, seconds: float) -> None:
        """Add seconds in which the driver made a batch from its groups."""
        self.assembling += seconds

    def copied(self, seconds: float) -> None:
        """Add seconds in which the train ranks copied the weights for a publication, or computed a probe.

        For a probe, the train ranks compute log-probs, with which replicas compare theirs.
        """
        self.copying += seconds

    def saved(self, seconds: float) -> None:
        """Add seconds in which the train ranks copied their state for a checkpoint.

        Writing the files does not count.
        """
        self.saving += seconds

    def evaluated(self, seconds: float) -> None:
        """Add seconds of an evaluation on the train pool. Only mode SFT evaluates there."""
        self.evaluating += seconds

    def published(self, seconds: float) -> None:
        """Add seconds of a publication: from the command to send a copied version until all replicas have loaded it."""
        self.publishing += seconds

    def driver(self, seconds: float) -> float:
        """Return the seconds that belong to none of the parts: work of the driver. At least 0.

        seconds: all seconds since the previous update.
        """
        parts = self.waiting + self.assembling + self.training + self.copying + self.saving + self.evaluating
        return max(0.0, seconds - parts)


@dataclass(frozen=True)
class ProbeMeasures:
    """Results of probes since the previous batch.

    A probe compares the log-probs of a replica with those of the trainer.
    """

    results: Sequence[ProbeResult] = ()
    """Results of the probes that replicas have passed."""
    skipped: int = 0
    """Number of versions that got no probe, because a probe would have taken too much of the train ranks' time."""
    dropped: int = 0
    """Number of probes that replicas have dropped, because a later version was published first or no
    slot became free."""


@dataclass(frozen=True)
class PipelineMeasures:
    """Measurements of the rollout pool since the previous batch."""

    counted: int
    """Number of groups that count against the window, which limits how many groups are in the pipeline."""
    limit: int
    idle: float
    """Share, 0 to 1, of the time in which a replica had no sequence to generate, averaged over the replicas."""
    tokens_per_second: float
    untrained: Mapping[str, int]
    """Reason → number of groups that left the pipeline without training."""
    failures: Failures
    """Failed reward calls in the groups that were scored for training since the previous batch, including groups that
    do not train. Failed calls in an evaluation are counted in the record of the evaluation."""
    probes: ProbeMeasures = ProbeMeasures()
    replicas_lost: int = 0


def update_record(
    measured: UpdateMetrics,
    *,
    step: int,
    update: int,
    updates_total: int,
    version: int,
    time: float,
    wall_time: float,
    seconds: float,
    batch: TrainBatch,
    age: TokenAge,
    groups: Sequence[ScoredGroup],
    times: UpdateTimes,
    pipeline: PipelineMeasures | None,
) -> UpdateRecord:
    """Return the record of one update (optimizer step) of a batch.

    step: index of the update within its batch, from 0. update: number of the update within the run, from 1. time: end of
    the batch, in seconds of training time (TrainingClock). wall_time: end of the batch, in Unix seconds. seconds:
    seconds from the end of the previous batch to the end of this one. age: lags of the batch's tokens. groups: all
    groups of the batch. times: how the train pool spent `seconds`. pipeline: measurements of the rollout pool; None in
    SFT.

    Durations, and counts over the whole batch, are only in the record of the batch's first update, so that sums over
    records count them once.
    """
    first = step == 0
    samples = batch.samples // batch.updates
    of_step = slice(step * len(groups) // batch.updates, (step + 1) * len(groups) // batch.updates)
    without_signal = sum(len({r for r in group.rewards if r is not None}) < 2 for group in groups[of_step])
    # The greedy baseline does not train, and is drawn from another distribution.
    groups = [group if batch.baseline is None else group.without_last() for group in groups[of_step]]
    rewards = np.array([reward for group in groups for reward in group.rewards if reward is not None])
    sequences = [sequence for group in groups for sequence in group.sequences]
    failures = pipeline.failures if pipeline is not None and first else Failures()
    probes = pipeline.probes if pipeline is not None and first else ProbeMeasures()
    lengths = np.array([len(sequence.tokens) for sequence in sequences])
    mean = measured.means.get
    clipped = [value for name, value in measured.means.items() if name in ("clip_fraction_low", "clip_fraction_high")]
    trained = sum(age.histogram.values())
    return UpdateRecord(
        update=update,
        updates_total=updates_total,
        version=version,
        time=time,
        wall_time=wall_time,
        seconds=seconds if first else 0.0,
        prompts=len(groups) or samples,
        samples=samples,
        tokens=measured.tokens,
        masked_tokens=age.masked if first else 0,
        loss=measured.loss,
        gradient_norm=measured.gradient_norm,
        learning_rate=measured.learning_rate,
        policy_loss=mean("policy_loss"),
        entropy=mean("entropy"),
        kl=mean("kl"),
        kl_coefficient=batch.kl_coefficient,
        behaviour_kl=mean("behaviour_kl"),
        probe_difference_mean=max((each.mean for each in probes.results), default=None),
        probe_difference_max=max((each.maximum for each in probes.results), default=None),
        probes_passed=len(probes.results),
        probes_skipped=probes.skipped,
        probes_dropped=probes.dropped,
        clip_fraction=sum(clipped) if clipped else None,
        correction_weight_mean=mean("correction_weight"),
        router_load_balancing=mean("router_load_balancing"),
        router_z=mean("router_z"),
        mtp_nll=mean("mtp_nll"),
        saved_token_share=mean("saved_token_share"),
        replayed_token_share=mean("replayed_token_share"),
        seconds_waiting=times.waiting if first else 0.0,
        seconds_assembling=times.assembling if first else 0.0,
        seconds_training=times.training if first else 0.0,
        seconds_copying=times.copying if first else 0.0,
        seconds_saving=times.saving if first else 0.0,
        seconds_evaluating=times.evaluating if first else 0.0,
        seconds_driver=times.driver(seconds) if first else 0.0,
        seconds_publishing=times.publishing if first else 0.0,
        train_idle=min(1.0, times.waiting / max(seconds, 1e-6)),
        reward_mean=float(rewards.mean()) if rewards.size else None,
        reward_std=float(rewards.std()) if rewards.size else None,
        response_tokens_mean=float(lengths.mean()) if lengths.size else None,
        response_tokens_max=int(lengths.max()) if lengths.size else None,
        truncated_share=float(np.mean([s.truncated for s in sequences])) if sequences else None,
        lag_mean=sum(lag * count for lag, count in age.histogram.items()) / trained if trained else None,
        lag_max=max(age.histogram) if trained else None,
        lag_histogram=age.histogram if first else {},
        window_dispatched=None if pipeline is None else pipeline.counted,
        window_limit=None if pipeline is None else pipeline.limit,
        rollout_idle=None if pipeline is None else pipeline.idle,
        replicas_lost=None if pipeline is None else pipeline.replicas_lost if first else 0,
        tokens_per_second=None if pipeline is None else pipeline.tokens_per_second,
        score_by_reward=_score_by_reward(groups),
        reward_by_source=_reward_by_source(groups),
        calls_by_reward=dict(failures.calls),
        reward_errors=failures.total(),
        errors_by_reward=dict(failures.errors),
        timeouts_by_reward=dict(failures.timeouts),
        first_reward_error=writable(failures.first),
        groups_left=dict(pipeline.untrained) if pipeline is not None and first else {},
        groups_without_signal=without_signal,
    )


def evaluation_record(groups: Sequence[ScoredGroup], *, update: int, version: int, time: float) -> EvaluationRecord:
    """Return the record of an evaluation of the weights `version` after update `update`.

    time: end of the evaluation, in seconds of training time (TrainingClock). A response that could not be generated
    counts as 0, and so does a response that could not be scored by a reward with `onError: Skip`.
    """
    scores = [score for group in groups for score in group.scores]
    lengths = [len(sequence.tokens) for group in groups for sequence in group.sequences]
    failures = Failures()
    for group in groups:
        for score in group.scores:
            failures.add(group.prompt.prompt.id, score)
    return EvaluationRecord(
        update=update,
        version=version,
        time=time,
        accuracy=float(np.mean([_right(score) for score in scores])),
        pass_at_k=_pass_at_k([[_right(score) for score in group.scores] for group in groups]),
        reward_mean=float(np.mean([score.value or 0.0 for score in scores])),
        score_by_reward=_score_by_reward(groups),
        reward_by_source=_reward_by_source(groups, missing=0.0),
        errors_by_reward=dict(failures.errors),
        timeouts_by_reward=dict(failures.timeouts),
        first_reward_error=writable(failures.first),
        samples=len(scores),
        response_tokens_mean=float(np.mean(lengths)),
    )


def _right(score: CombinedScore) -> bool:
    """Return whether a response is accurate: every reward with a weight above 0 gave it at least 1, and none failed."""
    return not score.errors and all(part >= 1.0 for name, part in score.parts.items() if name not in score.penalties)


def _pass_at_k(outcomes: Sequence[list[bool]]) -> dict[int, float]:
    """Return k → pass@k: the probability that at least one of k responses to a prompt is right, mean over prompts.

    For a prompt with n responses, of which c are right, the estimate is 1 - C(n - c, k) / C(n, k), where C is the
    binomial coefficient. It is unbiased (Chen et al., arXiv:2107.03374 eq. 1). k is each power of 2 from 2 to n, and n.
    If prompts have different n, the smallest limits k. The result is empty if n is 1.

    outcomes: for each prompt, whether each of its responses is right.
    """
    samples = min(len(rights) for rights in outcomes)
    sizes = sorted({2**power for power in range(1, samples.bit_length())} | {samples} - {1})
    return {k: 1.0 - fmean(comb(rights.count(False), k) / comb(len(rights), k) for rights in outcomes) for k in sizes}


def _score_by_reward(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Return name of a reward → mean of its scores in the groups. The weights of rewards are not applied."""
    scores: defaultdict[str, list[float]] = defaultdict(list)
    for group in groups:
        for score in group.scores:
            for name, part in score.parts.items():
                scores[name].append(part)
    return {name: fmean(parts) for name, parts in scores.items()}


def _reward_by_source(groups: Sequence[ScoredGroup], missing: float | None = None) -> dict[str, float]:
    """Return data source → mean reward of the responses to its prompts.

    missing: the value that counts for a response without a reward; None: such responses are left out.
    """
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    for group in groups:
        for reward in group.rewards:
            if (value := missing if reward is None else reward) is not None:
                rewards[group.prompt.prompt.source].append(value)
    return {source: fmean(values) for source, values in rewards.items()}


def supervised_evaluation_record(loss: float, *, update: int, samples: int, time: float) -> EvaluationRecord:
    """Return the record of an evaluation in SFT after update `update`.

    loss: held-out negative log-likelihood per target token, in nats. samples: number of held-out examples. time: end of
    the evaluation, in seconds of training time (TrainingClock).
    """
    return EvaluationRecord(update=update, version=0, time=time, samples=samples, loss=loss)

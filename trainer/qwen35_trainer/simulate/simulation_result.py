"""The result of a simulated run, and its measurement between the end of the warm-up and the last measured batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from qwen35_trainer.pipeline.actions import LeaveReason
from qwen35_trainer.simulate.response_lengths import GroupSampler
from qwen35_trainer.simulate.simulated_replica import SimulatedSequence
from qwen35_trainer.simulate.simulated_rollout import SimulatedRollout
from qwen35_trainer.simulate.workload import BatchPolicy, MissedDeadlinePolicy, Workload


@dataclass(frozen=True)
class SimulationResult:
    """The measures of a simulated run. Shares are between 0 and 1, lags in versions, times in the workload's unit (seconds).

    Measures that say "whole run" include warm-up and cool-down; all others cover the measured batches.
    """

    throughput: float
    """Trained tokens per second, including masked ones."""
    effective_throughput: float
    """Trained tokens per second, without those masked because of their age."""
    ideal_throughput: float
    """The throughput if the slower pool were always busy."""
    mean_lag: float
    """Mean lag of groups: from the version of the first token to the version that trained it."""
    max_lag: int
    """Maximum lag of a group."""
    lag_histogram: tuple[int, ...]
    """Number of groups by lag, from 0."""
    mean_token_lag: float
    """Mean lag of the tokens in the loss."""
    max_token_lag: int
    """Maximum lag of a token in the loss."""
    masked_share: float
    """Share of the tokens of trained groups that were masked because of their age."""
    discarded_share: float
    """Share of the groups that left because they missed their deadline, whole run."""
    filtered_share: float
    """Share of the groups that left because they had no signal, whole run."""
    mean_trained_length: float
    """Mean response tokens of the trained sequences."""
    true_mean_length: float
    """Mean of the length distribution over the same batches. A difference above chance means that the rule is biased."""
    idle_slots: float
    """Share of the rollout pool's slot time without decoding. Lost replicas do not count as idle."""
    idle_replicas: float
    """Share of the time of the pool's replicas during which they decoded nothing at all."""
    idle_lane: float | None
    """As `idle_slots`, for the straggler lane. None without a lane."""
    train_idle: float
    """Share of the time during which the trainer waited for a batch."""
    seconds: float
    """Duration of the measured batches."""
    mean_step: float
    """Mean seconds from one trained batch to the next."""
    time_to_first_batch: float
    """Seconds from the start until the first batch began to train."""
    time_to_full: float | None
    """Seconds from the start until all slots of the pool were taken. None if that never happened."""
    publications: int
    """Number of publications, whole run."""
    lost_replicas: int
    """Number of lost replicas, whole run."""
    moves: int
    """Number of sequences that moved to the lane, whole run."""
    events: int
    """Number of events that the coordinator processed, whole run."""
    exits: dict[str, int]
    """Number of groups by the reason for which they left, whole run."""

    @property
    def bias(self) -> float:
        """The mean length of trained sequences, relative to the mean of the distribution, minus 1."""
        return self.mean_trained_length / self.true_mean_length - 1

    def as_dict(self) -> dict[str, object]:
        """Return the result as plain data for JSON, with camelCase keys."""
        return {_camel(name): value for name, value in {**asdict(self), "bias": self.bias}.items()}


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.title() for word in rest)


class TrainedTotals:
    """Sums over the groups that have trained so far."""

    def __init__(self, max_token_lag: int | None) -> None:
        """max_token_lag: tokens with a larger lag are masked. None: no token is masked."""
        self.tokens = self.masked = self.token_lag = 0.0
        self.max_token_lag = self.sequences = 0
        self.lags: Counter[int] = Counter()
        self._mask_above = max_token_lag

    def add(self, version: int, group: Iterable[SimulatedSequence]) -> None:
        """Add a group that trains at `version`."""
        birth = version
        for sequence in group:
            self.sequences += 1
            for born, tokens in sequence.spans:
                lag = version - born
                birth = min(birth, born)
                if self._mask_above is not None and lag > self._mask_above:
                    self.masked += tokens
                    continue
                self.token_lag += lag * tokens
                self.max_token_lag = max(self.max_token_lag, lag)
            self.tokens += sequence.length
        self.lags[version - birth] += 1


@dataclass(frozen=True)
class _Totals:
    """The time used and the time available, from the start up to a moment."""

    time: float
    training: float
    decoding: float
    """Sequence-seconds of decoding in the pool."""
    busy: float
    """Replica-seconds of decoding in the pool."""
    slots: float
    """Slot-seconds of the pool."""
    replicas: float
    """Replica-seconds of the pool."""
    lane_decoding: float
    lane_slots: float


class Measurement:
    """Collects the measures of one simulated run, which reports each batch before and after it trains."""

    def __init__(self, workload: Workload, sampler: GroupSampler, rollout: SimulatedRollout) -> None:
        masking = (
            workload.policy is BatchPolicy.DEADLINE_FIRST
            and workload.on_missed_deadline is MissedDeadlinePolicy.MASK_TOKENS
        )
        self._workload, self._sampler, self._rollout = workload, sampler, rollout
        self.trained = TrainedTotals(workload.max_version_lag if masking else None)
        self.train_seconds = 0.0
        """Seconds of training so far."""
        self.first_batch_at: float | None = None
        """When the first batch began to train."""
        self._begin = self._end = _Totals(*[0.0] * 8)

    def batch_begins(self, now: float, batch: int, version: int, groups: Iterable[list[SimulatedSequence]]) -> None:
        """Add a batch that begins to train at `version`."""
        if self.first_batch_at is None:
            self.first_batch_at = now
        if self._workload.warm_up <= batch < self._workload.batches:
            for group in groups:
                self.trained.add(version, group)

    def batch_trained(self, now: float, batch: int, seconds: float) -> None:
        """Add the duration of a batch that has trained."""
        self.train_seconds += seconds
        if batch + 1 == self._workload.warm_up:
            self._begin = self._totals(now)
        if batch + 1 == self._workload.batches:
            self._end = self._totals(now)

    def _totals(self, now: float) -> _Totals:
        pool, lane = self._rollout.pool, self._rollout.lane
        pool.advance(now)
        lane.advance(now)
        return _Totals(
            now,
            self.train_seconds,
            *self._rollout.decoded(lane=False),
            pool.slot_seconds,
            pool.replica_seconds,
            self._rollout.decoded(lane=True)[0],
            lane.slot_seconds,
        )

    def result(self, left_by_reason: dict[LeaveReason, int], publications: int, events: int) -> SimulationResult:
        """Return the measures of the run. May be called only after the end of the run."""
        workload, trained, begin, end = self._workload, self.trained, self._begin, self._end
        seconds = end.time - begin.time
        batches = workload.batches - workload.warm_up
        groups, exits = trained.lags.total(), sum(left_by_reason.values())
        tokens_in_loss = trained.tokens - trained.masked
        return SimulationResult(
            throughput=trained.tokens / seconds,
            effective_throughput=tokens_in_loss / seconds,
            ideal_throughput=ideal_throughput(workload),
            mean_lag=sum(lag * count for lag, count in trained.lags.items()) / groups,
            max_lag=max(trained.lags),
            lag_histogram=tuple(trained.lags[lag] for lag in range(max(trained.lags) + 1)),
            mean_token_lag=trained.token_lag / tokens_in_loss if tokens_in_loss else 0.0,
            max_token_lag=trained.max_token_lag,
            masked_share=trained.masked / trained.tokens,
            discarded_share=left_by_reason[LeaveReason.DISCARDED] / exits,
            filtered_share=left_by_reason[LeaveReason.FILTERED] / exits,
            mean_trained_length=trained.tokens / trained.sequences,
            true_mean_length=self._sampler.mean(range(workload.warm_up, workload.batches)),
            idle_slots=_idle(end.decoding - begin.decoding, end.slots - begin.slots),
            idle_replicas=_idle(end.busy - begin.busy, end.replicas - begin.replicas),
            idle_lane=None
            if workload.lane is None
            else _idle(end.lane_decoding - begin.lane_decoding, end.lane_slots - begin.lane_slots),
            train_idle=_idle(end.training - begin.training, seconds),
            seconds=seconds,
            mean_step=seconds / batches,
            time_to_first_batch=self.first_batch_at or 0.0,
            time_to_full=self._rollout.full_at,
            publications=publications,
            lost_replicas=self._rollout.lost,
            moves=self._rollout.moves,
            events=events,
            exits={str(reason): count for reason, count in left_by_reason.items()},
        )


def ideal_throughput(workload: Workload) -> float:
    """Return the tokens per second of the slower pool if it is always busy, with all slots taken.

    If both pools share hardware, the result is that of both pools in turn. Prefill, environments, publications and the
    trainer's overhead are not included. They make the real throughput lower than this.
    """
    lane = () if workload.lane is None else workload.lane.replicas * (workload.lane.replica,)
    rollout = sum(replica.tokens_per_second for replica in (*workload.replicas, *lane))
    if workload.dynamic_sampling:
        rollout *= workload.signal
    trainer = workload.train_pool.units / workload.train_pool.seconds_per_token
    return 1 / (1 / rollout + 1 / trainer) if workload.policy is BatchPolicy.COLOCATED else min(rollout, trainer)


def _idle(used: float, available: float) -> float:
    return 1 - used / available if available else 0.0

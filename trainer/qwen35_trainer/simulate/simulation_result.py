"""The measures of a simulated run, taken from the end of the warm-up to the last measured batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from qwen35_trainer.pipeline.notices import LeaveReason
from qwen35_trainer.simulate.response_lengths import GroupSampler
from qwen35_trainer.simulate.simulated_replica import SimulatedSequence
from qwen35_trainer.simulate.simulated_rollout import SimulatedRollout
from qwen35_trainer.simulate.workload import BatchPolicy, MissedDeadlinePolicy, Workload


@dataclass(frozen=True)
class SimulationResult:
    """The measures of a simulated run.

    Shares are between 0 and 1, lags are in versions, and times are in the workload's unit, here called seconds.
    Measures whose description mentions the whole run include warm-up and cool-down. `time_to_first_batch` and
    `time_to_full` begin at the start of the run. All other measures cover only the measured batches.
    """

    throughput: float
    """Tokens of trained groups per second, including tokens that are masked because the lag is above the maximum."""
    effective_throughput: float
    """Tokens in the loss per second: those of trained groups without masked tokens."""
    ideal_throughput: float
    """Tokens per second if the slower pool were always busy (`ideal_throughput`)."""
    mean_lag: float
    """Mean lag of the trained groups. The lag of a group is the number of versions from its oldest token to its training."""
    max_lag: int
    """Maximum lag of a trained group. The lag of a group is the number of versions from its oldest token to its training."""
    lag_histogram: tuple[int, ...]
    """Number of trained groups by lag: the item at index n counts the groups with a lag of n versions."""
    mean_token_lag: float
    """Mean lag of the tokens in the loss, in versions."""
    max_token_lag: int
    """Maximum lag of a token in the loss, in versions."""
    masked_share: float
    """Share of the tokens of trained groups that are masked because the lag is above the maximum."""
    discarded_share: float
    """Share of the groups that left the pipeline in the whole run, trained or not, that were discarded
    because they missed their deadline."""
    filtered_share: float
    """Share of the groups that left the pipeline in the whole run, trained or not, that were dropped
    because all their rewards were equal."""
    mean_trained_length: float
    """Mean number of response tokens of the trained sequences."""
    true_mean_length: float
    """Mean of the length distribution over the measured batches, in tokens.

    If it differs from `mean_trained_length` by more than chance, the rule that chooses groups prefers some lengths.
    """
    idle_slots: float
    """Share of the rollout pool's slot-seconds in which the slot was empty or its sequence did not decode.

    Slots of lost replicas do not count.
    """
    idle_replicas: float
    """Share of the rollout pool's replica-seconds in which the replica decoded nothing at all."""
    idle_lane: float | None
    """Share of the straggler lane's slot-seconds in which the slot was empty or its sequence did not decode.

    None: there is no lane.
    """
    train_idle: float
    """Share of the time of the measured batches during which the trainer waited for a batch."""
    train_copying: float
    """Share of the time of the measured batches during which the trainer copied weights instead of training."""
    prefill_tokens: float
    """Number of tokens that prefill computed: prompts, and earlier response tokens of sequences that start again."""
    replicas_per_group: float
    """Mean number of replicas on which the sequences of a trained group started."""
    seconds: float
    """Duration of the measured batches, in seconds."""
    mean_step: float
    """Mean seconds from one trained batch to the next."""
    time_to_first_batch: float
    """Seconds from the start until the first batch began to train."""
    time_to_full: float | None
    """Seconds from the start until all slots of the pool were occupied for the first time. None: that never happened."""
    publications: int
    """Number of publications in the whole run."""
    lost_replicas: int
    """Number of losses of replicas in the whole run."""
    moves: int
    """Number of moves of sequences to the straggler lane in the whole run."""
    events: int
    """Number of events that the coordinator processed in the whole run."""
    exits: dict[str, int]
    """Reason → number of groups that left the pipeline for this reason in the whole run."""

    @property
    def bias(self) -> float:
        """The mean length of trained sequences, divided by the mean of the length distribution, minus 1.

        A negative value means that the rule that chooses groups prefers short responses.
        """
        return self.mean_trained_length / self.true_mean_length - 1

    def as_dict(self) -> dict[str, object]:
        """Return all measures and `bias` as plain data for JSON, with camelCase keys."""
        return {_camel(name): value for name, value in {**asdict(self), "bias": self.bias}.items()}


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.title() for word in rest)


class TrainedTotals:
    """Sums over the trained groups that have been added so far."""

    def __init__(self, max_token_lag: int | None) -> None:
        """Create empty totals. max_token_lag: tokens with a larger lag are masked; None: no token is masked."""
        self.tokens = self.masked = self.token_lag = 0.0
        self.max_token_lag = self.sequences = 0
        self.lags: Counter[int] = Counter()
        self._mask_above = max_token_lag

    def add(self, version: int, group: Iterable[SimulatedSequence]) -> None:
        """Add a group that trains. version: version of the weights at which the group trains."""
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
    """Sums from the start of the run up to one moment.

    The difference of two such objects measures the time between the two moments.
    """

    time: float
    training: float
    copying: float
    prefill: float
    """Number of tokens that replicas have prefilled."""
    decoding: float
    """Sequence-seconds of decoding in the pool."""
    busy: float
    """Replica-seconds of decoding in the pool."""
    slots: float
    """Available slot-seconds of the pool."""
    replicas: float
    """Available replica-seconds of the pool."""
    lane_decoding: float
    lane_slots: float


class Measurement:
    """Collects the measures of one simulated run.

    The simulation calls `batch_begins` before a batch trains, and `batch_trained` afterwards.
    """

    def __init__(self, workload: Workload, sampler: GroupSampler, rollout: SimulatedRollout) -> None:
        masking = (
            workload.policy is BatchPolicy.DEADLINE_FIRST
            and workload.on_missed_deadline is MissedDeadlinePolicy.MASK_TOKENS
        )
        self._workload, self._sampler, self._rollout = workload, sampler, rollout
        self.trained = TrainedTotals(workload.max_version_lag if masking else None)
        self.train_seconds = 0.0
        """Seconds of training so far."""
        self.copy_seconds = 0.0
        """Seconds so far during which the trainer copied weights."""
        self._group_replicas = 0  # sum over the trained groups
        self.first_batch_at: float | None = None
        """Time at which the first batch began to train. None: no batch has begun."""
        self._begin = self._end = _Totals(*[0.0] * 10)

    def batch_begins(
        self, now: float, batch: int, version: int, groups: Iterable[list[SimulatedSequence]], replicas: int
    ) -> None:
        """Add a batch that begins to train.

        version: version of the weights at which the batch trains. groups: the sequences of each group. replicas: the
        sum over all groups of the number of replicas on which the sequences of a group started.
        """
        if self.first_batch_at is None:
            self.first_batch_at = now
        if self._workload.warm_up <= batch < self._workload.batches:
            self._group_replicas += replicas
            for group in groups:
                self.trained.add(version, group)

    def batch_trained(self, now: float, batch: int, seconds: float) -> None:
        """Add the training time of a batch that has trained, in seconds."""
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
            self.copy_seconds,
            self._rollout.prefill_tokens,
            *self._rollout.decoded(lane=False),
            pool.slot_seconds,
            pool.replica_seconds,
            self._rollout.decoded(lane=True)[0],
            lane.slot_seconds,
        )

    def result(self, left_by_reason: dict[LeaveReason, int], publications: int, events: int) -> SimulationResult:
        """Return the measures of the run. May be called only after the end of the run.

        left_by_reason: reason → number of groups that left the pipeline.
        publications: number of publications in the whole run. events: number of the coordinator's events in the whole run.
        """
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
            train_idle=_idle(end.training - begin.training + end.copying - begin.copying, seconds),
            train_copying=(end.copying - begin.copying) / seconds,
            prefill_tokens=end.prefill - begin.prefill,
            replicas_per_group=self._group_replicas / groups,
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
    """Return the tokens per second of the slower pool if it were always busy with all slots occupied.

    With the policy `colocated`, both pools use the same hardware in turn, and the result is the throughput of
    the two turns together. With dynamic sampling, only the tokens of groups that train count. Prefill,
    environments, publications and the trainer's overhead are not included, so the simulated throughput is lower.
    """
    lane = () if workload.lane is None else workload.lane.replicas * (workload.lane.replica,)
    rollout = sum(replica.tokens_per_second for replica in (*workload.replicas, *lane))
    if workload.dynamic_sampling:
        rollout *= workload.signal
    trainer = workload.train_pool.units / workload.train_pool.seconds_per_token
    return 1 / (1 / rollout + 1 / trainer) if workload.policy is BatchPolicy.COLOCATED else min(rollout, trainer)


def _idle(used: float, available: float) -> float:
    return 1 - used / available if available else 0.0

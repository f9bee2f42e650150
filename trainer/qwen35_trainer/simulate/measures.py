"""What is measured of a run, between the end of its warm-up and its last measured batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from qwen35_trainer.pipeline.actions import Reason
from qwen35_trainer.simulate.engine import Sequence
from qwen35_trainer.simulate.lengths import Groups
from qwen35_trainer.simulate.load import Load, OnMissedDeadline, Policy
from qwen35_trainer.simulate.result import Result
from qwen35_trainer.simulate.rollout import Rollout


class Trained:
    """Sums over the groups of batches."""

    def __init__(self, oldest: int | None) -> None:
        """oldest: the greatest lag of a token in the loss; older ones are masked. None: nothing is."""
        self.tokens = self.masked = self.token_lag = 0.0
        self.max_token_lag = self.sequences = 0
        self.lags: Counter[int] = Counter()
        self._oldest = oldest

    def add(self, version: int, group: Iterable[Sequence]) -> None:
        """A group that trains at `version`."""
        birth = version
        for sequence in group:
            self.sequences += 1
            for born, tokens in sequence.spans:
                lag = version - born
                birth = min(birth, born)
                if self._oldest is not None and lag > self._oldest:
                    self.masked += tokens
                    continue
                self.token_lag += lag * tokens
                self.max_token_lag = max(self.max_token_lag, lag)
            self.tokens += sequence.length
        self.lags[version - birth] += 1


@dataclass(frozen=True)
class _Moment:
    """What had been used and what had been there, up to a moment."""

    time: float
    trainer: float
    decoding: float
    busy: float
    slots: float
    engines: float
    lane: float
    lane_slots: float


class Measures:
    """One run's. `batch_done` is told of each batch that has trained."""

    def __init__(self, load: Load, groups: Groups, rollout: Rollout) -> None:
        masking = load.policy is Policy.DEADLINE_FIRST and load.on_missed_deadline is OnMissedDeadline.MASK_TOKENS
        self._load, self._groups, self._rollout = load, groups, rollout
        self.trained = Trained(load.max_version_lag if masking else None)
        self.trainer = 0.0
        """Seconds in which it has trained."""
        self.first_batch: float | None = None
        """When the first batch began."""
        self._begin = self._end = _Moment(*[0.0] * 8)

    def batch_begins(self, now: float, batch: int, version: int, groups: Iterable[list[Sequence]]) -> None:
        if self.first_batch is None:
            self.first_batch = now
        if self._load.warm_up <= batch < self._load.batches:
            for group in groups:
                self.trained.add(version, group)

    def batch_done(self, now: float, batch: int, seconds: float) -> None:
        self.trainer += seconds
        if batch + 1 == self._load.warm_up:
            self._begin = self._moment(now)
        if batch + 1 == self._load.batches:
            self._end = self._moment(now)

    def _moment(self, now: float) -> _Moment:
        pool, lane = self._rollout.pool, self._rollout.lane
        pool.advance(now)
        lane.advance(now)
        return _Moment(
            now,
            self.trainer,
            *self._rollout.decoded(lane=False),
            pool.slot_seconds,
            pool.engine_seconds,
            self._rollout.decoded(lane=True)[0],
            lane.slot_seconds,
        )

    def result(self, left: dict[Reason, int], publications: int, events: int) -> Result:
        load, trained, begin, end = self._load, self.trained, self._begin, self._end
        seconds = end.time - begin.time
        batches = load.batches - load.warm_up
        groups, exits = trained.lags.total(), sum(left.values())
        kept = trained.tokens - trained.masked
        return Result(
            throughput=trained.tokens / seconds,
            effective_throughput=kept / seconds,
            ideal_throughput=ideal_throughput(load),
            mean_lag=sum(lag * count for lag, count in trained.lags.items()) / groups,
            max_lag=max(trained.lags),
            lag_histogram=tuple(trained.lags[lag] for lag in range(max(trained.lags) + 1)),
            mean_token_lag=trained.token_lag / kept if kept else 0.0,
            max_token_lag=trained.max_token_lag,
            masked_share=trained.masked / trained.tokens,
            discarded_share=left[Reason.DISCARDED] / exits,
            filtered_share=left[Reason.FILTERED] / exits,
            mean_trained_length=trained.tokens / trained.sequences,
            true_mean_length=self._groups.mean(range(load.warm_up, load.batches)),
            idle_slots=_idle(end.decoding - begin.decoding, end.slots - begin.slots),
            idle_engines=_idle(end.busy - begin.busy, end.engines - begin.engines),
            idle_lane=None if load.lane is None else _idle(end.lane - begin.lane, end.lane_slots - begin.lane_slots),
            idle_trainer=_idle(end.trainer - begin.trainer, seconds),
            seconds=seconds,
            mean_step=seconds / batches,
            time_to_first_batch=self.first_batch or 0.0,
            time_to_full=self._rollout.full,
            publications=publications,
            lost_engines=self._rollout.lost,
            moves=self._rollout.moves,
            events=events,
            exits={str(reason): count for reason, count in left.items()},
        )


def ideal_throughput(load: Load) -> float:
    """Tokens per second of the slower pool, all its slots taken, or of both in turn when they share hardware.

    Neither prefill, environments, publications nor the trainer's overhead count: they are losses.
    """
    lane = () if load.lane is None else load.lane.engines * (load.lane.engine,)
    rollout = sum(engine.tokens_per_second for engine in (*load.engines, *lane))
    if load.dynamic_sampling:
        rollout *= load.signal
    trainer = load.train_pool.units / load.train_pool.seconds_per_token
    return 1 / (1 / rollout + 1 / trainer) if load.policy is Policy.COLOCATED else min(rollout, trainer)


def _idle(used: float, there: float) -> float:
    return 1 - used / there if there else 0.0

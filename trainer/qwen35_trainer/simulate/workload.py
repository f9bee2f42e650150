"""The description of what is simulated. Its defaults are the reference workload of docs/design/staleness.md."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from qwen35_trainer.pipeline.buffer import MissedDeadlinePolicy
from qwen35_trainer.pipeline.coordinator_settings import CoordinatorSettings
from qwen35_trainer.pipeline.window import Window
from qwen35_trainer.simulate.cost_model import (
    Faults,
    LaneSpeed,
    PrefillCost,
    PublicationCost,
    ReplicaGroup,
    ReplicaSpeed,
    TrainSpeed,
)
from qwen35_trainer.simulate.limits import below_minimum, not_above, raise_if_any
from qwen35_trainer.simulate.response_lengths import BoundedPareto, LengthDistribution, Lognormal, Replayed

__all__ = [
    "BatchPolicy",
    "BoundedPareto",
    "Faults",
    "LaneSpeed",
    "LengthDistribution",
    "Lognormal",
    "MissedDeadlinePolicy",
    "PrefillCost",
    "PublicationCost",
    "Replayed",
    "ReplicaGroup",
    "ReplicaSpeed",
    "TrainSpeed",
    "Turns",
    "Workload",
]


class BatchPolicy(StrEnum):
    """The rule by which a batch takes groups. All rules but the first are those of other projects, for comparison."""

    DEADLINE_FIRST = "deadline-first"
    """The rule of this project, with the staleness threshold s and the maximum lag S."""
    FIFO = "fifo"
    """Take groups in order of dispatch, and wait for each. Without S; the lag does not exceed it."""
    WINDOWED_FIFO = "windowed-fifo"
    """Take finished groups among the first W in order of dispatch. Without S; the lag does not exceed s + W / P."""
    COMPLETION = "completion"
    """Take groups in order of completion. Without S; the lag is not bounded."""
    SYNCHRONOUS = "synchronous"
    """Generate the batches of a version, train them, publish. Both s and S are 0."""
    COLOCATED = "colocated"
    """As `synchronous`, with pools that take turns on the hardware of both. A trainer unit equals a replica of the first kind."""


@dataclass(frozen=True)
class Turns:
    """Conversations of a model with an environment: a response consists of `count` equal parts, with a wait between them."""

    count: int = 1
    latency: float = 0.0
    """Mean seconds between two parts, exponentially distributed. Meanwhile the slot is taken and decodes nothing."""

    def __post_init__(self) -> None:
        raise_if_any(
            *below_minimum(1, **{"turns.count": self.count}), *below_minimum(0, **{"turns.latency": self.latency})
        )


@dataclass(frozen=True)
class Workload:
    """Everything that a simulation runs: lengths, pools, costs, and the rule for batches.

    Raises ValueError that lists every violated inequality: such a run would never end, or measure nothing.
    """

    pools: tuple[ReplicaGroup, ...] = (ReplicaGroup(),)
    """The rollout pool. Its replicas are numbered in this order, followed by those of the lane."""
    lane: LaneSpeed | None = None
    """None: there is no straggler lane."""
    trainer: TrainSpeed = field(default_factory=TrainSpeed)
    publication: PublicationCost = field(default_factory=PublicationCost)
    prefill: PrefillCost = field(default_factory=PrefillCost)
    turns: Turns = field(default_factory=Turns)

    lengths: LengthDistribution = field(default_factory=Lognormal)
    """The distribution of response tokens per sequence: Lognormal, BoundedPareto or Replayed."""
    correlation: float = 0.0
    """The prompt's share of the variance of the logarithm of the length, between 0 and 1."""
    drift: float = 1.0
    """Factor by which the lengths change per batch. Above 1 they grow while the model learns."""
    signal: float = 1.0
    """Probability that the rewards of a group differ."""

    faults: Faults = field(default_factory=Faults)
    elastic: tuple[tuple[float, int], ...] = ()
    """(second, number of replicas of the pool from then on), in ascending order. Additional replicas are of the last kind."""

    policy: BatchPolicy = BatchPolicy.DEADLINE_FIRST
    window_fraction: float = 0.3
    """For windowed FIFO: the first W = ⌊fraction · window limit⌋ groups may leave."""
    prompts_per_batch: int = 32
    """P: groups per batch."""
    group_size: int = 8
    """G: sequences per group."""
    batches_per_version: int = 1
    """K: batches between two publications."""
    staleness_threshold: float = 2.0
    """s, the staleness threshold, in versions. It has no effect with `synchronous` and `colocated`."""
    max_version_lag: int = 4
    """S, the maximum lag, in versions. Only `deadline-first` has it."""
    on_missed_deadline: MissedDeadlinePolicy = MissedDeadlinePolicy.WAIT
    partial_rollout: bool = True
    adaptive: bool = False
    dynamic_sampling: bool = False
    """Whether groups without signal are replaced. Otherwise they train."""

    batches: int = 62
    """The number of batches up to and including the last measured one."""
    warm_up: int = 12
    """The number of batches at the start that are not measured."""
    cool_down: int | None = None
    """Batches after the measured ones, so that the end of the run does not affect them. None: ⌈1 + s⌉·K, which suffices."""
    seed: int = 0

    def __post_init__(self) -> None:
        bounded = self.policy is BatchPolicy.DEADLINE_FIRST
        raise_if_any(
            *below_minimum(
                1,
                prompts_per_batch=self.prompts_per_batch,
                group_size=self.group_size,
                batches_per_version=self.batches_per_version,
            ),
            *below_minimum(
                0, staleness_threshold=self.staleness_threshold, max_version_lag=self.max_version_lag, seed=self.seed
            ),
            f"staleness_threshold {self.staleness_threshold} > max_version_lag {self.max_version_lag}: groups would start "
            "after their deadline"
            if bounded and self.staleness_threshold > self.max_version_lag
            else None,
            *below_minimum(0, warm_up=self.warm_up, cool_down=self.cool_down or 0),
            None
            if self.warm_up < self.batches
            else f"batches {self.batches} <= warm_up {self.warm_up}: nothing is measured",
            *self._capacity_problems(),
            *not_above(0, drift=self.drift),
            None if 0 <= self.correlation <= 1 else f"correlation {self.correlation} is not in 0 … 1",
            "correlation > 0 with replayed lengths: the prompts of the file determine it"
            if self.correlation > 0 and isinstance(self.lengths, Replayed)
            else None,
            None if 0 <= self.signal <= 1 else f"signal {self.signal} is not in 0 … 1",
            "signal 0 <= 0 with dynamic_sampling: every group is filtered, no batch ever fills"
            if self.dynamic_sampling and self.signal == 0
            else None,
            f"group_size {self.group_size} < 2 with dynamic_sampling: one reward cannot differ, every group is filtered"
            if self.dynamic_sampling and self.group_size < 2
            else None,
            None
            if 0 < self.window_fraction <= 1
            else f"window_fraction {self.window_fraction} is not in 0 … 1, 0 excluded",
            f"adaptive with policy {self.policy}: only deadline-first has deadlines"
            if self.adaptive and not bounded
            else None,
            f"on_missed_deadline {self.on_missed_deadline} with policy {self.policy}: only deadline-first has deadlines"
            if self.on_missed_deadline is not MissedDeadlinePolicy.WAIT and not bounded
            else None,
        )

    @property
    def replicas(self) -> tuple[ReplicaSpeed, ...]:
        """The replicas of the rollout pool at the start. With `colocated` they include the trainer's hardware."""
        replicas = tuple(pool.replica for pool in self.pools for _ in range(pool.count))
        return replicas + self.trainer.units * replicas[:1] if self.policy is BatchPolicy.COLOCATED else replicas

    @property
    def train_pool(self) -> TrainSpeed:
        """Return the trainer. With `colocated` it includes the hardware of the rollout pool."""
        if self.policy is not BatchPolicy.COLOCATED:
            return self.trainer
        return TrainSpeed(len(self.replicas), self.trainer.seconds_per_token, self.trainer.overhead)

    @property
    def settings(self) -> CoordinatorSettings:
        """Return the coordinator's settings for this workload."""
        strict = self.policy in {BatchPolicy.SYNCHRONOUS, BatchPolicy.COLOCATED}
        count = 0.0 if strict else self.staleness_threshold
        # The other rules do not use an age, but the window requires one that is not below the count.
        age = 0 if strict else self.max_version_lag if self.policy is BatchPolicy.DEADLINE_FIRST else math.ceil(count)
        cool_down = math.ceil(1 + count) * self.batches_per_version if self.cool_down is None else self.cool_down
        return CoordinatorSettings(
            Window(self.prompts_per_batch, self.batches_per_version, count, age),
            self.group_size,
            self.batches + cool_down,
            self.on_missed_deadline,
            self.partial_rollout,
            taking_turns=self.policy is BatchPolicy.COLOCATED,
            dynamic_sampling=self.dynamic_sampling,
            lane_after=None if self.lane is None else self.lane.after_tokens,
            adaptive=self.adaptive,
        )

    def _capacity_problems(self) -> list[str]:
        """Return the reasons why no sequence would be generated, or why some sequence would never end."""
        problems = []
        count = sum(pool.count for pool in self.pools)
        if count < 1:
            problems.append(f"pools have {count} replicas < 1: nothing is ever generated")
        times = [second for second, _ in self.elastic]
        if times != sorted(times) or any(second < 0 for second in times):
            problems.append("elastic: the seconds must ascend from 0")
        if any(replicas < 0 for _, replicas in self.elastic):
            problems.append("elastic: replicas < 0")
        elif self.elastic and self.elastic[-1][1] < 1:
            problems.append("elastic: the last size 0 < 1: nothing more is ever generated")
        faults = self.faults
        if faults.mtbf is not None and count and not (faults.keep and self.partial_rollout):
            slowest = max((pool.replica.step(pool.replica.slots) for pool in self.pools if pool.count), default=0.0)
            longest = slowest * self.lengths.cap
            if longest > 10 * faults.mtbf:
                problems.append(
                    f"the longest sequence takes {longest:.0f} s > 10 · faults.mtbf {faults.mtbf:.0f} s, and its tokens are "
                    "lost with the replica: it would never finish"
                )
        return problems

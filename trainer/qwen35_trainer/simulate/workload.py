"""The workload: everything that describes a run to simulate.

Its defaults are the reference workload of docs/design/staleness.md.
"""

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
    below_minimum,
    not_above,
    raise_if_any,
)
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
    """The rule by which a batch takes groups. The first rule is this project's; the others are for comparison."""

    DEADLINE_FIRST = "deadline-first"
    """Take the groups with the earliest deadline first: this project's rule. The staleness threshold s
    and the maximum lag S bound the lag."""
    FIFO = "fifo"
    """Take groups strictly in order of dispatch, and wait for each. Only the staleness threshold bounds the
    lag; the maximum lag S has no effect."""
    WINDOWED_FIFO = "windowed-fifo"
    """Take finished groups in order of dispatch, skipping unfinished ones, among the W groups
    from the first unfinished group on.

    The lag is at most s + W / P, with the staleness threshold s and P groups per batch; `window_fraction` sets
    W. The maximum lag S has no effect.
    """
    COMPLETION = "completion"
    """Take groups in order of completion. The lag is not bounded; the maximum lag S has no effect."""
    SYNCHRONOUS = "synchronous"
    """Generate all batches of a version, train them, then publish the next version. s and S count as 0, so the lag is 0."""
    COLOCATED = "colocated"
    """Generate, train and publish in turn, as with `synchronous`. During its turn, a
    pool uses the hardware of both pools.

    A unit of the train pool has the same hardware as a replica of the first kind in `pools`.
    """


@dataclass(frozen=True)
class Turns:
    """Conversations of a model with an environment.

    A response consists of `count` equal parts, and waits for the environment between two parts.
    """

    count: int = 1
    latency: float = 0.0
    """Mean seconds that the environment takes to answer between two parts, exponentially distributed.

    The sequence keeps its slot during this time, and does not decode.
    """

    def __post_init__(self) -> None:
        raise_if_any(
            *below_minimum(1, **{"turns.count": self.count}), *below_minimum(0, **{"turns.latency": self.latency})
        )


@dataclass(frozen=True)
class Workload:
    """The run to simulate: response lengths, pools, costs, and the rule by which a batch takes groups.

    Raises ValueError for values outside their range, and for values with which a run would never end or would measure
    nothing. The error lists every problem.
    """

    pools: tuple[ReplicaGroup, ...] = (ReplicaGroup(),)
    """The replicas of the rollout pool, by kind. Replicas are numbered in this order; those of the lane follow."""
    lane: LaneSpeed | None = None
    """The straggler lane, to which long sequences move. None: there is no lane."""
    trainer: TrainSpeed = field(default_factory=TrainSpeed)
    publication: PublicationCost = field(default_factory=PublicationCost)
    prefill: PrefillCost = field(default_factory=PrefillCost)
    turns: Turns = field(default_factory=Turns)
    scoring_latency: float = 0.0
    """Seconds from the last token of a group until its rewards are known."""

    lengths: LengthDistribution = field(default_factory=Lognormal)
    """The distribution of response tokens per sequence: Lognormal, BoundedPareto or Replayed."""
    correlation: float = 0.0
    """Share, 0 to 1, of the variance of the logarithm of the length that depends on the prompt.

    0: lengths of a group are independent. 1: they are equal.
    """
    drift: float = 1.0
    """Factor by which response lengths grow from one batch to the next.

    Above 1, responses become longer during the run.
    """
    signal: float = 1.0
    """Probability that the rewards of a group differ, so that the group has a gradient."""

    faults: Faults = field(default_factory=Faults)
    elastic: tuple[tuple[float, int], ...] = ()
    """Changes of the pool's size, each as (second, number of replicas from then on), in ascending order.

    Additional replicas are of the last kind in `pools`.
    """

    policy: BatchPolicy = BatchPolicy.DEADLINE_FIRST
    window_fraction: float = 0.3
    """Number of groups W among which the policy `windowed-fifo` chooses, as a share of the window's limit:
    `W = ⌊window_fraction · limit⌋`, at least 1."""
    prompts_per_batch: int = 32
    """P: number of groups (prompts) per batch."""
    group_size: int = 8
    """G: number of sequences per group."""
    batches_per_version: int = 1
    """K: number of batches between two publications."""
    staleness_threshold: float = 2.0
    """s: the staleness threshold, in versions. It counts as 0 with the policies `synchronous` and `colocated`."""
    max_version_lag: int = 4
    """S: the maximum lag, in versions. It has an effect only with the policy `deadline-first`."""
    on_missed_deadline: MissedDeadlinePolicy = MissedDeadlinePolicy.WAIT
    partial_rollout: bool = True
    group_affinity: bool = True
    """Whether the samples of a prompt go to the same replica. If False, each goes to the least loaded replica."""
    adaptive: bool = False
    """Whether dispatch adapts to predicted deadlines and idle slots, as with spec.async.adaptiveDispatch."""
    dynamic_sampling: bool = False
    """Whether groups whose rewards are all equal are replaced by other groups. If False, they train."""

    batches: int = 62
    """Number of batches up to and including the last measured batch; warm-up is included."""
    warm_up: int = 12
    """Number of batches at the start that are not measured."""
    cool_down: int | None = None
    """Number of batches after the measured ones, so that the end of the run does not affect the measures.

    None: ⌈1 + s⌉·K batches, which is enough.
    """
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
            *below_minimum(0, scoring_latency=self.scoring_latency),
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
        """The speed of each replica of the rollout pool at the start of the run.

        With the policy `colocated`, the trainer's hardware counts as further replicas.
        """
        replicas = tuple(pool.replica for pool in self.pools for _ in range(pool.count))
        return replicas + self.trainer.units * replicas[:1] if self.policy is BatchPolicy.COLOCATED else replicas

    @property
    def train_pool(self) -> TrainSpeed:
        """The speed of the train pool.

        With the policy `colocated`, the rollout pool's hardware counts as further units of the train pool.
        """
        if self.policy is not BatchPolicy.COLOCATED:
            return self.trainer
        return TrainSpeed(len(self.replicas), self.trainer.seconds_per_token, self.trainer.overhead)

    @property
    def settings(self) -> CoordinatorSettings:
        """The settings of a coordinator that runs this workload."""
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
            lane_breaks_even=self.lane is None or self.lane.breaks_even,
            max_response_tokens=self.lengths.cap,
            adaptive=self.adaptive,
            group_affinity=self.group_affinity,
        )

    def _capacity_problems(self) -> list[str]:
        """Return the reasons why no sequence could be generated, or why some sequence would never end."""
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

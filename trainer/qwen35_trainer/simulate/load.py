"""Everything that is simulated. Without arguments it is the reference load of docs/design/staleness.md."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from qwen35_trainer.pipeline.buffer import OnMissedDeadline
from qwen35_trainer.pipeline.settings import Settings
from qwen35_trainer.pipeline.window import Window
from qwen35_trainer.simulate.faults import Faults
from qwen35_trainer.simulate.hardware import Engine, EnginePool, Lane, Prefill, Publication, Trainer
from qwen35_trainer.simulate.lengths import BoundedPareto, Lengths, Lognormal, Replayed
from qwen35_trainer.simulate.problems import above, at_least, refuse

__all__ = [
    "BoundedPareto",
    "Engine",
    "EnginePool",
    "Faults",
    "Lane",
    "Lengths",
    "Load",
    "Lognormal",
    "OnMissedDeadline",
    "Policy",
    "Prefill",
    "Publication",
    "Replayed",
    "Trainer",
    "Turns",
]


class Policy(StrEnum):
    """Which groups a batch takes. All but the first are other projects' rules, there to be compared with."""

    DEADLINE_FIRST = "deadline-first"
    """This project's, with both knobs."""
    FIFO = "fifo"
    """In the order of dispatch, waiting for each. Only the count knob; no lag above it."""
    WINDOWED_FIFO = "windowed-fifo"
    """What has finished among the first groups in the order of dispatch. Only the count knob; no lag above s + W / P."""
    COMPLETION = "completion"
    """In the order of completion. Only the count knob; lags are not bounded."""
    SYNCHRONOUS = "synchronous"
    """Generate a version's batches, train them, publish: both knobs 0."""
    COLOCATED = "colocated"
    """The same, and the pools take turns on the hardware of both: a trainer unit is worth an engine of the first kind."""


@dataclass(frozen=True)
class Turns:
    """Conversations with an environment: a response comes in `count` equal parts."""

    count: int = 1
    latency: float = 0.0
    """Mean seconds from one part to the next, exponentially distributed. The slot stays taken, and decodes nothing."""

    def __post_init__(self) -> None:
        refuse(*at_least(1, **{"turns.count": self.count}), *at_least(0, **{"turns.latency": self.latency}))


@dataclass(frozen=True)
class Load:
    """Raises ValueError with every inequality that fails: such a run would never end, or mean nothing."""

    pools: tuple[EnginePool, ...] = (EnginePool(),)
    """The rollout pool. Its engines are numbered in this order, the lane's after them."""
    lane: Lane | None = None
    """None: there is no lane."""
    trainer: Trainer = field(default_factory=Trainer)
    publication: Publication = field(default_factory=Publication)
    prefill: Prefill = field(default_factory=Prefill)
    turns: Turns = field(default_factory=Turns)

    lengths: Lengths = field(default_factory=Lognormal)
    """Response tokens of a sequence: Lognormal, BoundedPareto or Replayed."""
    correlation: float = 0.0
    """Within a group: the prompt's share of the variance of the logarithm of the length."""
    drift: float = 1.0
    """Factor per batch of the lengths: above 1 they grow while the model learns."""
    signal: float = 1.0
    """Probability that the rewards of a group differ."""

    faults: Faults = field(default_factory=Faults)
    elastic: tuple[tuple[float, int], ...] = ()
    """(second, engines of the pool from then on), in ascending order. What is beyond the pools is of the last kind."""

    policy: Policy = Policy.DEADLINE_FIRST
    window_fraction: float = 0.3
    """Of windowed FIFO: the first ⌊fraction · limit⌋ groups may leave."""
    prompts_per_batch: int = 32
    """P: groups of a batch."""
    group_size: int = 8
    """G: sequences of a group."""
    batches_per_version: int = 1
    """K: batches between two publications."""
    staleness_threshold: float = 2.0
    """s, the count knob, in versions. Of no effect under `synchronous` and `colocated`."""
    max_version_lag: int = 4
    """S, the age knob, in versions. Only `deadline-first` has one."""
    on_missed_deadline: OnMissedDeadline = OnMissedDeadline.WAIT
    partial_rollout: bool = True
    adaptive: bool = False
    dynamic_sampling: bool = False
    """Groups without signal are replaced. Otherwise they train."""

    batches: int = 62
    """Up to and including the last one that is measured."""
    warm_up: int = 12
    """The first of them, which are not measured."""
    cool_down: int | None = None
    """Batches after them, so that the end of the run is not measured. None: so many that none is missed: ⌈1 + s⌉·K."""
    seed: int = 0

    def __post_init__(self) -> None:
        bounded = self.policy is Policy.DEADLINE_FIRST
        refuse(
            *at_least(
                1,
                prompts_per_batch=self.prompts_per_batch,
                group_size=self.group_size,
                batches_per_version=self.batches_per_version,
            ),
            *at_least(
                0, staleness_threshold=self.staleness_threshold, max_version_lag=self.max_version_lag, seed=self.seed
            ),
            f"staleness_threshold {self.staleness_threshold} > max_version_lag {self.max_version_lag}: groups would be born "
            "past their deadline"
            if bounded and self.staleness_threshold > self.max_version_lag
            else None,
            *at_least(0, warm_up=self.warm_up, cool_down=self.cool_down or 0),
            None
            if self.warm_up < self.batches
            else f"batches {self.batches} <= warm_up {self.warm_up}: nothing is measured",
            *self._capacity_problems(),
            *above(0, drift=self.drift),
            None if 0 <= self.correlation <= 1 else f"correlation {self.correlation} is not in 0 … 1",
            "correlation > 0 with replayed lengths: the file's own prompts have theirs"
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
            if self.on_missed_deadline is not OnMissedDeadline.WAIT and not bounded
            else None,
        )

    @property
    def engines(self) -> tuple[Engine, ...]:
        """The rollout pool at the beginning, engine by engine. Colocated, the trainer's hardware is among it."""
        engines = tuple(pool.engine for pool in self.pools for _ in range(pool.count))
        return engines + self.trainer.units * engines[:1] if self.policy is Policy.COLOCATED else engines

    @property
    def train_pool(self) -> Trainer:
        """The trainer. Colocated, the rollout pool's hardware is part of it."""
        if self.policy is not Policy.COLOCATED:
            return self.trainer
        return Trainer(len(self.engines), self.trainer.seconds_per_token, self.trainer.overhead)

    @property
    def settings(self) -> Settings:
        """The coordinator's."""
        strict = self.policy in {Policy.SYNCHRONOUS, Policy.COLOCATED}
        count = 0.0 if strict else self.staleness_threshold
        # The peers' rules never look at an age; their window needs one that is not below the count.
        age = 0 if strict else self.max_version_lag if self.policy is Policy.DEADLINE_FIRST else math.ceil(count)
        cool_down = math.ceil(1 + count) * self.batches_per_version if self.cool_down is None else self.cool_down
        return Settings(
            Window(self.prompts_per_batch, self.batches_per_version, count, age),
            self.group_size,
            self.batches + cool_down,
            self.on_missed_deadline,
            self.partial_rollout,
            taking_turns=self.policy is Policy.COLOCATED,
            dynamic_sampling=self.dynamic_sampling,
            lane_after=None if self.lane is None else self.lane.after_tokens,
            adaptive=self.adaptive,
        )

    def _capacity_problems(self) -> list[str]:
        """Why nothing would ever be generated, or some sequence never end."""
        problems = []
        count = sum(pool.count for pool in self.pools)
        if count < 1:
            problems.append(f"pools have {count} engines < 1: nothing is ever generated")
        times = [second for second, _ in self.elastic]
        if times != sorted(times) or any(second < 0 for second in times):
            problems.append("elastic: the seconds must ascend from 0")
        if any(engines < 0 for _, engines in self.elastic):
            problems.append("elastic: engines < 0")
        elif self.elastic and self.elastic[-1][1] < 1:
            problems.append("elastic: the last size 0 < 1: nothing more is ever generated")
        faults = self.faults
        if faults.mtbf is not None and count and not (faults.keep and self.partial_rollout):
            slowest = max((pool.engine.step(pool.engine.slots) for pool in self.pools if pool.count), default=0.0)
            longest = slowest * self.lengths.cap
            if longest > 10 * faults.mtbf:
                problems.append(
                    f"the longest sequence takes {longest:.0f} s > 10 · faults.mtbf {faults.mtbf:.0f} s, and its tokens are "
                    "lost with an engine: it never finishes"
                )
        return problems

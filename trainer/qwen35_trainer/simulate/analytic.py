"""What arithmetic says of a load before anything is simulated: where to look first.

X* is what the slower pool can do, always busy. By Little's law a group takes one of the window's (1 + s)·P·K places from its
dispatch until its version is published, so that X(s) ≤ min(X*, (1 + s)·P·K·G·m / (W + t)), with W the time that the longest
of a group's G sequences decodes, t the time of a batch and of a publication, m the mean length. Waiting for a slot and for
groups that must go first is left out, so this is what a rule can hope for: within a quarter at s ≥ 2, optimistic below.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from qwen35_trainer.simulate.lengths import BLOCK, Groups, Lengths
from qwen35_trainer.simulate.load import Load


@dataclass(frozen=True)
class Estimate:
    """Rates in tokens per unit of time."""

    rollout: float
    """What the rollout pool decodes with all slots taken."""
    trainer: float
    """What the trainer takes, always busy."""
    group_time: float
    """W + t: a group's time in the window when it waits for nothing."""
    version_tokens: float
    """P·K·G·m: tokens of one version's batches."""

    @property
    def ideal(self) -> float:
        """X*."""
        return min(self.rollout, self.trainer)

    def throughput(self, staleness_threshold: float) -> float:
        """X(s)."""
        return min(self.ideal, (1 + staleness_threshold) * self.version_tokens / self.group_time)

    @property
    def least_staleness(self) -> float:
        """S*: the least count knob that can keep both pools busy."""
        return max(0.0, self.ideal * self.group_time / self.version_tokens - 1)


def estimate(load: Load) -> Estimate:
    """Of a load without faults, drift and changes of the pool."""
    mean, longest = _lengths(load.lengths, load.group_size, load.correlation, load.seed)
    engines, trainer = load.engines, load.train_pool
    rollout = sum(engine.tokens_per_second for engine in engines)
    if load.lane is not None:
        rollout += load.lane.engines * load.lane.engine.tokens_per_second
    batch = trainer.seconds(load.prompts_per_batch * load.group_size * mean)
    rate = load.prompts_per_batch * load.group_size * mean / batch
    step = sum(engine.step(engine.slots) for engine in engines) / len(engines)
    latency = (load.turns.count - 1) * load.turns.latency
    publication = load.publication.transfer + load.publication.pause
    return Estimate(
        rollout,
        rate,
        longest * step + latency + batch + publication,
        load.prompts_per_batch * load.group_size * load.batches_per_version * mean,
    )


@lru_cache(maxsize=8)  # a search asks for every split of the nodes, and the lengths are the same
def _lengths(lengths: Lengths, group_size: int, correlation: float, seed: int) -> tuple[float, float]:
    """Mean length, and mean length of the longest of a group, over one block of groups."""
    groups = Groups(lengths, group_size, correlation, 1.0, 1.0, seed)
    drawn = [groups.draw(position, 0)[0] for position in range(BLOCK)]
    tokens = sum(map(sum, drawn))
    return tokens / (BLOCK * group_size), sum(map(max, drawn)) / BLOCK

"""An analytic estimate of a workload's throughput. The planner starts its search from this estimate.

X* is the throughput of the slower pool if it is always busy. A group occupies one of the window's (1 + s)·P·K places
from its dispatch until the version trained on it is published. By Little's law,
X(s) ≤ min(X*, (1 + s)·P·K·G·m / (W + t)). Here X(s) is the throughput with staleness threshold s, W is the decoding
time of the longest of a group's G sequences, t is the time of a batch and a publication, and m is the mean length.

The estimate leaves out the waiting for slots and for due groups, so it is an upper bound. At s ≥ 2 it is within a
quarter of the simulated throughput. Below 2 it is too optimistic.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from qwen35_trainer.simulate.response_lengths import BLOCK_PROMPTS, GroupSampler, LengthDistribution
from qwen35_trainer.simulate.workload import Workload


@dataclass(frozen=True)
class Estimate:
    """The estimate of a workload's throughput. Rates are in tokens per unit of time."""

    rollout: float
    """Rate of the rollout pool with all slots taken."""
    trainer: float
    """Rate of the trainer if it is always busy."""
    group_time: float
    """W + t: the time of a group in the window if it waits for nothing."""
    version_tokens: float
    """P·K·G·m: the tokens of the batches of one version."""

    @property
    def ideal(self) -> float:
        """X*: the throughput of the slower pool if it is always busy."""
        return min(self.rollout, self.trainer)

    def throughput(self, staleness_threshold: float) -> float:
        """Return x(s): the estimated maximum throughput with this staleness threshold."""
        return min(self.ideal, (1 + staleness_threshold) * self.version_tokens / self.group_time)

    @property
    def min_staleness(self) -> float:
        """S*: the minimum staleness threshold that can keep both pools busy."""
        return max(0.0, self.ideal * self.group_time / self.version_tokens - 1)


def estimate(workload: Workload) -> Estimate:
    """Return the estimate for a workload. It ignores faults, the drift of lengths, and changes of the pool's size."""
    mean, longest = _lengths(workload.lengths, workload.group_size, workload.correlation, workload.seed)
    replicas, trainer = workload.replicas, workload.train_pool
    rollout = sum(replica.tokens_per_second for replica in replicas)
    if workload.lane is not None:
        rollout += workload.lane.replicas * workload.lane.replica.tokens_per_second
    batch = trainer.seconds(workload.prompts_per_batch * workload.group_size * mean)
    rate = workload.prompts_per_batch * workload.group_size * mean / batch
    step = sum(replica.step(replica.slots) for replica in replicas) / len(replicas)
    latency = (workload.turns.count - 1) * workload.turns.latency
    publication = workload.publication.transfer + workload.publication.pause
    return Estimate(
        rollout,
        rate,
        longest * step + latency + batch + publication,
        workload.prompts_per_batch * workload.group_size * workload.batches_per_version * mean,
    )


@lru_cache(maxsize=8)  # a search estimates every split of the nodes with the same lengths
def _lengths(lengths: LengthDistribution, group_size: int, correlation: float, seed: int) -> tuple[float, float]:
    """Return the mean length of a sequence, and the mean length of the longest sequence of a group.

    Both are means over BLOCK_PROMPTS groups, which are sampled here.
    """
    sampler = GroupSampler(lengths, group_size, correlation, 1.0, 1.0, seed)
    groups = [sampler.draw(position, 0)[0] for position in range(BLOCK_PROMPTS)]
    tokens = sum(map(sum, groups))
    return tokens / (BLOCK_PROMPTS * group_size), sum(map(max, groups)) / BLOCK_PROMPTS

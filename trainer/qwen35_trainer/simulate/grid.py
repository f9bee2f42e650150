"""The plans among which a search looks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from qwen35_trainer.simulate.choice import Choice, LaneChoice, Steps, legal_splits
from qwen35_trainer.simulate.lengths import mean_of
from qwen35_trainer.simulate.load import Load
from qwen35_trainer.spec.training import TrainingSpec

type Point = tuple[int, ...]
"""A place in each list of a grid."""


@dataclass(frozen=True)
class Grid:
    """The plans that are looked at: a point is a place in each list."""

    start: Choice
    splits: list[int]
    thresholds: list[float]
    lane_nodes: list[int]
    lane_sizes: list[int]
    after_tokens: list[int]

    @classmethod
    def over(cls, spec: TrainingSpec, start: Choice, load: Load) -> Grid:
        assert spec.rollout is not None
        bound, total = start.max_version_lag, start.rollout_nodes + start.train_nodes
        step = next((step for step in (0.25, 0.5, 1.0) if bound / step <= 32), 2.0)
        mean = mean_of(load.lengths)
        tokens = sorted({_round(mean * factor) for factor in (0.5, 0.75, 1, 1.5, 2, 3, 4)})
        return cls(
            start,
            legal_splits(start, spec) or [start.rollout_nodes],
            [step * i for i in range(int(bound / step) + 1)],
            list(range(max(1, total // 2))),
            _lane_sizes(spec.rollout.tensorParallel, spec.accelerator.perNode),
            [after for after in tokens if after < load.lengths.cap] or [1],
        )

    @property
    def steps(self) -> Steps:
        """From a plan to its neighbours."""
        after = self.after_tokens[len(self.after_tokens) // 2]
        lanes = [LaneChoice(nodes, self.lane_sizes[0], after) for nodes in self.lane_nodes[1:3]]
        threshold = self.thresholds[1] if len(self.thresholds) > 1 else 0.25
        return Steps(self.splits, threshold, self.lane_sizes, self.after_tokens, lanes)

    @property
    def sizes(self) -> Point:
        return (
            len(self.splits),
            len(self.thresholds),
            len(self.lane_nodes),
            len(self.lane_sizes),
            len(self.after_tokens),
        )

    def within(self, choice: Choice) -> bool:
        """Whether the plan is free to choose it."""
        bound, policy = self.start.max_version_lag, self.start.on_missed_deadline
        return choice.max_version_lag <= bound and choice.on_missed_deadline == policy

    def choice(self, point: Point) -> Choice:
        split, threshold, nodes, size, after = point
        lane = LaneChoice(self.lane_nodes[nodes], self.lane_sizes[size], self.after_tokens[after])
        return replace(
            self.start.with_split(self.splits[split]),
            staleness_threshold=self.thresholds[threshold],
            lane=lane if lane.nodes else None,
        )


def _lane_sizes(pool: int, per_node: int) -> list[int]:
    """Devices of a lane's engine: within a node, where the pool's are."""
    return [pool * factor for factor in (2, 4) if pool * factor <= per_node] or [pool * 2]


def _round(tokens: float) -> int:
    """To two digits."""
    return max(1, int(float(f"{tokens:.2g}")))

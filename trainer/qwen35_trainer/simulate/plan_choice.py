"""The choices of a plan, and the grid of plans that the planner searches.

A plan chooses the split of the nodes into rollout and train nodes, the two bounds of staleness, and the straggler lane.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qwen35_trainer.formatting import counted
from qwen35_trainer.manifest.asynchrony import OnMissedDeadline
from qwen35_trainer.manifest.checks import check
from qwen35_trainer.manifest.release import cannot_run
from qwen35_trainer.manifest.rollout import StragglerLaneSpec
from qwen35_trainer.manifest.training import TrainingSpec
from qwen35_trainer.simulate.response_lengths import mean_length
from qwen35_trainer.simulate.workload import Workload


@dataclass(frozen=True)
class LaneChoice:
    """The straggler lane of a plan. Its fields are those of `spec.rollout.stragglerLane`."""

    nodes: int
    tensor_parallel: int
    after_tokens: int


@dataclass(frozen=True)
class PlanChoice:
    """A plan: values for those fields of a manifest that `qwen35 plan` may change.

    Plans with equal values are the same key of a dictionary, so that no plan is simulated twice.
    """

    rollout_nodes: int
    """Number of nodes of the rollout pool, including the nodes of the straggler lane."""
    train_nodes: int
    staleness_threshold: float
    max_version_lag: int
    on_missed_deadline: OnMissedDeadline
    lane: LaneChoice | None = None

    @classmethod
    def of(cls, spec: TrainingSpec) -> PlanChoice:
        """Return the plan that has the values of the manifest itself. The manifest's mode must have a rollout pool."""
        assert spec.rollout is not None
        knobs, lane = spec.effective_async, spec.rollout.stragglerLane
        return cls(
            spec.rollout.nodes,
            spec.train.nodes,
            knobs.stalenessThreshold,
            knobs.maxVersionLag,
            knobs.onMissedDeadline,
            None if lane is None else LaneChoice(lane.nodes, lane.tensorParallel, lane.afterTokens),
        )

    def apply(self, spec: TrainingSpec) -> TrainingSpec:
        """Return the spec with the values of this plan. The result may violate checks of the manifest (see `is_legal`)."""
        assert spec.rollout is not None
        lane = self.lane and StragglerLaneSpec(
            nodes=self.lane.nodes, tensorParallel=self.lane.tensor_parallel, afterTokens=self.lane.after_tokens
        )
        rollout = spec.rollout.model_copy(update={"nodes": self.rollout_nodes, "stragglerLane": lane})
        knobs = {
            "stalenessThreshold": self.staleness_threshold,
            "maxVersionLag": self.max_version_lag,
            "onMissedDeadline": self.on_missed_deadline,
        }
        return spec.model_copy(
            update={
                "rollout": rollout,
                "train": spec.train.model_copy(update={"nodes": self.train_nodes}),
                "async_": spec.async_.model_copy(update=knobs),
            }
        )

    def is_legal(self, spec: TrainingSpec) -> bool:
        """Return whether this plan can be used for a manifest. spec: the manifest's spec.

        The manifest with the values of the plan must be valid, and this release must be able to run it. If the release
        cannot run the manifest even without the plan, the plan must add no further problem. If the plan has a straggler
        lane, the replicas of the lane must have more devices than those of the pool, so that the lane is faster.
        """
        assert spec.rollout is not None
        if self.lane and self.lane.tensor_parallel <= spec.rollout.tensorParallel:
            return False
        planned = self.apply(spec)
        if self.rollout_nodes < 1 or self.train_nodes < 1 or check(planned):
            return False
        # The release may be unable to run the manifest for another reason. Then a plan is still of use.
        return set(cannot_run(planned)) <= set(cannot_run(spec))

    def with_split(self, rollout_nodes: int) -> PlanChoice:
        """Return this plan with `rollout_nodes` rollout nodes. All other nodes of the two pools become train nodes."""
        moved = rollout_nodes - self.rollout_nodes
        return replace(self, rollout_nodes=rollout_nodes, train_nodes=self.train_nodes - moved)

    def as_dict(self) -> dict[str, Any]:
        """Return everything that the plan chooses: path in the manifest → value.

        The option `--set` accepts an item as `PATH=VALUE`.
        """
        lane = self.lane and {
            "nodes": self.lane.nodes,
            "tensorParallel": self.lane.tensor_parallel,
            "afterTokens": self.lane.after_tokens,
        }
        return {
            "rollout.nodes": self.rollout_nodes,
            "train.nodes": self.train_nodes,
            "async.stalenessThreshold": self.staleness_threshold,
            "async.maxVersionLag": self.max_version_lag,
            "async.onMissedDeadline": self.on_missed_deadline,
            "rollout.stragglerLane": lane,
        }


def legal_splits(choice: PlanChoice, spec: TrainingSpec) -> list[int]:
    """Return the numbers of rollout nodes, ascending, with which the plan is legal.

    The total number of nodes of the two pools does not change.
    """
    total = choice.rollout_nodes + choice.train_nodes
    return [nodes for nodes in range(1, total) if choice.with_split(nodes).is_legal(spec)]


@dataclass(frozen=True)
class NeighbourSteps:
    """The steps from a plan to its neighbours. A neighbour is a plan that differs in one choice.

    A field with ascending values lists the possible values of a choice. A neighbour has the next lower or the next
    higher of these values.
    """

    splits: Sequence[int]
    """Possible numbers of rollout nodes, ascending."""
    threshold: float
    """Difference of the staleness threshold between neighbours, in versions."""
    lane_sizes: Sequence[int]
    """Possible numbers of devices per replica of the lane, ascending."""
    after_tokens: Sequence[int]
    """Possible numbers of tokens after which a sequence may move to the lane, ascending."""
    lanes: Sequence[LaneChoice]
    """Lanes that the neighbours of a plan without a lane have."""


def neighbours_of(choice: PlanChoice, steps: NeighbourSteps) -> Iterator[tuple[str, PlanChoice]]:
    """Yield (description of the change, plan) for every plan that differs from `choice` by one of the steps.

    Some of these plans may violate checks of the manifest.
    """
    for nodes in _adjacent_values(choice.rollout_nodes, steps.splits):
        moved = choice.with_split(nodes)
        yield f"rollout.nodes {nodes}, train.nodes {moved.train_nodes}", moved
    for threshold in (choice.staleness_threshold - steps.threshold, choice.staleness_threshold + steps.threshold):
        if 0 <= threshold <= choice.max_version_lag:
            yield f"stalenessThreshold {threshold:g}", replace(choice, staleness_threshold=threshold)
    for lag in (choice.max_version_lag - 1, choice.max_version_lag + 1):
        if lag >= choice.staleness_threshold:
            yield f"maxVersionLag {lag}", replace(choice, max_version_lag=lag)
    yield from _lane_neighbours(choice, steps)
    for policy in ("Wait", "MaskTokens"):
        if policy != choice.on_missed_deadline:
            yield f"onMissedDeadline {policy}", replace(choice, on_missed_deadline=policy)


def _lane_neighbours(choice: PlanChoice, steps: NeighbourSteps) -> Iterator[tuple[str, PlanChoice]]:
    if (lane := choice.lane) is None:
        for other in steps.lanes:
            shape = f"{counted(other.nodes, 'node')}, tensorParallel {other.tensor_parallel}"
            yield f"a lane of {shape}, after {other.after_tokens:,}", replace(choice, lane=other)
        return
    yield "no lane", replace(choice, lane=None)
    for nodes in (lane.nodes - 1, lane.nodes + 1):
        if nodes >= 1:
            yield f"lane.nodes {nodes}", replace(choice, lane=replace(lane, nodes=nodes))
    for size in _adjacent_values(lane.tensor_parallel, steps.lane_sizes):
        yield f"lane.tensorParallel {size}", replace(choice, lane=replace(lane, tensor_parallel=size))
    for after in _adjacent_values(lane.after_tokens, steps.after_tokens):
        yield f"lane.afterTokens {after:,}", replace(choice, lane=replace(lane, after_tokens=after))


def _adjacent_values(value: int, ascending: Sequence[int]) -> list[int]:
    """Return the next lower and the next higher value in the list `ascending`, or only the one that exists."""
    lower = [other for other in ascending if other < value]
    higher = [other for other in ascending if other > value]
    return [*lower[-1:], *higher[:1]]


type GridPoint = tuple[int, ...]
"""A point of a grid of plans: an index into each list of the grid."""


@dataclass(frozen=True)
class PlanGrid:
    """The plans that a search considers: all combinations of one value from each list."""

    start: PlanChoice
    """The plan from which the search begins. Its other values hold for all plans of the grid."""
    splits: list[int]
    """Numbers of rollout nodes."""
    thresholds: list[float]
    """Staleness thresholds, in versions."""
    lane_nodes: list[int]
    """Numbers of nodes of the straggler lane, from 0, which stands for no lane."""
    lane_sizes: list[int]
    """Numbers of devices per replica of the lane."""
    after_tokens: list[int]
    """Numbers of tokens after which a sequence may move to the lane."""

    @classmethod
    def around(cls, spec: TrainingSpec, start: PlanChoice, workload: Workload) -> PlanGrid:
        """Return the grid of plans for a manifest.

        start: the plan from which the search begins. workload: the workload of this plan.
        """
        assert spec.rollout is not None
        bound, total = start.max_version_lag, start.rollout_nodes + start.train_nodes
        step = next((step for step in (0.25, 0.5, 1.0) if bound / step <= 32), 2.0)
        mean = mean_length(workload.lengths)
        tokens = sorted({_round(mean * factor) for factor in (0.5, 0.75, 1, 1.5, 2, 3, 4)})
        return cls(
            start,
            legal_splits(start, spec) or [start.rollout_nodes],
            [step * i for i in range(int(bound / step) + 1)],
            list(range(max(1, total // 2))),
            _lane_sizes(spec.rollout.tensorParallel, spec.accelerator.devicesPerNode),
            [after for after in tokens if after < workload.lengths.cap] or [1],
        )

    @property
    def steps(self) -> NeighbourSteps:
        """The steps from a plan of the grid to its neighbours. A neighbour is a plan that differs in one choice."""
        after = self.after_tokens[len(self.after_tokens) // 2]
        lanes = [LaneChoice(nodes, self.lane_sizes[0], after) for nodes in self.lane_nodes[1:3]]
        threshold = self.thresholds[1] if len(self.thresholds) > 1 else 0.25
        return NeighbourSteps(self.splits, threshold, self.lane_sizes, self.after_tokens, lanes)

    @property
    def sizes(self) -> GridPoint:
        """The number of values in each list of the grid, in the order of a grid point."""
        return (
            len(self.splits),
            len(self.thresholds),
            len(self.lane_nodes),
            len(self.lane_sizes),
            len(self.after_tokens),
        )

    def allows(self, choice: PlanChoice) -> bool:
        """Return whether the planner may recommend a plan.

        The plan is compared with `start`, the plan from which the search begins. Its maximum lag must not be higher than
        that of `start`, and it must have the same policy for missed deadlines.
        """
        bound, policy = self.start.max_version_lag, self.start.on_missed_deadline
        return choice.max_version_lag <= bound and choice.on_missed_deadline == policy

    def choice(self, point: GridPoint) -> PlanChoice:
        """Return the plan at a point of the grid."""
        split, threshold, nodes, size, after = point
        lane = LaneChoice(self.lane_nodes[nodes], self.lane_sizes[size], self.after_tokens[after])
        return replace(
            self.start.with_split(self.splits[split]),
            staleness_threshold=self.thresholds[threshold],
            lane=lane if lane.nodes else None,
        )


def _lane_sizes(pool: int, per_node: int) -> list[int]:
    """Return the possible numbers of devices per replica of the lane: two and four
    times `pool`, if these fit into a node.

    pool: number of devices per replica of the pool. per_node: number of devices of a node. If neither number fits,
    the result is only two times `pool`.
    """
    return [pool * factor for factor in (2, 4) if pool * factor <= per_node] or [pool * 2]


def _round(tokens: float) -> int:
    """Round a number of tokens to two significant digits."""
    return max(1, int(float(f"{tokens:.2g}")))

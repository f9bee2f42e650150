"""What a plan decides of a manifest: the split of the nodes, the two knobs, a lane."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qwen35_trainer.spec.asynchrony import OnMissedDeadline
from qwen35_trainer.spec.checks import check
from qwen35_trainer.spec.problems import counted
from qwen35_trainer.spec.rollout import Lane
from qwen35_trainer.spec.training import TrainingSpec


@dataclass(frozen=True)
class LaneChoice:
    """As `spec.rollout.lane`."""

    nodes: int
    tensor_parallel: int
    after_tokens: int


@dataclass(frozen=True)
class Choice:
    """One plan. Compares by value, so that nothing is simulated twice."""

    rollout_nodes: int
    """The lane's among them."""
    train_nodes: int
    staleness_threshold: float
    max_version_lag: int
    on_missed_deadline: OnMissedDeadline
    lane: LaneChoice | None = None

    @classmethod
    def of(cls, spec: TrainingSpec) -> Choice:
        """The manifest's own."""
        assert spec.rollout is not None
        knobs, lane = spec.effective_async, spec.rollout.lane
        return cls(
            spec.rollout.nodes,
            spec.train.nodes,
            knobs.stalenessThreshold,
            knobs.maxVersionLag,
            knobs.onMissedDeadline,
            None if lane is None else LaneChoice(lane.nodes, lane.tensorParallel, lane.afterTokens),
        )

    def apply(self, spec: TrainingSpec) -> TrainingSpec:
        """The spec with this plan in it; it may break the spec's rules, see `legal`."""
        assert spec.rollout is not None
        lane = self.lane and Lane(
            nodes=self.lane.nodes, tensorParallel=self.lane.tensor_parallel, afterTokens=self.lane.after_tokens
        )
        rollout = spec.rollout.model_copy(update={"nodes": self.rollout_nodes, "lane": lane})
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

    def legal(self, spec: TrainingSpec) -> bool:
        """Whether `qwen35 validate` would accept the manifest with this plan in it."""
        assert spec.rollout is not None
        if self.lane and self.lane.tensor_parallel <= spec.rollout.tensorParallel:
            return False  # allowed, and of no use: it is no faster
        return self.rollout_nodes >= 1 and self.train_nodes >= 1 and not check(self.apply(spec))

    def with_split(self, rollout_nodes: int) -> Choice:
        """As many nodes in all, so many of them for rollout."""
        moved = rollout_nodes - self.rollout_nodes
        return replace(self, rollout_nodes=rollout_nodes, train_nodes=self.train_nodes - moved)

    def as_dict(self) -> dict[str, Any]:
        """Values by the manifest's paths, as `qwen35 run --set` takes them."""
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
            "rollout.lane": lane,
        }


def legal_splits(choice: Choice, spec: TrainingSpec) -> list[int]:
    """Rollout nodes of every split of the same total that the spec allows, ascending."""
    total = choice.rollout_nodes + choice.train_nodes
    return [nodes for nodes in range(1, total) if choice.with_split(nodes).legal(spec)]


@dataclass(frozen=True)
class Steps:
    """What a neighbour may differ by: the values beside the choice's own."""

    splits: Sequence[int]
    """Rollout nodes."""
    threshold: float
    lane_sizes: Sequence[int]
    after_tokens: Sequence[int]
    lanes: Sequence[LaneChoice]
    """To compare no lane with."""


def neighbours(choice: Choice, steps: Steps) -> Iterator[tuple[str, Choice]]:
    """Every plan that differs in one thing, with the change in words. They may break the spec's rules."""
    for nodes in _beside(choice.rollout_nodes, steps.splits):
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


def _lane_neighbours(choice: Choice, steps: Steps) -> Iterator[tuple[str, Choice]]:
    if (lane := choice.lane) is None:
        for other in steps.lanes:
            words = f"a lane of {counted(other.nodes, 'node')}, tensorParallel {other.tensor_parallel}, after {other.after_tokens:,}"
            yield words, replace(choice, lane=other)
        return
    yield "no lane", replace(choice, lane=None)
    for nodes in (lane.nodes - 1, lane.nodes + 1):
        if nodes >= 1:
            yield f"lane.nodes {nodes}", replace(choice, lane=replace(lane, nodes=nodes))
    for size in _beside(lane.tensor_parallel, steps.lane_sizes):
        yield f"lane.tensorParallel {size}", replace(choice, lane=replace(lane, tensor_parallel=size))
    for after in _beside(lane.after_tokens, steps.after_tokens):
        yield f"lane.afterTokens {after:,}", replace(choice, lane=replace(lane, after_tokens=after))


def _beside(value: int, rising: Sequence[int]) -> list[int]:
    """The next lower and the next higher."""
    return [*[each for each in rising if each < value][-1:], *[each for each in rising if each > value][:1]]

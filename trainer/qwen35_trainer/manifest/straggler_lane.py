"""Checks of the straggler lane, the nodes of the rollout pool that are reserved for long sequences.

`part_of_pool` applies to every training, because the code relies on it. The other checks are younger than the first
release and apply to new trainings only (`checks.NEW_TRAINING_CHECKS`).
"""

from collections.abc import Iterator

from qwen35_trainer.manifest.problems import Problem
from qwen35_trainer.manifest.rollout import StragglerLaneSpec
from qwen35_trainer.manifest.training import TrainingSpec

LANE = "spec.rollout.stragglerLane"


def part_of_pool(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that the straggler lane has fewer nodes than the rollout pool, so that nodes are left for other sequences."""
    pool, lane = spec.rollout, _lane(spec)
    if pool is None or lane is None or lane.nodes < pool.nodes:
        return
    fix = f"Raise rollout.nodes to at least {lane.nodes + 1}"
    fix += f", or use {pool.nodes - 1} here." if pool.nodes > 1 else ", or remove stragglerLane."
    message = f"{lane.nodes} of the pool's {pool.nodes} nodes leaves none for other sequences."
    yield Problem(f"{LANE}.nodes", message, fix)


def below_min_nodes(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that the straggler lane has fewer nodes than rollout.minNodes, so that the smallest
    pool has nodes for other sequences.
    """
    pool, lane = spec.rollout, _lane(spec)
    if pool is None or lane is None or pool.minNodes is None or lane.nodes >= pool.nodes:
        return
    if lane.nodes >= pool.minNodes:
        message = (
            f"{pool.minNodes} includes the {lane.nodes} of stragglerLane.nodes, which leaves none for other sequences."
        )
        yield Problem("spec.rollout.minNodes", message, f"Raise it to at least {lane.nodes + 1}.")


def larger_replicas(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that a replica of the straggler lane has more devices than a replica of the rest of the pool."""
    pool, lane = spec.rollout, _lane(spec)
    if pool is None or lane is None or lane.tensorParallel > pool.tensorParallel:
        return
    message = (
        f"{lane.tensorParallel} is not above rollout.tensorParallel {pool.tensorParallel}, so the lane is not faster."
    )
    fix = f"Use more than {pool.tensorParallel}, or remove stragglerLane."
    yield Problem(f"{LANE}.tensorParallel", message, fix)


def before_the_limit(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that stragglerLane.afterTokens is below data.maxResponseTokens; otherwise no sequence could move to the lane."""
    lane, limit = _lane(spec), spec.data.maxResponseTokens
    if lane is None or lane.afterTokens < limit:
        return
    message = f"{lane.afterTokens} is not below data.maxResponseTokens {limit}: responses end before they could move."
    fix = f"Use less than {limit}, or remove stragglerLane." if limit > 1 else "Remove stragglerLane."
    yield Problem(f"{LANE}.afterTokens", message, fix)


def faster_engine(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that a rollout pool with a straggler lane uses the engine VLLM, except on CPUs.

    On accelerators, a Torch replica uses only one device, so the lane would not be faster.
    """
    if _lane(spec) is None or spec.rollout is None or spec.rollout.engine != "Torch":
        return
    if spec.accelerator.profile != "CPU":
        message = "a Torch replica computes on one device, so a straggler lane is not faster."
        yield Problem(LANE, message, "Remove it, or set rollout.engine to VLLM.")


def _lane(spec: TrainingSpec) -> StragglerLaneSpec | None:
    return None if spec.rollout is None else spec.rollout.stragglerLane

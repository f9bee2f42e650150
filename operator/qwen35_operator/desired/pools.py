"""The pools of a training: a head, and the worker groups of its mode."""

from typing import Literal

from qwen35_operator.api.v1alpha1 import PodPool
from qwen35_trainer.manifest import TrainingSpec

type WorkerPool = Literal["rollout", "train"]


def worker_pools(spec: TrainingSpec) -> tuple[WorkerPool, ...]:
    """Return the pools that become worker groups of the RayCluster.

    In mode Colocated this is only `train`, because the rollout pool shares its nodes. Mode SFT has no rollout pool.
    """
    return ("rollout", "train") if spec.mode == "FullyAsync" else ("train",)


def all_pools(spec: TrainingSpec) -> tuple[PodPool, ...]:
    """Return all pools of a training: the head, then the pools that become worker groups."""
    return ("head", *worker_pools(spec))


def rollout_nodes(spec: TrainingSpec) -> int:
    """Return the number of nodes that the rollout pool starts with; 0 if the mode has no separate rollout pool."""
    return spec.rollout.nodes if spec.rollout is not None and "rollout" in worker_pools(spec) else 0

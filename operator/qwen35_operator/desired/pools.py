"""Which pods a training has: a head, and the worker groups of its mode."""

from typing import Literal

from qwen35_trainer.spec import TrainingSpec

type Pool = Literal["head", "rollout", "train"]
type WorkerPool = Literal["rollout", "train"]


def worker_pools(spec: TrainingSpec) -> tuple[WorkerPool, ...]:
    """The worker groups. Colocated pools share the nodes of `train`; SFT generates nothing."""
    return ("rollout", "train") if spec.mode == "FullyAsync" else ("train",)


def all_pools(spec: TrainingSpec) -> tuple[Pool, ...]:
    """The head and the worker groups."""
    return ("head", *worker_pools(spec))


def rollout_nodes(spec: TrainingSpec) -> int:
    """Nodes that the rollout pool starts with; 0 where it has none of its own."""
    return spec.rollout.nodes if spec.rollout is not None and "rollout" in worker_pools(spec) else 0

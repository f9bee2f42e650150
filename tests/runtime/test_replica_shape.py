"""The shape of replicas for which train ranks stage the weights."""

import pytest

from qwen35_trainer.manifest import RolloutSpec
from qwen35_trainer.runtime.train_worker import replica_shape
from qwen35_trainer.weights.division import ReplicaShape


@pytest.mark.parametrize(
    ("rollout", "shape"),
    [
        (None, ReplicaShape(1)),
        ({"engine": "Torch"}, ReplicaShape(1)),
        ({"engine": "VLLM", "tensorParallel": 4}, ReplicaShape(4)),
        ({"engine": "VLLM", "tensorParallel": 8, "vllm": {"extraArguments": {"block_size": 16}}}, ReplicaShape(8)),
        (
            {"engine": "VLLM", "tensorParallel": 8, "vllm": {"extraArguments": {"enable_expert_parallel": True}}},
            ReplicaShape(8, divides_experts=True),
        ),
        # Texts, as vLLM reads them.
        (
            {"engine": "VLLM", "tensorParallel": 8, "vllm": {"extraArguments": {"enable_expert_parallel": "false"}}},
            ReplicaShape(8),
        ),
        (
            {"engine": "VLLM", "tensorParallel": 8, "vllm": {"extraArguments": {"enable_expert_parallel": "on"}}},
            ReplicaShape(8, divides_experts=True),
        ),
    ],
)
def test_weights_are_staged_for_the_ranks_of_the_replicas(rollout, shape: ReplicaShape) -> None:
    assert replica_shape(None if rollout is None else RolloutSpec.model_validate(rollout)) == shape

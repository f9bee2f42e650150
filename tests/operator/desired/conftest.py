"""Trainings to build the objects of."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from qwen35_operator.api.training_resource import TrainingResource
from qwen35_trainer.manifest import parse_spec

SPEC: dict[str, Any] = {
    "accelerator": {"profile": "NVIDIA", "devicesPerNode": 4},
    "model": {"name": "tiny", "source": {"random": {}}},
    "data": {"train": [{"name": "sums", "gym": {"task": "basic_arithmetic", "size": 64}}]},
    "rewards": [{"type": "Gym"}],
    "rollout": {"nodes": 2},
    "train": {"updates": 10, "batch": {"promptsPerUpdate": 4}},
}


@pytest.fixture(scope="session")
def make_training() -> Callable[..., TrainingResource]:
    """make_training({"rollout.nodes": 3}, name="demo") is a training whose spec.rollout.nodes is 3."""

    def make(changes: dict[str, object] | None = None, **fields: Any) -> TrainingResource:
        document = copy.deepcopy(SPEC)
        for path, value in (changes or {}).items():
            *parents, last = path.split(".")
            here = document
            for key in parents:
                here = here.setdefault(key, {})
            here[last] = value
        spec, problems = parse_spec(document, new=False)
        assert spec is not None, problems
        assert not problems
        training = TrainingResource("demo", "rl", "6d0fc0de-1111-2222-3333-444455556666", 1, spec)
        return replace(training, **fields)

    return make

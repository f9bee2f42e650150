"""Which plans the planner may try."""

from dataclasses import replace
from pathlib import Path

import pytest

from qwen35_trainer.manifest import cannot_run, load_manifest
from qwen35_trainer.simulate.plan_choice import LaneChoice, PlanChoice

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-grpo.yaml"
VLLM_ON_NODES_OF_EIGHT = (
    "spec.accelerator.profile=NVIDIA",
    "spec.accelerator.devicesPerNode=8",
    "spec.train.batch.promptsPerUpdate=128",
    "spec.rollout.engine=VLLM",
    "spec.rollout.nodes=3",
)


@pytest.mark.parametrize(("devices", "is_legal"), [(None, True), (2, True), (4, False), (8, True)])
def test_of_a_manifest_whose_lane_cannot_run_only_plans_without_another_problem_are_legal(devices, is_legal):
    """The model has two heads in linear layers, so vLLM cannot divide it among four or eight devices."""
    lane = "spec.rollout.stragglerLane={nodes: 1, tensorParallel: 8, afterTokens: 2}"
    spec = load_manifest(EXAMPLE, (*VLLM_ON_NODES_OF_EIGHT, lane)).spec
    assert len(cannot_run(spec)) == 1
    choice = replace(PlanChoice.of(spec), lane=devices and LaneChoice(1, devices, 2))
    assert choice.is_legal(spec) == is_legal

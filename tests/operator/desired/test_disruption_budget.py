"""The pods that a drain must not evict, counted from the pods that the operator creates."""

import pytest

from qwen35_operator.desired import disruption_budget, pod_templates, ray_job
from qwen35_operator.desired.pools import all_pools, rollout_nodes
from qwen35_operator.operator_settings import OperatorSettings
from tests.reach import matches

BUDGET = {"disruptionBudget": "HeadAndTrain"}
LANE = {
    "rollout.stragglerLane": {"nodes": 1, "tensorParallel": 4, "afterTokens": 1024},
    "rollout.nodes": 3,
    "rollout.engine": "VLLM",
}


@pytest.mark.parametrize(
    "changes",
    [{"train.nodes": 4}, {"mode": "Colocated", "train.nodes": 2, "rollout.nodes": 2}, LANE],
    ids=["a rollout pool", "colocated", "a straggler lane"],
)
def test_all_pods_but_those_of_the_rollout_pool_are_protected(make_training, changes) -> None:
    training = make_training(BUDGET | changes)
    spec = disruption_budget.build(training, 1)["spec"]
    job = ray_job.build(training, OperatorSettings(), attempt=1, rollout_nodes=rollout_nodes(training.spec))
    cluster = job["spec"]["rayClusterSpec"]
    groups = [(cluster["headGroupSpec"], 1), *((group, group["replicas"]) for group in cluster["workerGroupSpecs"])]
    labels = [(group["template"]["metadata"]["labels"], count) for group, count in groups]
    protected = [(each, count) for each, count in labels if matches(spec["selector"], each)]
    assert {each["rl.qwen35.io/pool"] for each, _ in protected} == {"head", "train"}
    assert spec["minAvailable"] == sum(count for _, count in protected)


def test_pods_of_other_trainings_and_attempts_do_not_count(make_training) -> None:
    selector = disruption_budget.build(make_training(BUDGET), 1)["spec"]["selector"]
    for pool in all_pools(make_training().spec):
        other = pod_templates.template(make_training(name="other"), "trainer:1", pool, 1)
        assert not matches(selector, other["metadata"]["labels"])
        later = pod_templates.template(make_training(), "trainer:1", pool, 2)
        assert not matches(selector, later["metadata"]["labels"])


def test_it_is_not_wanted_unless_the_spec_says_so(make_training) -> None:
    assert not disruption_budget.is_wanted(make_training())
    assert disruption_budget.is_wanted(make_training(BUDGET))

"""Drains of nodes: a PodDisruptionBudget keeps them from evicting pods whose loss ends the attempt."""

import pytest

from tests.controlplane.live_training import LiveTraining
from tests.testbed.api import Refused

TOO_MANY_REQUESTS = 429


def evict(live_training: LiveTraining, pod: str) -> int:
    """Evict a pod as kubectl drain does. Returns the status of the answer."""
    try:
        live_training.plane.api.post(f"{live_training.path('pods', pod)}/eviction", {"metadata": {"name": pod}})
    except Refused as refused:
        return refused.status
    return 201


@pytest.mark.worlds("real")
def test_a_drain_takes_rollout_pods_only_until_the_spec_allows_the_others(live_training: LiveTraining):
    live_training.apply(disruptionBudget="HeadAndTrain")
    pods = {
        pool: live_training.until_pods(pool, count)[0] for pool, count in (("head", 1), ("train", 1), ("rollout", 2))
    }
    live_training.report()
    live_training.until_condition("Ready", "True", "Running")

    def is_counted() -> bool:
        budget = live_training.find("poddisruptionbudgets", "demo-disruptions") or {}
        status = budget.get("status", {})
        return [status.get(name) for name in ("currentHealthy", "expectedPods", "disruptionsAllowed")] == [2, 2, 0]

    live_training.until(is_counted, "Kubernetes has counted the pods")
    assert evict(live_training, pods["rollout"]) == 201
    assert [evict(live_training, pods[pool]) for pool in ("head", "train")] == [TOO_MANY_REQUESTS] * 2
    live_training.edit(disruptionBudget="None")
    live_training.until(lambda: not live_training.mine("poddisruptionbudgets"), "the budget is gone")
    assert evict(live_training, pods["train"]) == 201

"""Kinds that the cluster does not have yet, and an API server that is away, in virtual time: see test_bad_cluster.py."""

from pathlib import Path

import pytest

from tests.controlplane.live_training import LiveTraining
from tests.controlplane.story_place import StoryPlace
from tests.virtual.operators import VirtualOperator
from tests.virtual.plane import VirtualPlane

pytestmark = pytest.mark.worlds("memory", only=True)


@pytest.fixture
def plane(world: StoryPlace) -> VirtualPlane:
    assert isinstance(world.plane, VirtualPlane)
    return world.plane


@pytest.fixture
def live_training(plane: VirtualPlane, namespace: str) -> LiveTraining:
    """Of an operator that the test itself starts."""
    return LiveTraining(plane, namespace)


@pytest.fixture
def idle_operator(world: StoryPlace) -> VirtualOperator:
    """An operator that has not been started yet."""
    assert world.operators is not None
    return world.operators.operator()


def test_our_own_kind_may_come_later(live_training: LiveTraining, idle_operator: VirtualOperator, plane: VirtualPlane):
    plane.undefine("qwen35trainings.rl.qwen35.io")
    idle_operator.start()
    live_training.until(lambda: "qwen35 crd" in idle_operator.log, "the log says what is missing")
    assert idle_operator.readiness()[0] == 503
    plane.define("qwen35trainings.rl.qwen35.io")
    live_training.apply()
    live_training.until_job()
    live_training.until_condition("Accepted", "True", "Accepted")
    assert idle_operator.readiness() == (200, "ok")


def test_kuberay_may_come_later(live_training: LiveTraining, idle_operator: VirtualOperator, plane: VirtualPlane):
    plane.stop_kuberay()
    for name in ("rayjobs.ray.io", "rayclusters.ray.io"):
        plane.undefine(name)
    idle_operator.start()
    live_training.apply()
    live_training.until_condition("Ready", "False", "Unavailable")
    assert live_training.condition("Accepted")[0] == "Unknown"
    assert "KubeRay" in live_training.whole_condition("Ready")["message"]
    assert live_training.mine("configmaps") == []
    for name in ("rayjobs.ray.io", "rayclusters.ray.io"):
        plane.define(name)
    plane.start_kuberay()
    live_training.until_job()
    live_training.until_condition("ClusterReady", "True", "NodesReady")


def test_kuberay_that_is_removed_while_a_training_runs_ends_its_attempt_when_it_is_back(
    live_training: LiveTraining, idle_operator: VirtualOperator, plane: VirtualPlane
):
    idle_operator.start()
    live_training.apply()
    live_training.until_pods("train", 1)
    live_training.report()
    live_training.until_condition("Ready", "True", "Running")
    plane.undefine("rayjobs.ray.io")
    live_training.until_condition("Ready", "False", "Unavailable")
    plane.define("rayjobs.ray.io")
    live_training.until_job(2)
    assert (live_training.first["outcome"], live_training.first["reason"]) == ("Failed", "JobDeleted")


def test_a_training_does_not_notice_that_the_api_server_is_away_for_minutes(
    live_training: LiveTraining, idle_operator: VirtualOperator, plane: VirtualPlane, ray_jobs: None, tmp_path: Path
):
    idle_operator.start()
    seen = tmp_path / "seen"
    live_training.apply(script=[[{"publish": 1}, {"await": str(seen)}, {"publish": 20}, {"succeed": "all done"}]])
    live_training.until_state("Running")
    live_training.until(lambda: live_training.status.get("progress", {}).get("update", 0) > 0, "it trains")
    idle_operator.transport.away = True
    seen.touch()
    plane.wait(180.0)
    idle_operator.transport.away = False
    live_training.until_state("Succeeded")
    assert [(attempt["number"], attempt["outcome"]) for attempt in live_training.attempts] == [(1, "Succeeded")]
    assert live_training.restarts == 0

"""An operator of named namespaces: it serves them with Roles, and needs nothing of the others."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.controlplane import operator_process
from tests.controlplane.live_training import LiveTraining
from tests.controlplane.operator_process import OperatorProcess
from tests.controlplane.sweep import clear
from tests.testbed.control_plane import ControlPlane

NAMESPACES = ("scoped-a", "scoped-b")
OTHER = "scoped-other"


@pytest.fixture(scope="module")
def scoped(control_plane: ControlPlane) -> Iterator[OperatorProcess]:
    for name in (*NAMESPACES, OTHER):
        if not control_plane.api.exists(f"/api/v1/namespaces/{name}"):
            control_plane.api.post("/api/v1/namespaces", {"metadata": {"name": name}})
    kubeconfig = operator_process.user(control_plane, operator_process.rules(cluster=False), NAMESPACES)
    options = [*(f"--namespace={name}" for name in NAMESPACES), "--log-format=json"]
    with operator_process.running(control_plane, kubeconfig, *options, name="scoped-operator") as running:
        yield running
    for name in (*NAMESPACES, OTHER):
        clear(control_plane, name)


def test_each_of_its_namespaces_is_served(control_plane: ControlPlane, scoped: OperatorProcess):
    stories = [LiveTraining(control_plane, namespace).apply() for namespace in NAMESPACES]
    for live_training in stories:
        live_training.until_condition("Accepted", "True", "Accepted")
        live_training.until_job()
        live_training.report()
        live_training.until_condition("Ready", "True", "Running")


def test_other_namespaces_are_left_alone(control_plane: ControlPlane, scoped: OperatorProcess):
    other = LiveTraining(control_plane, OTHER).apply()
    served = LiveTraining(control_plane, NAMESPACES[0], "later").apply()
    served.until_job()
    assert "status" not in other.body
    assert other.mine("rayjobs") == []


def test_it_needs_no_cluster_role(control_plane: ControlPlane, scoped: OperatorProcess):
    """Its user may watch in its namespaces alone, and none of its requests is refused."""
    before = scoped.refused_requests()
    live_training = LiveTraining(control_plane, NAMESPACES[0], "permitted").apply()
    live_training.until_job()
    (kubeconfig,) = (option.partition("=")[2] for option in scoped.command if option.startswith("--kubeconfig="))
    ask = ("auth", "can-i", "list", "rayjobs.ray.io")
    assert control_plane.kubectl(*ask, f"--namespace={NAMESPACES[0]}", kubeconfig=Path(kubeconfig)).strip() == "yes"
    with pytest.raises(RuntimeError):
        control_plane.kubectl(*ask, "--all-namespaces", kubeconfig=Path(kubeconfig))
    assert scoped.readiness() == (200, "ok")
    assert scoped.refused_requests() == before


def test_each_line_of_its_log_is_an_object(control_plane: ControlPlane, scoped: OperatorProcess):
    quota = {"metadata": {"name": "none"}, "spec": {"hard": {"count/rayjobs.ray.io": "0"}}}
    live_training = LiveTraining(control_plane, NAMESPACES[1], "unlucky")
    control_plane.api.post(live_training.path("resourcequotas", None), quota)
    live_training.until(
        lambda: "used" in control_plane.api.get(live_training.path("resourcequotas", "none")).get("status", {}),
        "it counts",
    )
    live_training.apply()
    live_training.until_condition("Ready", "False", "QuotaExceeded")
    live_training.until(lambda: "exceeded quota" in scoped.log, "it is logged, which comes after the condition")
    lines = [json.loads(line) for line in scoped.log.splitlines()]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    quota_lines = [line for line in lines if "exceeded quota" in line["message"]]
    assert {(line["namespace"], line["training"]) for line in quota_lines} == {(NAMESPACES[1], "unlucky")}

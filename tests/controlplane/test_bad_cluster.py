"""What is wrong with the cluster: a condition says so, and the same operator process goes on when it is put right."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.controlplane import operator_process
from tests.controlplane.cases import first_real
from tests.controlplane.operator_process import OperatorProcess
from tests.controlplane.story import Story
from tests.profiles import SOAK
from tests.testbed.api import DEFINITIONS, Refused
from tests.testbed.control_plane import OUR_DEFINITION, ControlPlane
from tests.testbed.ray_head import RayHead

AWAY = 60.0 if SOAK else 15.0
"""Seconds without an API server."""


@pytest.fixture
def story(control_plane: ControlPlane, namespace: str) -> Story:
    """Of an operator that the test itself starts."""
    return Story(control_plane, namespace)


@contextmanager
def alive(plane: ControlPlane, kubeconfig: Path) -> Iterator[OperatorProcess]:
    """An operator that is the same process at the end."""
    with operator_process.running(plane, kubeconfig) as operator:
        before = operator.pid
        yield operator
        assert operator.pid == before


def definition(plane: ControlPlane, plural: str) -> Path:
    return next(one for one in plane.binaries.kuberay_definitions if one.stem.endswith(f"_{plural}"))


def undefine(story: Story, name: str) -> None:
    path = f"{DEFINITIONS}/{name}"
    story.plane.api.request("DELETE", path)
    story.until(lambda: not story.plane.api.exists(path), f"{name} is gone")


def define(story: Story, file: Path) -> None:
    story.plane.api.define(file)
    story.until(lambda: story.plane.api.defined(file), f"{file.name} is served")


def test_our_own_kind_may_come_later(story: Story, operator_rights: Path):
    try:
        undefine(story, "qwen35trainings.rl.qwen35.io")
        with alive(story.plane, operator_rights) as operator:
            story.until(lambda: "qwen35trainings" in operator.log, "the log says what is missing")
            define(story, OUR_DEFINITION)
            story.apply()
            story.until_job()
            story.until_condition("Accepted", "True", "Accepted")
    finally:
        define(story, OUR_DEFINITION)


def test_kuberay_may_come_later(story: Story, operator_rights: Path):
    file = definition(story.plane, "rayjobs")
    try:
        undefine(story, "rayjobs.ray.io")
        story.plane.stop_kuberay()
        with alive(story.plane, operator_rights):
            story.apply()
            story.until_condition("Ready", "False", "Unavailable")
            assert story.condition("Accepted")[0] == "Unknown"
            assert "KubeRay" in story.told("Ready")["message"]
            assert story.mine("configmaps") == []
            define(story, file)
            story.plane.start_kuberay()
            story.until_job()
            story.until_condition("ClusterReady", "True", "NodesReady")
    finally:
        define(story, file)
        story.plane.stop_kuberay()
        story.plane.start_kuberay()


def test_an_old_kuberay_is_told_by_the_field_that_it_lacks(story: Story, operator_rights: Path, tmp_path: Path):
    file = definition(story.plane, "rayjobs")
    old = tmp_path / file.name
    old.write_text(yaml.safe_dump(without_labels(yaml.safe_load(file.read_text()))))
    try:
        story.plane.api.define(old)
        story.until(lambda: not knows_labels(story), "the old definition is in force")
        with alive(story.plane, operator_rights):
            story.apply()
            story.until_condition("Accepted", "False", "KubeRayTooOld")
            assert "labels" in story.told("Accepted")["message"]
            assert story.mine("rayjobs") == []
            define(story, file)
            story.until_condition("Accepted", "True", "Accepted")
            story.until_job()
    finally:
        define(story, file)


def without_labels(document: dict[str, Any]) -> dict[str, Any]:
    """The definition as it was before groups had Ray labels and resources."""
    for version in document["spec"]["versions"]:
        spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
        cluster = spec["rayClusterSpec"]["properties"]
        for group in (cluster["headGroupSpec"], cluster["workerGroupSpecs"]["items"]):
            for field in ("labels", "resources"):
                group["properties"].pop(field, None)
    return document


def knows_labels(story: Story) -> bool:
    """Whether the API server takes a job whose head has labels."""
    group = {"labels": {"a": "b"}, "rayStartParams": {}, "template": {"spec": {"containers": [{"name": "ray"}]}}}
    job = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": "probe"},
        "spec": {"entrypoint": "true", "rayClusterSpec": {"headGroupSpec": group}},
    }
    query = "?dryRun=All&fieldValidation=Strict"
    try:
        story.plane.api.post(story.path("rayjobs", None) + query, job)
    except Refused as refused:
        if "unknown field" not in refused.message:
            raise
        return False
    return True


@pytest.mark.quiet
def test_a_training_does_not_notice_that_the_api_server_is_away(
    story: Story, operator_rights: Path, ray_head: RayHead, tmp_path: Path
):
    seen = tmp_path / "seen"
    with alive(story.plane, operator_rights):
        story.apply(script=[[{"publish": 1}, {"await": str(seen)}, {"publish": 39}, {"succeed": "all done"}]])
        story.until_state("Running")
        story.until(lambda: story.status["progress"]["update"] > 0, "it trains")
        seen.touch()
        story.plane.stop_api_server()
        try:
            time.sleep(AWAY)
        finally:
            story.plane.start_api_server()
        story.until_state("Succeeded")
        assert [(one["number"], one["outcome"]) for one in story.attempts] == [(1, "Succeeded")]
        assert story.restarts == 0


@pytest.mark.parametrize("resource", first_real(["rayjobs", "pods", "configmaps"]))
def test_what_it_may_not_watch_is_named(story: Story, resource: str):
    kubeconfig = operator_process.user(story.plane, operator_process.rules(without=resource))
    with alive(story.plane, kubeconfig):
        story.apply()
        story.until_condition("Ready", "False", "Unavailable")
        assert resource in story.told("Ready")["message"]
        assert story.mine("rayjobs") == []
        allow_all(story.plane, kubeconfig)
        story.until_job()
        story.until_condition("Accepted", "True", "Accepted")


def test_it_is_not_ready_while_it_may_not_list_trainings(story: Story):
    kubeconfig = operator_process.user(story.plane, operator_process.rules(without="qwen35trainings"))
    with alive(story.plane, kubeconfig) as operator:
        story.until(lambda: "may not watch" in operator.readiness()[1], "the probe says why")
        status, said = operator.readiness()
        assert status == 503
        # Beside it stands what it has not listed yet.
        (line,) = (line for line in said.splitlines() if "may not watch" in line)
        assert "Grant get, list and watch on qwen35trainings.rl.qwen35.io in all namespaces" in line
        assert line in operator.log
        allow_all(story.plane, kubeconfig)
        story.apply()
        story.until_job()
        assert operator.readiness() == (200, "ok")


@pytest.mark.parametrize("resource", first_real(["rayjobs", "networkpolicies"]))
def test_what_it_may_not_create_is_named(story: Story, resource: str):
    kubeconfig = operator_process.user(story.plane, only_reading(resource))
    with alive(story.plane, kubeconfig):
        story.apply()
        story.until_condition("Ready", "False", "Forbidden")
        message = story.told("Ready")["message"]
        assert "create" in message
        assert resource in message
        assert story.namespace in message
        allow_all(story.plane, kubeconfig)
        story.until_job()
        story.until(lambda: story.condition("Ready")[1] != "Forbidden", "it goes on")


def test_without_a_permission_to_write_status_the_log_says_so(story: Story):
    kubeconfig = operator_process.user(story.plane, operator_process.rules(without="qwen35trainings/status"))
    with alive(story.plane, kubeconfig) as operator:
        story.apply()
        story.until(lambda: "qwen35trainings/status" in operator.log, "the log names what is missing")
        allow_all(story.plane, kubeconfig)
        story.until_condition("Accepted", "True", "Accepted")


def only_reading(resource: str) -> list[dict[str, Any]]:
    rules = operator_process.rules()
    return [rule | {"verbs": ["get", "list", "watch"]} if resource in rule["resources"] else rule for rule in rules]


def allow_all(plane: ControlPlane, kubeconfig: Path) -> None:
    """Grants what was withheld, to the same user."""
    name = Path(json.loads(kubeconfig.read_text())["users"][0]["user"]["client-certificate"]).stem
    operator_process.grant(plane, name, operator_process.rules(), None)

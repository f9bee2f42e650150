"""What is wrong with the cluster: a condition says so, and the same operator process continues once it is repaired.

More of it, in virtual time: test_missing_kinds.py, test_permissions.py.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.controlplane import operator_process
from tests.controlplane.live_training import LiveTraining
from tests.controlplane.operator_process import OperatorProcess
from tests.profiles import SOAK
from tests.testbed import kuberay
from tests.testbed.api import DEFINITIONS, Refused
from tests.testbed.control_plane import OUR_DEFINITION, ControlPlane
from tests.testbed.ray_head import RayHead

AWAY = 60.0 if SOAK else 15.0
"""Seconds without an API server."""


@pytest.fixture
def live_training(control_plane: ControlPlane, namespace: str) -> LiveTraining:
    """Of an operator that the test itself starts."""
    return LiveTraining(control_plane, namespace)


@contextmanager
def alive(plane: ControlPlane, kubeconfig: Path) -> Iterator[OperatorProcess]:
    """An operator that is the same process at the end."""
    with operator_process.running(plane, kubeconfig) as operator:
        before = operator.pid
        yield operator
        assert operator.pid == before


def definition(plane: ControlPlane, plural: str) -> Path:
    return next(
        kuberay_definition
        for kuberay_definition in plane.binaries.kuberay_definitions
        if kuberay_definition.stem.endswith(f"_{plural}")
    )


def undefine(live_training: LiveTraining, name: str) -> None:
    path = f"{DEFINITIONS}/{name}"
    live_training.plane.api.request("DELETE", path)
    live_training.until(lambda: not live_training.plane.api.exists(path), f"{name} is gone")


def define(live_training: LiveTraining, file: Path) -> None:
    api = live_training.plane.api
    api.define(file) if file == OUR_DEFINITION else kuberay.define(api, file)
    live_training.until(lambda: live_training.plane.api.defined(file), f"{file.name} is served")


def test_our_own_kind_may_come_later(live_training: LiveTraining, operator_rights: Path):
    try:
        undefine(live_training, "qwen35trainings.rl.qwen35.io")
        with alive(live_training.plane, operator_rights) as operator:
            live_training.until(lambda: "qwen35trainings" in operator.log, "the log says what is missing")
            define(live_training, OUR_DEFINITION)
            live_training.apply()
            live_training.until_job()
            live_training.until_condition("Accepted", "True", "Accepted")
    finally:
        define(live_training, OUR_DEFINITION)


@pytest.mark.soak
def test_kuberay_may_come_later(live_training: LiveTraining, operator_rights: Path):
    file = definition(live_training.plane, "rayjobs")
    try:
        undefine(live_training, "rayjobs.ray.io")
        live_training.plane.stop_kuberay()
        with alive(live_training.plane, operator_rights):
            live_training.apply()
            live_training.until_condition("Ready", "False", "Unavailable")
            assert live_training.condition("Accepted")[0] == "Unknown"
            assert "KubeRay" in live_training.whole_condition("Ready")["message"]
            assert live_training.mine("configmaps") == []
            define(live_training, file)
            live_training.plane.start_kuberay()
            live_training.until_job()
            live_training.until_condition("ClusterReady", "True", "NodesReady")
    finally:
        define(live_training, file)
        live_training.plane.stop_kuberay()
        live_training.plane.start_kuberay()


def test_an_old_kuberay_is_recognized_by_the_field_that_it_lacks(
    live_training: LiveTraining, operator_rights: Path, tmp_path: Path
):
    file = definition(live_training.plane, "rayjobs")
    old = tmp_path / file.name
    present = yaml.load(kuberay.served(file.read_text()), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    old.write_text(json.dumps(without_labels(present)))
    try:
        live_training.plane.api.define(old)
        live_training.until(lambda: not knows_labels(live_training), "the old definition is in force")
        with alive(live_training.plane, operator_rights):
            live_training.apply()
            live_training.until_condition("Accepted", "False", "KubeRayTooOld")
            assert "labels" in live_training.whole_condition("Accepted")["message"]
            assert live_training.mine("rayjobs") == []
            define(live_training, file)
            live_training.until_condition("Accepted", "True", "Accepted")
            live_training.until_job()
    finally:
        define(live_training, file)


def without_labels(document: dict[str, Any]) -> dict[str, Any]:
    """The definition as it was before groups had Ray labels and resources."""
    for version in document["spec"]["versions"]:
        spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
        cluster = spec["rayClusterSpec"]["properties"]
        for group in (cluster["headGroupSpec"], cluster["workerGroupSpecs"]["items"]):
            for field in ("labels", "resources"):
                group["properties"].pop(field, None)
    return document


def knows_labels(live_training: LiveTraining) -> bool:
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
        live_training.plane.api.post(live_training.path("rayjobs", None) + query, job)
    except Refused as refused:
        if "unknown field" not in refused.message:
            raise
        return False
    return True


@pytest.mark.quiet
def test_a_training_does_not_notice_that_the_api_server_is_away(
    live_training: LiveTraining, operator_rights: Path, ray_head: RayHead, tmp_path: Path
):
    seen = tmp_path / "seen"
    with alive(live_training.plane, operator_rights):
        live_training.apply(script=[[{"publish": 1}, {"await": str(seen)}, {"publish": 39}, {"succeed": "all done"}]])
        live_training.until_state("Running")
        live_training.until(lambda: live_training.status["progress"]["update"] > 0, "it trains")
        seen.touch()
        live_training.plane.stop_api_server()
        try:
            time.sleep(AWAY)
        finally:
            live_training.plane.start_api_server()
        live_training.until_state("Succeeded")
        assert [(attempt["number"], attempt["outcome"]) for attempt in live_training.attempts] == [(1, "Succeeded")]
        assert live_training.restarts == 0

"""Ray's TLS in the pods: who gets which key, and what users may not change then."""

import copy
import re
from typing import Any

import pytest

from qwen35_operator.desired import all_objects, pod_templates, ray_tls
from qwen35_operator.operator_settings import OperatorSettings
from qwen35_trainer import pod_certificate
from qwen35_trainer.manifest import parse_spec
from tests.operator.desired.conftest import SPEC

POOLS = ("head", "rollout", "train")
TLS = {"pods.tls": {"secretName": "ray-ca"}}


@pytest.fixture
def template(make_training):
    return lambda pool, changes=None: pod_templates.template(make_training(changes), "trainer:1", pool, 1)


@pytest.fixture
def refused(make_training):
    """refused({...}) are path and message of the problems with such changes of the spec."""

    def found(changes: dict[str, Any]) -> dict[str, str]:
        problems = all_objects.problems(make_training(changes), OperatorSettings())
        assert all(problem.fix for problem in problems)
        return {problem.path: problem.message for problem in problems}

    return found


def mounts_of(pod: dict[str, Any], volume: str) -> dict[str, tuple[str, bool]]:
    """Container → where it mounts the volume, and whether only for reading."""
    spec = pod["spec"]
    return {
        container["name"]: (mount["mountPath"], mount.get("readOnly", False))
        for container in (*spec.get("initContainers", ()), *spec["containers"])
        for mount in container["volumeMounts"]
        if mount["name"] == volume
    }


@pytest.mark.parametrize("pool", POOLS)
def test_without_the_field_a_pod_has_nothing_of_tls(pool, template):
    assert "initContainers" not in template(pool)["spec"]
    assert "tls" not in str(template(pool)).lower()


@pytest.mark.parametrize("pool", POOLS)
def test_only_the_init_container_gets_the_authoritys_key(pool, template):
    pod = template(pool, TLS)
    assert mounts_of(pod, "ray-authority") == {"ray-certificate": ("/var/lib/qwen35/authority", True)}
    assert mounts_of(pod, "ray-tls") == {
        "ray-certificate": ("/var/lib/qwen35/tls", False),
        "ray": ("/var/lib/qwen35/tls", True),
    }
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert volumes["ray-tls"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Mi"}
    secret = volumes["ray-authority"]["secret"]
    assert (secret["secretName"], secret["defaultMode"] & 0o007) == ("ray-ca", 0)


@pytest.mark.parametrize("pool", POOLS)
def test_ray_finds_the_files_that_the_init_container_writes(pool, template):
    pod = template(pool, TLS)
    (container,) = pod["spec"]["containers"]
    values = {entry["name"]: entry.get("value") for entry in container["env"]}
    folder, _ = mounts_of(pod, "ray-tls")["ray"]
    assert values["RAY_USE_TLS"] == "1"
    assert {values[f"RAY_TLS_{name}"] for name in ("SERVER_CERT", "SERVER_KEY", "CA_CERT")} == {
        f"{folder}/{file}" for file in ("tls.crt", "tls.key", "ca.crt")
    }


@pytest.mark.parametrize("pool", POOLS)
def test_the_module_takes_the_command_of_the_init_container(pool, template, tmp_path, capsys):
    """With what KubeRay and the kubelet put in the place of variables. The authority is missing here, nothing else."""
    (container,) = template(pool, TLS)["spec"]["initContainers"]
    assert container["command"][:3] == ["python", "-m", pod_certificate.__name__]
    variables = {"POD_IPS": "10.0.0.1,fd00::1", "FQ_RAY_IP": "a-head-svc.b.svc.cluster.local", "RAY_IP": "a-head-svc"}
    arguments = [re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], text) for text in container["command"][3:]]
    assert ("a-head-svc" in arguments) == (pool == "head")
    assert pod_certificate.main(arguments, tmp_path, tmp_path) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "tls.crt" in lines[1]


@pytest.mark.parametrize("pool", POOLS)
def test_the_init_container_is_as_confined_as_ray(pool, template):
    spec = template(pool, TLS)["spec"]
    (container,) = spec["initContainers"]
    assert container["securityContext"] == spec["containers"][0]["securityContext"]
    assert set(container["resources"]["requests"]) == {"cpu", "memory"}
    assert container["image"] == spec["containers"][0]["image"]


def test_init_containers_of_the_user_run_after_it(template):
    container = {"name": "mine", "image": "x"}
    pod = template("head", TLS | {"pods.head": {"spec": {"initContainers": [container]}}})
    assert [item["name"] for item in pod["spec"]["initContainers"]] == ["ray-certificate", "mine"]


def ray(**fields: object) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "ray"} | fields]}}


def sidecar(kind: str, name: str = "mine", **fields: object) -> dict[str, Any]:
    return {"spec": {kind: [{"name": name, "image": "x"} | fields]}}


AUTHORITY_MOUNT = [{"name": "ray-authority", "mountPath": "/ca"}]
REFUSED = {
    "variable": (ray(env=[{"name": "RAY_USE_TLS", "value": "0"}]), "containers[0].env[0].name"),
    "key elsewhere": (ray(env=[{"name": "RAY_TLS_SERVER_KEY", "value": "/x"}]), "containers[0].env[0].name"),
    "authority for ray": (ray(volumeMounts=AUTHORITY_MOUNT), "containers[0].volumeMounts[0].name"),
    "authority for a sidecar": (
        sidecar("containers", volumeMounts=AUTHORITY_MOUNT),
        "containers[0].volumeMounts[0].name",
    ),
    "authority for an init container": (
        sidecar("initContainers", volumeMounts=AUTHORITY_MOUNT),
        "initContainers[0].volumeMounts[0].name",
    ),
    "another user for ray": (ray(securityContext={"runAsUser": 2000}), "containers[0].securityContext.runAsUser"),
    "its container": (sidecar("initContainers", "ray-certificate"), "initContainers[0].name"),
    "its name for a sidecar": (sidecar("containers", "ray-certificate"), "containers[0].name"),
    "its volume": ({"spec": {"volumes": [{"name": "ray-tls", "emptyDir": {}}]}}, "volumes[0].name"),
    "the authority's volume": ({"spec": {"volumes": [{"name": "ray-authority", "emptyDir": {}}]}}, "volumes[0].name"),
}
ONLY_WITH_TLS = [case for case in REFUSED if "authority for" not in case]
"""Cases that are allowed without pods.tls. The others mount a volume that does not exist then."""


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_break_or_open_tls_is_refused(case, refused):
    change, path = REFUSED[case]
    assert f"spec.pods.train.spec.{path}" in refused(TLS | {"pods.train": change})


@pytest.mark.parametrize("case", ONLY_WITH_TLS)
def test_without_the_field_it_is_allowed_as_in_earlier_releases(case, refused):
    assert refused({"pods.train": REFUSED[case][0]}) == {}


def test_variables_of_every_pod_are_refused_too(refused):
    environment = {"pods.env": [{"name": name, "value": "x"} for name in ray_tls.VARIABLES]}
    assert set(refused(TLS | environment)) == {f"spec.pods.env[{index}].name" for index in range(4)}
    assert refused(environment) == {}


def test_a_user_of_the_whole_pod_and_a_sidecar_that_speaks_to_ray_are_allowed(refused):
    pod = {"spec": {"securityContext": {"runAsUser": 2000}}}
    assert refused(TLS | {"pods.train": pod}) == {}
    mount = [{"name": "ray-tls", "mountPath": "/tls", "readOnly": True}]
    assert refused(TLS | {"pods.head": sidecar("containers", volumeMounts=mount)}) == {}


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({}, "spec.pods.tls.secretName"),
        ({"secretName": ""}, "spec.pods.tls.secretName"),
        ({"secretName": "Ray CA"}, "spec.pods.tls.secretName"),
        ({"secretName": "ray-ca", "key": "x"}, "spec.pods.tls.key"),
    ],
)
def test_a_missing_or_impossible_name_of_the_secret_is_refused(value, path):
    _, problems = parse_spec(copy.deepcopy(SPEC) | {"pods": {"tls": value}}, new=True)
    (problem,) = problems
    assert problem.path == path
    assert problem.message

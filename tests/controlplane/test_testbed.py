"""The test bed is what it says: a cluster that keeps its rules, runs pods and jobs, and leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.controlplane.cases import first_real
from tests.testbed import binaries
from tests.testbed.api import is_true
from tests.testbed.control_plane import ControlPlane
from tests.testbed.kwok import NODES
from tests.testbed.ray_head import RayHead

REPOSITORY = Path(__file__).parents[2]
Eventually = Callable[..., None]
HEAD = {
    "rayStartParams": {"dashboard-host": "0.0.0.0"},
    "template": {"spec": {"containers": [{"name": "ray-head", "image": "ray"}]}},
}
DAEMONS = textwrap.dedent("""
    import pathlib, sys, time
    from tests.testbed.processes import Processes
    folder = pathlib.Path(sys.argv[1])
    processes = Processes(folder)
    # The grandchild leaves the session of its parent, which ends: nobody knows it any more.
    processes.start("daemon", ["sh", "-c", f"setsid sh -c 'echo $$ > {folder}/pid; exec sleep 1000' & exec sleep 1000"])
    processes.start("deaf", ["sh", "-c", "trap '' TERM; while true; do sleep 1; done"], grace=0.5)
    processes.wait("daemon", lambda: (folder / "pid").exists() and (folder / "pid").read_text().strip() != "")
    print("ready", flush=True)
    time.sleep(1000)
""")


def example(**train: Any) -> str:
    manifest = yaml.safe_load((REPOSITORY / "examples" / "tiny-grpo.yaml").read_text())
    manifest["spec"]["train"] |= train
    return json.dumps(manifest)


def ray_object(kind: str, name: str, spec: dict[str, Any]) -> str:
    return json.dumps({"apiVersion": "ray.io/v1", "kind": kind, "metadata": {"name": name}, "spec": spec})


def status(plane: ControlPlane, kind: str, namespace: str, name: str) -> dict[str, Any]:
    body = plane.api.get(f"/apis/ray.io/v1/namespaces/{namespace}/{kind}/{name}")
    return dict(body.get("status", {}))


def cluster_state(plane: ControlPlane, namespace: str, name: str) -> str | None:
    return status(plane, "rayclusters", namespace, name).get("state")


def test_six_nodes_are_ready_and_offer_their_devices(control_plane: ControlPlane):
    nodes = {node["metadata"]["name"]: node["status"] for node in control_plane.api.get("/api/v1/nodes")["items"]}
    assert nodes.keys() == NODES.keys()
    for name, devices in NODES.items():
        assert is_true(nodes[name], "Ready")
        offered = {key: value for key, value in nodes[name]["allocatable"].items() if "/" in key}
        assert offered == devices


def test_the_version_is_the_pinned_one(control_plane: ControlPlane):
    assert json.loads(control_plane.kubectl("version", "--output=json"))["serverVersion"]["gitVersion"] == "v1.35.4"


def test_a_user_may_do_what_a_role_grants_and_no_more(
    control_plane: ControlPlane, namespace: str, eventually: Eventually
):
    own = control_plane.kubeconfig_for("reader", ["readers"])
    listing = ("--namespace", namespace, "get", "configmaps")
    with pytest.raises(RuntimeError, match='User "reader" cannot list resource "configmaps"'):
        control_plane.kubectl(*listing, kubeconfig=own)
    control_plane.kubectl(
        "--namespace", namespace, "create", "rolebinding", "r", "--clusterrole=view", "--group=readers"
    )

    def listed() -> str:
        try:
            return control_plane.kubectl(*listing, kubeconfig=own)
        except RuntimeError:  # what a role grants is known to the authorizer a little later
            return ""

    eventually(lambda: "kube-root-ca.crt" in listed(), "the role is in force")
    with pytest.raises(RuntimeError, match="cannot delete"):
        control_plane.kubectl("--namespace", namespace, "delete", "configmaps", "--all", kubeconfig=own)


def test_an_administrators_token_works_where_no_certificate_can(control_plane: ControlPlane):
    via = control_plane.kubeconfig_via(control_plane.server)
    assert control_plane.kubectl("auth", "can-i", "*", "*", kubeconfig=via).strip() == "yes"


def test_our_definition_is_served_and_its_rules_are_enforced(control_plane: ControlPlane, namespace: str):
    create = ("--namespace", namespace, "create", "--filename=-")
    control_plane.kubectl(*create, input=example())
    assert "tiny-grpo" in control_plane.kubectl("--namespace", namespace, "get", "q35")
    with pytest.raises(RuntimeError, match=r"tensor 3 .* does not divide 1 nodes"):
        control_plane.kubectl(*create, "--dry-run=server", input=example(parallelism={"tensor": 3}))


def test_kuberay_makes_a_cluster_whose_head_pod_runs(
    control_plane: ControlPlane, namespace: str, eventually: Eventually
):
    cluster = ray_object("RayCluster", "head-only", {"headGroupSpec": HEAD})
    control_plane.kubectl("--namespace", namespace, "create", "--filename=-", input=cluster)
    eventually(lambda: cluster_state(control_plane, namespace, "head-only") == "ready", "the cluster is ready")
    (pod,) = control_plane.api.get(f"/api/v1/namespaces/{namespace}/pods")["items"]
    assert pod["status"]["phase"] == "Running"


def test_a_job_runs_on_the_rays_of_this_machine(
    control_plane: ControlPlane, namespace: str, ray_head: RayHead, eventually: Eventually, tmp_path: Path
):
    ray_head.command("scripted", f"#!/bin/sh\necho ran $1 > {tmp_path}/arguments\n")
    spec = {"submissionMode": "HTTPMode", "entrypoint": "scripted hi", "rayClusterSpec": {"headGroupSpec": HEAD}}
    control_plane.kubectl("--namespace", namespace, "create", "--filename=-", input=ray_object("RayJob", "hi", spec))

    def ended() -> bool:
        return status(control_plane, "rayjobs", namespace, "hi").get("jobDeploymentStatus") in {"Complete", "Failed"}

    eventually(ended, "the job has ended")
    assert status(control_plane, "rayjobs", namespace, "hi")["jobStatus"] == "SUCCEEDED"
    assert (tmp_path / "arguments").read_text() == "ran hi\n"


def test_a_restarted_api_server_still_has_the_data(control_plane: ControlPlane, namespace: str):
    control_plane.kubectl("--namespace", namespace, "create", "configmap", "kept", "--from-literal=key=value")
    control_plane.stop_api_server()
    try:
        with pytest.raises(RuntimeError, match="refused"):
            control_plane.kubectl("get", "nodes")
    finally:
        control_plane.start_api_server()
    query = ("--namespace", namespace, "get", "configmap", "kept", "--output=jsonpath={.data.key}")
    assert control_plane.kubectl(*query) == "value"


def test_kuberay_picks_up_what_came_while_it_was_away(
    control_plane: ControlPlane, namespace: str, eventually: Eventually
):
    cluster = ray_object("RayCluster", "waiting", {"headGroupSpec": HEAD})
    control_plane.stop_kuberay()
    try:
        control_plane.kubectl("--namespace", namespace, "create", "--filename=-", input=cluster)
    finally:
        control_plane.start_kuberay()
    eventually(lambda: cluster_state(control_plane, namespace, "waiting") == "ready", "the cluster is ready")


@pytest.mark.parametrize("end", first_real([signal.SIGKILL, signal.SIGTERM]))
def test_a_bed_leaves_no_process_behind_however_it_ends(end: signal.Signals, eventually: Eventually, tmp_path: Path):
    with run_until_ready(tmp_path, "-m", "tests.testbed", "up") as bed:
        assert_all_end_with(bed, end, at_least=12, eventually=eventually)


def test_daemons_and_the_deaf_end_with_who_asked_for_them(tmp_path: Path, eventually: Eventually):
    with run_until_ready(tmp_path, "-c", DAEMONS, str(tmp_path)) as process:
        daemon = psutil.Process(int((tmp_path / "pid").read_text()))
        assert_all_end_with(process, signal.SIGKILL, at_least=4, eventually=eventually)
        assert not alive(daemon)


def test_a_missing_build_is_reported_with_the_command_that_builds_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(binaries.NotBuilt, match="run `make testbed`"):
        binaries.find()


@pytest.mark.parametrize(
    ("go", "message"),
    [
        (None, r"needs Go 1\.25 or newer, and there is no `go` in PATH"),
        ("#!/bin/sh\necho go version go1.24.9 linux/amd64", r"needs Go 1\.25 or newer, but .* go1\.24\.9 .*update it"),
    ],
)
def test_a_missing_or_old_go_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], go: str | None, message: str
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    if go:
        (tmp_path / "go").write_text(go)
        (tmp_path / "go").chmod(0o755)
    with pytest.raises(binaries.NotBuilt, match=message):
        binaries.build()
    assert not capsys.readouterr().err


@contextmanager
def run_until_ready(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """It is killed at the end, should it still run."""
    with subprocess.Popen(
        [sys.executable, *arguments],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout
            assert process.stdout.readline().startswith("ready")
            yield process
        finally:
            process.kill()


def assert_all_end_with(
    process: subprocess.Popen[str], end: signal.Signals, *, at_least: int, eventually: Eventually
) -> None:
    started = psutil.Process(process.pid).children(recursive=True)
    assert len(started) >= at_least
    process.send_signal(end)
    process.wait()
    eventually(lambda: not any(alive(item) for item in started), f"all of {started} have ended")


def alive(process: psutil.Process) -> bool:
    try:
        # An ended process stays a zombie until the process that inherited it waits for it.
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

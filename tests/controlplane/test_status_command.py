"""`qwen35 status` and `qwen35 report` as a person runs them, on real trainings.

As processes where that could matter: a watch, and the administrator's list. Otherwise in this process, because the imports of the
command take most of its time.
"""

import base64
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest
from typer.testing import CliRunner, Result

from qwen35_operator.kube.kinds import CONFIG_MAP
from qwen35_trainer.commands import app
from qwen35_trainer.exits import FAILED, REFUSED
from qwen35_trainer.progress.packed_history import MAX_PACKED_BYTES, pack
from qwen35_trainer.progress.records import FinishRecord
from qwen35_trainer.progress.summary import summarise
from tests.controlplane.live_training import LiveTraining
from tests.controlplane.operator_process import grant
from tests.patience import PATIENCE
from tests.testbed.certificates import ADMINISTRATORS

type Command = Callable[..., Result]

QWEN35 = str(Path(sys.executable).with_name("qwen35"))
READER = [
    {"apiGroups": ["rl.qwen35.io"], "resources": ["qwen35trainings"], "verbs": ["get", "list", "watch"]},
    {"apiGroups": [""], "resources": ["events"], "verbs": ["list"]},
    {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get"]},
]
"""What docs/operations.md says that the commands need."""


@pytest.fixture
def reader(live_training: LiveTraining) -> Path:
    """A kubeconfig of somebody who may read, in the training's namespace alone."""
    name = f"reader-{secrets.token_hex(4)}"
    grant(live_training.plane, name, READER, live_training.namespace)
    return live_training.plane.kubeconfig_for(name)


@pytest.fixture
def qwen35(live_training: LiveTraining, reader: Path) -> Command:
    """qwen35("status", "demo") runs the command with the reader's rights."""

    def run(*arguments: str, kubeconfig: Path = reader) -> Result:
        where = [f"--namespace={live_training.namespace}", f"--kubeconfig={kubeconfig}"]
        return CliRunner().invoke(app, [*arguments, *where], env={"COLUMNS": "80"})

    return run


def test_a_training_shows_where_it_stands(live_training: LiveTraining, qwen35: Command):
    live_training.apply()
    for pool, nodes in (("head", 1), ("rollout", 2), ("train", 1)):
        live_training.until_pods(pool, nodes)
    live_training.report(update=7, updates=10, version=6, reward=0.5, accuracy=0.75, lagMean=0.5, lagMax=1)
    live_training.until_condition("Ready", "True", "Running")
    live_training.until(
        lambda: all(item["ready"] == item["desired"] for item in live_training.status["pools"]), "all nodes are ready"
    )
    shown = qwen35("status", "demo")
    assert (shown.exit_code, shown.stderr) == (0, "")
    for text in (
        "demo",
        "state       Running",
        "7 of 10",
        "0.500",
        "held-out accuracy 75%",
        "rollout         2       2",
    ):
        assert text in shown.stdout
    assert "waits for" not in shown.stdout
    assert json.loads(qwen35("status", "demo", "--json").stdout)["status"] == live_training.status
    (_, line) = qwen35("status").stdout.splitlines()
    assert line.split()[:3] == ["demo", "Running", "7/10"]


def test_it_says_what_it_waits_for(live_training: LiveTraining, qwen35: Command):
    live_training.apply(labels={"kueue.x-k8s.io/queue-name": "rl"})
    live_training.until_job()
    live_training.hold_in_queue(suspended=True)
    live_training.until_condition("QuotaReserved", "False", "QuotaPending")
    assert "QuotaReserved: the queue has not admitted it yet (QuotaPending" in qwen35("status", "demo").stdout


def test_a_failure_is_shown_and_is_the_exit_code_of_a_watch(live_training: LiveTraining, qwen35: Command):
    live_training.apply(failurePolicy={"maxRestarts": 0})
    live_training.until_job()
    live_training.report("Failed", reason="DataError", message="no field answer in line 17")
    live_training.until_state("Failed")
    assert "no field answer in line 17" in qwen35("status", "demo").stdout
    assert qwen35("status", "demo", "--watch").exit_code == FAILED


def test_a_watch_outlives_the_api_server_and_ends_with_the_training(live_training: LiveTraining, reader: Path):
    live_training.apply()
    live_training.until_job()
    live_training.report(update=1)
    live_training.until_state("Running")
    command = [QWEN35, "status", "demo", "--watch", f"--namespace={live_training.namespace}", f"--kubeconfig={reader}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watching:
        try:
            assert watching.stdout is not None
            assert "Running" in watching.stdout.readline()
            live_training.plane.restart_api_server()
            live_training.until(lambda: live_training.find("configmaps", "demo-progress"), "the API server answers")
            live_training.report("Succeeded", message="enough")
            out, _ = watching.communicate(timeout=PATIENCE)
        finally:
            watching.kill()
    assert watching.returncode == 0
    assert "Succeeded" in out.splitlines()[-1]


def test_what_cannot_be_shown_is_one_line_with_the_fix(live_training: LiveTraining, qwen35: Command):
    live_training.apply()
    live_training.until_job()
    near = qwen35("status", "demon")
    assert near.exit_code == REFUSED
    assert near.stderr == f"no training demon in namespace {live_training.namespace}. Did you mean demo?\n"
    nobody = live_training.plane.kubeconfig_for(f"nobody-{secrets.token_hex(4)}")
    refused = qwen35("status", "demo", kubeconfig=nobody)
    assert refused.exit_code == REFUSED
    assert refused.stderr.startswith(
        f"no permission to list qwen35trainings.rl.qwen35.io in namespace {live_training.namespace}: "
    )


def test_the_trainer_leaves_a_history_that_becomes_a_report_after_its_pods_are_gone(
    live_training: LiveTraining, qwen35: Command, tmp_path: Path
):
    live_training.apply()
    live_training.until_job()
    live_training.until(lambda: live_training.find("configmaps", "demo-history"), "-history exists")
    page = tmp_path / "report.html"
    assert "has no history yet" in qwen35("report", "demo", f"--output={page}").stderr
    account = f"--as=system:serviceaccount:{live_training.namespace}:demo-trainer"
    records = [FinishRecord(outcome="Succeeded", message="", time=1.0)]
    packed = pack("metadata: {name: demo}\n", summarise(records, max_version_lag=3, peak_rss_mib=None), records)
    assert live_training.kubectl("auth", "can-i", "patch", "configmaps/demo-history", account).strip() == "yes"
    change = {"binaryData": {"history.json.gz": base64.b64encode(packed).decode()}}
    live_training.patch(live_training.path("configmaps", "demo-history"), change)
    live_training.report("Succeeded", message="enough")
    live_training.until_state("Succeeded")
    live_training.plane.api.request("DELETE", live_training.path("rayjobs", "demo-1"))
    live_training.until(lambda: not live_training.mine("pods"), "the pods are gone")
    done = qwen35("report", "demo", f"--output={page}")
    assert (done.exit_code, done.stdout) == (0, f"Report: {page} (Succeeded, 0 updates)\n")
    assert "<title>demo · qwen35</title>" in page.read_text()


def test_a_history_is_made_again_is_written_by_nobody_else_and_is_not_among_what_is_watched_whole(
    live_training: LiveTraining,
):
    live_training.apply()
    live_training.until_job()
    live_training.until(lambda: live_training.find("configmaps", "demo-history"), "-history exists")
    before = live_training.get("configmaps", "demo-history")
    live_training.plane.api.request("DELETE", live_training.path("configmaps", "demo-history"))

    def again() -> bool:
        history = live_training.find("configmaps", "demo-history")
        return history is not None and history["metadata"]["uid"] != before["metadata"]["uid"]

    live_training.until(again, "it is there again")
    text = base64.b64encode(os.urandom(MAX_PACKED_BYTES)).decode()
    live_training.patch(live_training.path("configmaps", "demo-history"), {"binaryData": {"history.json.gz": text}})
    live_training.report(update=3)
    live_training.until(lambda: live_training.status.get("progress", {}).get("update") == 3, "what came later was seen")
    assert live_training.get("configmaps", "demo-history")["binaryData"]["history.json.gz"] == text, (
        "nobody wrote it since"
    )
    listed = live_training.plane.api.get(
        f"{live_training.path('configmaps', None)}?labelSelector={quote(CONFIG_MAP.selector)}"
    )["items"]
    assert {listed_object["metadata"]["name"] for listed_object in listed} == {
        "demo-config",
        "demo-progress",
        "demo-control",
    }


def test_the_administrator_sees_all_namespaces(live_training: LiveTraining):
    live_training.apply()
    live_training.until_job()
    kubeconfig = live_training.plane.kubeconfig_for(f"admin-{secrets.token_hex(4)}", [ADMINISTRATORS])
    command = [QWEN35, "status", "-A", f"--kubeconfig={kubeconfig}"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE).stdout
    assert any(line.split()[:2] == [live_training.namespace, "demo"] for line in listed.splitlines())

"""`qwen35 status` and `qwen35 report` as a person runs them, on real trainings."""

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

from qwen35_operator.kube.kinds import CONFIG_MAP
from qwen35_trainer.exits import FAILED, REFUSED
from qwen35_trainer.progress.history import LIMIT, pack
from qwen35_trainer.progress.records import FinishRecord
from qwen35_trainer.progress.summary import summarise
from tests.controlplane.operator_process import grant
from tests.controlplane.story import Story
from tests.patience import PATIENCE
from tests.testbed.certificates import ADMINISTRATORS

type Command = Callable[..., subprocess.CompletedProcess[str]]

QWEN35 = str(Path(sys.executable).with_name("qwen35"))
READER = [
    {"apiGroups": ["rl.qwen35.io"], "resources": ["qwen35trainings"], "verbs": ["get", "list", "watch"]},
    {"apiGroups": [""], "resources": ["events"], "verbs": ["list"]},
    {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get"]},
]
"""What docs/operations.md says that the commands need."""


@pytest.fixture
def reader(story: Story) -> Path:
    """A kubeconfig of somebody who may read, in the training's namespace alone."""
    name = f"reader-{secrets.token_hex(4)}"
    grant(story.plane, name, READER, story.namespace)
    return story.plane.kubeconfig_for(name)


@pytest.fixture
def qwen35(story: Story, reader: Path) -> Command:
    """qwen35("status", "demo") runs the command with the reader's rights."""

    def run(*arguments: str, kubeconfig: Path = reader) -> subprocess.CompletedProcess[str]:
        command = [QWEN35, *arguments, f"--namespace={story.namespace}", f"--kubeconfig={kubeconfig}"]
        environment = {**os.environ, "COLUMNS": "80"}
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE, env=environment)

    return run


def test_a_training_shows_where_it_stands(story: Story, qwen35: Command):
    story.apply()
    for pool, nodes in (("head", 1), ("rollout", 2), ("train", 1)):
        story.until_pods(pool, nodes)
    story.report(update=7, updates=10, version=6, reward=0.5, accuracy=0.75, lagMean=0.5, lagMax=1)
    story.until_condition("Ready", "True", "Running")
    story.until(lambda: all(one["ready"] == one["desired"] for one in story.status["pools"]), "all nodes are ready")
    shown = qwen35("status", "demo")
    assert (shown.returncode, shown.stderr) == (0, "")
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
    assert json.loads(qwen35("status", "demo", "--json").stdout)["status"] == story.status
    (_, line) = qwen35("status").stdout.splitlines()
    assert line.split()[:3] == ["demo", "Running", "7/10"]


def test_it_says_what_it_waits_for(story: Story, qwen35: Command):
    story.apply(labels={"kueue.x-k8s.io/queue-name": "rl"})
    story.until_job()
    story.hold_in_queue(suspended=True)
    story.until_condition("QuotaReserved", "False", "QuotaPending")
    assert "QuotaReserved: the queue has not let it in yet (QuotaPending" in qwen35("status", "demo").stdout


def test_a_failure_is_shown_and_is_the_exit_code_of_a_watch(story: Story, qwen35: Command):
    story.apply(failurePolicy={"maxRestarts": 0})
    story.until_job()
    story.report("Failed", reason="DataError", message="no field answer in line 17")
    story.until_state("Failed")
    assert "no field answer in line 17" in qwen35("status", "demo").stdout
    assert qwen35("status", "demo", "--watch").returncode == FAILED


def test_a_watch_outlives_the_api_server_and_ends_with_the_training(story: Story, reader: Path):
    story.apply()
    story.until_job()
    story.report(update=1)
    story.until_state("Running")
    command = [QWEN35, "status", "demo", "--watch", f"--namespace={story.namespace}", f"--kubeconfig={reader}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watching:
        try:
            assert watching.stdout is not None
            assert "Running" in watching.stdout.readline()
            story.plane.restart_api_server()
            story.until(lambda: story.find("configmaps", "demo-progress"), "the API server answers")
            story.report("Succeeded", message="enough")
            out, _ = watching.communicate(timeout=PATIENCE)
        finally:
            watching.kill()
    assert watching.returncode == 0
    assert "Succeeded" in out.splitlines()[-1]


def test_what_cannot_be_shown_is_one_line_with_the_fix(story: Story, qwen35: Command):
    story.apply()
    story.until_job()
    near = qwen35("status", "demon")
    assert near.returncode == REFUSED
    assert near.stderr == f"no training demon in namespace {story.namespace}. Did you mean demo?\n"
    nobody = story.plane.kubeconfig_for(f"nobody-{secrets.token_hex(4)}")
    refused = qwen35("status", "demo", kubeconfig=nobody)
    assert refused.returncode == REFUSED
    assert refused.stderr.startswith(
        f"no permission to list qwen35trainings.rl.qwen35.io in namespace {story.namespace}: "
    )


def test_the_trainer_leaves_a_history_that_becomes_a_report_after_its_pods_are_gone(
    story: Story, qwen35: Command, tmp_path: Path
):
    story.apply()
    story.until_job()
    story.until(lambda: story.find("configmaps", "demo-history"), "-history exists")
    page = tmp_path / "report.html"
    assert "has left no history yet" in qwen35("report", "demo", f"--output={page}").stderr
    account = f"--as=system:serviceaccount:{story.namespace}:demo-trainer"
    records = [FinishRecord(outcome="Succeeded", message="", time=1.0)]
    packed = pack("metadata: {name: demo}\n", summarise(records, max_version_lag=3, peak_rss_mib=None), records)
    assert story.kubectl("auth", "can-i", "patch", "configmaps/demo-history", account).strip() == "yes"
    change = {"binaryData": {"history.json.gz": base64.b64encode(packed).decode()}}
    story.patch(story.path("configmaps", "demo-history"), change)
    story.report("Succeeded", message="enough")
    story.until_state("Succeeded")
    story.plane.api.request("DELETE", story.path("rayjobs", "demo-1"))
    story.until(lambda: not story.mine("pods"), "the pods are gone")
    done = qwen35("report", "demo", f"--output={page}")
    assert (done.returncode, done.stdout) == (0, f"Report: {page} (Succeeded, 0 updates)\n")
    assert "<title>demo · qwen35</title>" in page.read_text()


def test_a_history_is_made_again_is_written_by_nobody_else_and_is_not_among_what_is_watched_whole(story: Story):
    story.apply()
    story.until_job()
    story.until(lambda: story.find("configmaps", "demo-history"), "-history exists")
    before = story.get("configmaps", "demo-history")
    story.plane.api.request("DELETE", story.path("configmaps", "demo-history"))

    def again() -> bool:
        found = story.find("configmaps", "demo-history")
        return found is not None and found["metadata"]["uid"] != before["metadata"]["uid"]

    story.until(again, "it is there again")
    text = base64.b64encode(os.urandom(LIMIT)).decode()
    story.patch(story.path("configmaps", "demo-history"), {"binaryData": {"history.json.gz": text}})
    story.report(update=3)
    story.until(lambda: story.status.get("progress", {}).get("update") == 3, "what came later was seen")
    assert story.get("configmaps", "demo-history")["binaryData"]["history.json.gz"] == text, "nobody wrote it since"
    listed = story.plane.api.get(f"{story.path('configmaps', None)}?labelSelector={quote(CONFIG_MAP.selector)}")[
        "items"
    ]
    assert {one["metadata"]["name"] for one in listed} == {"demo-config", "demo-progress", "demo-control"}


def test_the_administrator_sees_all_namespaces(story: Story):
    story.apply()
    story.until_job()
    kubeconfig = story.plane.kubeconfig_for(f"admin-{secrets.token_hex(4)}", [ADMINISTRATORS])
    command = [QWEN35, "status", "-A", f"--kubeconfig={kubeconfig}"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE).stdout
    assert any(line.split()[:2] == [story.namespace, "demo"] for line in listed.splitlines())

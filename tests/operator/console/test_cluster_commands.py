"""The two commands against a server that answers, refuses, and loses its place."""

import asyncio
import base64
import io
import json
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from qwen35_operator.console import cluster_commands, follow
from qwen35_operator.console.cluster_commands import ClusterAccess, NotShown
from qwen35_operator.kube import client as client_module
from qwen35_operator.kube.client import connect
from qwen35_operator.kube.kubeconfig import IN_POD_VARIABLE
from qwen35_operator.operator_settings import SettingsRefused
from qwen35_trainer.commands import app
from qwen35_trainer.exits import FAILED, INTERRUPTED, REFUSED
from qwen35_trainer.progress.packed_history import pack
from qwen35_trainer.progress.records import FinishRecord
from qwen35_trainer.progress.summary import summarise
from tests.operator.console.example_trainings import ExampleTraining, failed, running, succeeded
from tests.operator.kube.server import (
    Server,
    bookmark,
    event,
    page,
    refuses,
    says,
    serving,
    stream,
    until,
)

PATH = "/apis/rl.qwen35.io/v1alpha1/namespaces/team/qwen35trainings"
RECORDS = [FinishRecord(outcome="Succeeded", message="", time=1.0)]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch) -> None:
    monkeypatch.setattr(follow, "FIRST_BACKOFF_SECONDS", 0.01)
    monkeypatch.setattr(follow, "MAX_BACKOFF_SECONDS", 0.02)


@dataclass
class Terminal:
    """A person, and the cluster that their kubeconfig names."""

    server: Server
    cluster: ClusterAccess
    terminal: bool = False
    out: io.StringIO = field(default_factory=io.StringIO)

    async def status(self, name: str | None = "demo", **options: bool) -> int:
        console = Console(file=self.out, width=80, force_terminal=self.terminal)
        chosen = {"everywhere": False, "watch": False, "as_json": False} | options
        return await asyncio.to_thread(lambda: cluster_commands.status(self.cluster, name, console=console, **chosen))

    async def report(self, output: Path | None) -> int:
        console = Console(file=self.out, width=80)
        return await asyncio.to_thread(lambda: cluster_commands.report(self.cluster, "demo", output, console))

    @property
    def text(self) -> str:
        return self.out.getvalue()


@pytest.fixture
async def console_user(tmp_path, monkeypatch) -> AsyncIterator[Terminal]:
    monkeypatch.delenv(IN_POD_VARIABLE, raising=False)
    async with serving(Server()) as server:
        yield Terminal(server, ClusterAccess(written(tmp_path / "kubeconfig", server.url)))


def written(file: Path, url: str) -> str:
    """A kubeconfig of two contexts, by its name."""
    contexts = {"here": "team", "there": "elsewhere"}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [
            {"name": name, "context": {"cluster": "c", "user": "u", "namespace": namespace}}
            for name, namespace in contexts.items()
        ],
    }
    file.write_text(yaml.safe_dump(config))
    return str(file)


def at(version: int, make: Callable[[], ExampleTraining] = running) -> dict:
    """The training of the scene at that version."""
    raw = dict(make().raw)
    return {**raw, "metadata": {**raw["metadata"], "resourceVersion": str(version)}}


async def test_a_training_is_shown_with_its_warnings(console_user) -> None:
    warning = {
        "metadata": {"creationTimestamp": "2026-01-01T01:00:00Z"},
        "involvedObject": {"uid": at(1)["metadata"]["uid"]},
        "reason": "AttemptFailed",
        "message": "it was late",
    }
    console_user.server.script = [page(at(1)), page(warning)]
    assert await console_user.status() == 0
    assert "412 of 1,000" in console_user.text
    assert "AttemptFailed: it was late" in console_user.text
    first, second = console_user.server.requests
    assert (first.path, first.query["fieldSelector"]) == (PATH, "metadata.name=demo")
    assert first.headers["Authorization"] == "Bearer t"
    assert second.query["fieldSelector"].split(",")[1:] == ["involvedObject.name=demo", "type=Warning"]


async def test_events_that_may_not_be_read_do_not_hide_everything_else(console_user) -> None:
    console_user.server.script = [page(at(1)), refuses(403)]
    assert await console_user.status() == 0
    assert "no permission to list events" in console_user.text


async def test_json_is_the_status_under_its_own_names(console_user) -> None:
    console_user.server.script = [page(at(1)), page()]
    await console_user.status(as_json=True)
    shown = json.loads(console_user.text)
    assert shown["metadata"]["name"] == "demo"
    assert shown["status"] == at(1)["status"]
    assert shown["warnings"] == []


async def test_without_a_name_there_is_a_line_for_each(console_user) -> None:
    named = [{**at(1), "metadata": {**at(1)["metadata"], "name": name}} for name in ("b" * 40, "a")]
    console_user.server.script = [page(*named)]
    assert await console_user.status(None) == 0
    lines = console_user.text.splitlines()
    assert [line.split()[0] for line in lines] == ["NAME", "a", "b" * 40]
    assert console_user.server.requests[0].path == PATH


async def test_all_namespaces_are_requested_together(console_user) -> None:
    console_user.server.script = [page(at(1))]
    await console_user.status(None, everywhere=True)
    assert console_user.text.split()[:2] == ["NAMESPACE", "NAME"]
    assert console_user.server.requests[0].path == "/apis/rl.qwen35.io/v1alpha1/qwen35trainings"


async def test_a_list_of_none_says_where_none_are(console_user) -> None:
    console_user.server.script = [page()]
    assert await console_user.status(None) == 0
    assert console_user.text == "no trainings in namespace team\n"


@pytest.mark.parametrize(("namespace", "context", "expected"), [(None, "there", "elsewhere"), ("x", None, "x")])
async def test_the_namespace_is_the_one_named_or_the_contexts(console_user, namespace, context, expected) -> None:
    console_user.cluster = ClusterAccess(console_user.cluster.kubeconfig, context, namespace)
    console_user.server.script = [page()]
    await console_user.status(None)
    assert f"/namespaces/{expected}/" in console_user.server.requests[0].path


# Refusals: one line, with the fix.


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            [page(), page(at(1), {"metadata": {"name": "dome"}})],
            "no training demon in namespace team. Did you mean demo",
        ),
        ([page(), page({"metadata": {"name": "x"}})], "There are 1: x. Name another namespace with -n"),
        ([page(), page()], "list all with: qwen35 status -A"),
        ([says("404 page not found", 404)], "the cluster has no kind qwen35trainings.rl.qwen35.io. Install"),
        (
            [refuses(403, "u cannot list")],
            "no permission to list qwen35trainings.rl.qwen35.io in namespace team: u cannot list. Ask for a role",
        ),
        ([refuses(401, "Unauthorized")], "does not accept your credentials: Unauthorized. Log in again"),
        ([refuses(400, "odd")], "cannot list qwen35trainings.rl.qwen35.io in namespace team: odd. Is the cluster up?"),
    ],
)
async def test_a_refusal_is_one_line_with_the_fix(console_user, script, message) -> None:
    console_user.server.script = script
    with pytest.raises(NotShown) as caught:
        await console_user.status("demon")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


async def test_a_server_that_is_not_there_is_named(console_user, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(client_module, "REQUEST_TIMEOUT_SECONDS", 0.5)
    console_user.cluster = ClusterAccess(written(tmp_path / "other", "http://127.0.0.1:9"))
    with pytest.raises(NotShown, match=r"Cannot connect|no answer within .* Is the cluster up\?"):
        await console_user.status()


@pytest.mark.parametrize("in_pod", [False, True])
async def test_without_a_kubeconfig_it_says_where_it_looked(console_user, tmp_path, monkeypatch, in_pod) -> None:
    if in_pod:
        monkeypatch.setenv(IN_POD_VARIABLE, "10.0.0.1")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nowhere"))
    console_user.cluster = ClusterAccess()
    with pytest.raises(
        NotShown,
        match=r"no kubeconfig: the file .*nowhere does not exist\. Name one with --kubeconfig, or set KUBECONFIG",
    ):
        await console_user.status()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is empty"),
        (b"{", "it is not valid YAML"),
        (b"\xff\xfe\x00", "it is not valid YAML"),
        (b"[" * 3000, "it is not valid YAML"),
        (b"- a\n", "it holds no fields"),
        (b"7\n", "it holds no fields"),
        (b"contexts: 7\n", "contexts is not a list of entries with names"),
        (b"clusters: [a]\n", "clusters is not a list of entries with names"),
        (b"users: [{name: me}]\n", "'me' of users has no field user"),
    ],
)
async def test_an_invalid_kubeconfig_is_named_with_the_reason(console_user, tmp_path, content, message) -> None:
    file = tmp_path / "broken"
    file.write_bytes(content)
    console_user.cluster = ClusterAccess(str(file))
    with pytest.raises(NotShown, match=rf"^{re.escape(str(file))} is not a valid kubeconfig: {message}"):
        await console_user.status()
    with pytest.raises(SettingsRefused, match=rf"no credentials for the API server: .*{message}"):
        await connect(str(file), lambda verb, resource, code: None)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [(None, {"watch": True}, "--watch follows one training"), ("demo", {"everywhere": True}, "Leave out -A, or demo")],
)
async def test_options_that_contradict_each_other_are_refused(console_user, name, options, message) -> None:
    with pytest.raises(NotShown, match=message):
        await console_user.status(name, **options)
    assert console_user.server.requests == []


# --watch


async def test_a_training_is_followed_to_its_success_by_a_line_per_change(console_user) -> None:
    events = [bookmark(3), event("MODIFIED", at(4)), event("MODIFIED", at(5, succeeded))]
    console_user.server.script = [page(at(1), version=2), stream(*events, stays=True)]
    assert await console_user.status(watch=True) == 0
    lines = console_user.text.splitlines()
    assert [line.split()[1] for line in lines] == ["Running", "Succeeded"], "an update without a change prints no line"
    query = console_user.server.requests[1].query
    assert (query["watch"], query["resourceVersion"], query["fieldSelector"]) == ("true", "2", "metadata.name=demo")


async def test_a_failure_is_the_exit_code(console_user) -> None:
    console_user.server.script = [page(at(1), version=2), stream(event("MODIFIED", at(5, failed)))]
    assert await console_user.status(watch=True) == FAILED


@pytest.mark.parametrize(("make", "code"), [(succeeded, 0), (failed, FAILED)])
async def test_what_is_over_is_not_waited_for(console_user, make, code) -> None:
    console_user.server.script = [page(at(1, make))]
    assert await console_user.status(watch=True) == code


async def test_a_deletion_ends_it(console_user) -> None:
    console_user.server.script = [page(at(1), version=2), stream(event("DELETED", at(5)))]
    assert await console_user.status(watch=True) == FAILED
    assert console_user.text.endswith("training demo was deleted\n")


async def test_a_lost_place_is_found_by_a_new_list(console_user) -> None:
    gone = event("ERROR", {"kind": "Status", "code": 410, "message": "too old"})
    console_user.server.script = [
        page(at(1), version=2), stream(gone), page(at(7), version=8), refuses(410), page(at(9), version=9),
        stream(event("MODIFIED", at(10, succeeded))),
    ]  # fmt: skip
    assert await console_user.status(watch=True) == 0
    versions = [request.query.get("resourceVersion") for request in console_user.server.requests]
    assert versions == [None, "2", None, "8", None, "9"]


async def test_a_training_that_was_created_again_under_its_name_is_another(console_user) -> None:
    other = at(9)
    other["metadata"]["uid"] = "another"
    console_user.server.script = [page(at(1), version=2), refuses(410), page(other, version=9)]
    assert await console_user.status(watch=True) == FAILED
    assert "was deleted" in console_user.text


async def test_cuts_and_outages_are_survived(console_user, capsys) -> None:
    console_user.server.script = [
        page(at(1), version=2), stream(event("MODIFIED", at(4)), last=b'{"type": "MOD'), refuses(500, "away"),
        page(at(4), version=6), stream(bookmark(7), cut=True), page(at(4), version=8),
        stream(event("MODIFIED", at(10, succeeded))),
    ]  # fmt: skip
    assert await console_user.status(watch=True) == 0
    versions = [request.query.get("resourceVersion") for request in console_user.server.requests]
    assert versions == [None, "2", "4", None, "6", None, "8"]
    assert "The API server does not answer: away. Trying again" in capsys.readouterr().err


async def test_an_api_server_that_has_just_started_refuses_for_a_while(console_user) -> None:
    console_user.server.script = [
        page(at(1), version=2), refuses(403, "RBAC is not ready"), says("404 page not found", 404),
        page(at(1), version=3), stream(event("MODIFIED", at(5, succeeded))),
    ]  # fmt: skip
    assert await console_user.status(watch=True) == 0


async def test_a_permission_that_is_taken_away_ends_it_with_the_reason(console_user) -> None:
    console_user.server.script = [
        page(at(1), version=2),
        *(refuses(403, "no more") for _ in range(follow.MAX_REFUSALS)),
    ]
    with pytest.raises(
        NotShown, match=r"no permission to watch qwen35trainings.rl.qwen35.io in namespace team: no more"
    ):
        await console_user.status(watch=True)


async def test_json_is_an_object_per_change(console_user) -> None:
    console_user.server.script = [page(at(1), version=2), stream(event("MODIFIED", at(5, succeeded)))]
    assert await console_user.status(watch=True, as_json=True) == 0
    states = [json.loads(line)["status"]["state"] for line in console_user.text.splitlines()]
    assert states == ["Running", "Succeeded"]


async def test_on_a_terminal_the_screen_is_redrawn(console_user) -> None:
    console_user.terminal = True
    console_user.server.script = [
        page(at(1), version=2), page(), refuses(500, "away"), page(at(1), version=3), page(),
        stream(event("MODIFIED", at(5, succeeded))), refuses(400, "no events"),
    ]  # fmt: skip
    assert await console_user.status(watch=True) == 0
    assert "412 of 1,000" in console_user.text
    assert "1,000 of 1,000" in console_user.text
    assert "The API server does not answer: away" in console_user.text
    last = console_user.text[console_user.text.rindex("1,000 of 1,000") :]
    assert "cannot list events in namespace team: no events" in last
    assert "away" not in last, "that is over"


def heed_ctrl_c() -> None:
    """What a shell starts in the background, this suite perhaps, ignores the signal, and so do its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.processes
async def test_ctrl_c_ends_it_without_a_word(console_user) -> None:
    console_user.server.script = [page(at(1), version=2)]
    command = (
        "-m",
        "qwen35_trainer.cli",
        "status",
        "demo",
        "--watch",
        f"--kubeconfig={console_user.cluster.kubeconfig}",
    )
    watching = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, preexec_fn=heed_ctrl_c
    )
    await until(lambda: len(console_user.server.requests) >= 2, "a watch")
    watching.send_signal(signal.SIGINT)
    out, error = await watching.communicate()
    assert (watching.returncode, error) == (INTERRUPTED, b"")
    assert b"Running update=412/1000" in out


def test_the_command_ends_with_the_code_of_a_refusal(tmp_path) -> None:
    for command in ("status", "report"):
        done = CliRunner().invoke(app, [command, "demo", f"--kubeconfig={tmp_path / 'nowhere'}"])
        assert done.exit_code == REFUSED
        assert done.stderr.startswith("no kubeconfig: ")


# report


def history(**changes: object) -> dict:
    summary = summarise(RECORDS, max_version_lag=None, peak_rss_mib=None)
    packed = pack("metadata: {name: demo}\nspec: {mode: SFT}\n", summary, RECORDS)
    return {"metadata": {}, "binaryData": {"history.json.gz": base64.b64encode(packed).decode()}} | changes


async def test_the_report_is_made_of_what_the_trainer_has_left(console_user, tmp_path) -> None:
    console_user.server.script = [says(history())]
    assert await console_user.report(tmp_path / "out.html") == 0
    assert console_user.server.requests[0].path == "/api/v1/namespaces/team/configmaps/demo-history"
    text = (tmp_path / "out.html").read_text()
    assert "<title>demo · qwen35</title>" in text
    assert console_user.text == f"Report: {tmp_path / 'out.html'} (Succeeded, 0 updates)\n"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ([refuses(404), page(at(1))], "training demo has no ConfigMap demo-history: no attempt has started yet"),
        (
            [refuses(404), page(), page({"metadata": {"name": "demo-2"}})],
            "no training demo in namespace team. Did you mean",
        ),
        (
            [says(history(binaryData=None))],
            "has no history yet: the trainer writes it with the first evaluation or checkpoint",
        ),
        ([says(history(binaryData={"history.json.gz": "aGVsbG8="}))], "cannot be read: not gzip"),
        ([says(history(binaryData={"history.json.gz": "?"}))], "ConfigMap demo-history, history.json.gz:"),
        ([refuses(403, "u cannot get")], "no permission to get configmaps in namespace team: u cannot get"),
    ],
)
async def test_a_report_that_cannot_be_made_says_why(console_user, tmp_path, script, message) -> None:
    console_user.server.script = script
    with pytest.raises(NotShown) as caught:
        await console_user.report(tmp_path / "out.html")
    assert message in str(caught.value)
    assert not (tmp_path / "out.html").exists()


async def test_a_report_that_cannot_be_written_names_the_file(console_user, tmp_path) -> None:
    console_user.server.script = [says(history())]
    with pytest.raises(NotShown, match=r"--output .*nowhere/out.html was not written: No such file or directory"):
        await console_user.report(tmp_path / "nowhere" / "out.html")

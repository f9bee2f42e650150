"""Requests: repeated where that is safe, ended in time, refused with the right error; and what time it is."""

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.config import ConfigException

from qwen35_operator.kube import client as module
from qwen35_operator.kube.api_errors import (
    ApiError,
    Conflict,
    Forbidden,
    Gone,
    Invalid,
    NotFound,
    Unauthorized,
    Unavailable,
)
from qwen35_operator.kube.client import JSON_PATCH, MERGE_PATCH, Client, RestClient, connect
from tests.operator.kube import virtual
from tests.operator.kube.server import Server, refuses, says, serving, silent, stream, until
from tests.testbed.processes import free_ports

PODS = "/api/v1/namespaces/team/pods"


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving(Server()) as server:
        yield server


@pytest.fixture
async def client(server) -> AsyncIterator[RestClient]:
    client = server.client()
    yield client
    await client.close()


ERRORS = [
    (400, Invalid),
    (401, Unauthorized),
    (403, Forbidden),
    (404, NotFound),
    (409, Conflict),
    (410, Gone),
    (418, ApiError),
    (422, Invalid),
    (429, Unavailable),
    (500, Unavailable),
    (504, Unavailable),
]


@pytest.mark.parametrize(("status", "kind"), ERRORS)
async def test_a_refusal_has_the_servers_words(server, client, status, kind) -> None:
    server.script = [refuses(status, "because", causes=[{"field": "spec"}])]
    with pytest.raises(ApiError) as caught:
        await client.post(PODS, {})
    assert type(caught.value) is kind
    assert (caught.value.status, caught.value.message) == (status, "because")
    assert caught.value.details == {"causes": [{"field": "spec"}]}


async def test_a_refusal_that_is_not_json_is_quoted(server, client) -> None:
    server.script = [says("<html>bad gateway</html>", 502), says("[1]", 502)]
    for answer in ("bad gateway", "[1]"):
        with pytest.raises(Unavailable, match="502") as caught:
            await client.post(PODS, {})
        assert answer in caught.value.message


async def test_a_read_is_repeated_until_it_succeeds(server, client) -> None:
    server.script = [refuses(503), refuses(429), says({"kind": "Pod"})]
    assert await client.get(PODS) == {"kind": "Pod"}
    assert len(server.requests) == 3


async def test_a_read_is_repeated_when_the_api_server_says(server, client) -> None:
    server.script = [says({"message": "busy"}, 429, **{"Retry-After": "1"}), says({"kind": "Pod"})]
    began = asyncio.get_running_loop().time()
    assert await client.get(PODS) == {"kind": "Pod"}
    assert asyncio.get_running_loop().time() - began >= 1


async def test_a_read_that_may_be_repeated_only_after_its_deadline_fails_with_the_servers_words(server, client) -> None:
    server.script = [says({"message": "busy"}, 429, **{"Retry-After": "15"})]
    with pytest.raises(Unavailable, match="429: busy") as caught:
        await client.get(PODS)
    assert caught.value.retry_after == 15


@pytest.mark.parametrize(("header", "seconds"), [("7", 7), ("9999", 60), ("soon", 0), ("-1", 0), ("", 0)])
async def test_how_long_to_wait_before_the_next_request_is_in_the_error(server, client, header, seconds) -> None:
    server.script = [says({"message": "busy"}, 429, **{"Retry-After": header})]
    with pytest.raises(Unavailable) as caught:
        await client.post(PODS, {})
    assert caught.value.retry_after == seconds


async def test_a_read_that_is_refused_for_good_is_not_repeated(server, client) -> None:
    server.script = [refuses(403)]
    with pytest.raises(Forbidden):
        await client.get(PODS)
    assert len(server.requests) == 1


@pytest.mark.parametrize("verb", ["POST", "PUT", "PATCH", "DELETE"])
async def test_a_write_is_not_repeated(server, client, verb) -> None:
    calls = {
        "POST": lambda: client.post(PODS, {"a": 1}),
        "PUT": lambda: client.put(PODS, {"a": 1}),
        "PATCH": lambda: client.patch(PODS, {"a": 1}, MERGE_PATCH),
        "DELETE": lambda: client.delete(PODS, {"a": 1}),
    }
    server.script = [refuses(503, "not now")]
    with pytest.raises(Unavailable, match="not now"):
        await calls[verb]()
    assert [request.method for request in server.requests] == [verb]
    assert json.loads(server.bodies[0]) == {"a": 1}


async def test_what_is_asked_for_and_how(server, client) -> None:
    server.script = [says({}), says({}), says({})]
    await client.get(PODS, {"labelSelector": "a=b,c", "limit": 5}, accept="application/other")
    await client.patch(PODS, [{"op": "test"}], JSON_PATCH)
    await client.post(PODS, {}, {"fieldValidation": "Strict"})
    read, patch, post = server.requests
    assert dict(read.query) == {"labelSelector": "a=b,c", "limit": "5"}
    assert read.headers["Accept"] == "application/other"
    assert patch.headers["Content-Type"] == JSON_PATCH
    assert dict(post.query) == {"fieldValidation": "Strict"}
    assert post.headers["User-Agent"] == "qwen35-operator"


@pytest.mark.parametrize("verb", ["GET", "POST"])
async def test_no_request_outlasts_its_deadline(server, client, verb, monkeypatch) -> None:
    monkeypatch.setattr(module, "REQUEST_TIMEOUT_SECONDS", 2.0)  # time enough to connect on a busy machine
    server.script = [silent(3600)]
    with pytest.raises(Unavailable):
        await (client.get(PODS) if verb == "GET" else client.post(PODS, {}))
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("deadline", "requests", "end", "message"),
    [(15.0, [0.0, 0.1, 0.6, 2.6], 2.6, "not now"), (0.4, [0.0, 0.1], 0.4, "no answer within 0.4 s")],
    ids=["there is time for all of them", "they end with the deadline"],
)
def test_repetitions_come_at_growing_intervals_and_end_with_the_deadline(
    monkeypatch, deadline, requests, end, message
) -> None:
    monkeypatch.setattr(module, "REQUEST_TIMEOUT_SECONDS", deadline)
    times: list[float] = []

    async def scenario() -> float:
        loop, client = asyncio.get_running_loop(), RestClient(Configuration())

        async def refused(*_: object) -> dict:
            times.append(loop.time())
            raise Unavailable(503, "not now")

        monkeypatch.setattr(client, "_once", refused)
        with pytest.raises(Unavailable, match=message):
            await client.get(PODS)
        ended = loop.time()
        await client.close()
        return ended

    assert virtual.run(scenario()) == pytest.approx(end, abs=1e-3)
    assert times == pytest.approx(requests, abs=1e-3)


async def test_nobody_there_is_unavailable(server, client) -> None:
    server.url = f"http://127.0.0.1:{free_ports(1)[0]}"
    absent = server.client()
    with pytest.raises(Unavailable, match="POST"):
        await absent.post(PODS, {})
    await absent.close()


async def test_an_answer_that_is_not_json_is_unavailable(server, client) -> None:
    server.script = [says("<html>")]
    with pytest.raises(Unavailable, match="not JSON"):
        await client.post(PODS, {})


async def test_what_is_nested_too_deeply_for_python_does_not_hide_the_rest(server, client) -> None:
    deep = '{"a":' * 9_900 + "1" + "}" * 9_900
    server.script = [says(f'{{"items": [{deep}, 5]}}')]
    assert (await client.get(PODS))["items"][1] == 5


async def test_every_answer_is_counted_by_resource(server) -> None:
    seen: list[tuple[str, str, int]] = []
    client = server.client(observer=lambda *what: seen.append(what))
    server.script = [says({}), refuses(404), says({}), says({}), says({})]
    await client.get(f"{PODS}/a")
    with pytest.raises(NotFound):
        await client.get("/apis/ray.io/v1/rayjobs")
    await client.patch("/apis/rl.qwen35.io/v1alpha1/namespaces/team/qwen35trainings/demo/status", [], JSON_PATCH)
    await client.get("/api/v1/namespaces/team")
    await client.get("/version")
    await client.close()
    assert seen == [
        ("GET", "pods", 200),
        ("GET", "rayjobs", 404),
        ("PATCH", "qwen35trainings/status", 200),
        ("GET", "namespaces", 200),
        ("GET", "/version", 200),
    ]


@pytest.fixture
def noon(monkeypatch) -> datetime:
    """This machine's time, for the client: it stands still, so that differences are exact."""
    instant = datetime(2026, 5, 4, 12, 0, 0, tzinfo=UTC)

    class Standing(datetime):
        @classmethod
        def now(cls, tz=None) -> datetime:
            return instant.astimezone(tz)

    monkeypatch.setattr(module, "datetime", Standing)
    return instant


@pytest.mark.parametrize(
    ("difference", "counts"),
    [
        (timedelta(hours=-5), True),
        (timedelta(hours=3), True),
        (timedelta(seconds=-2), True),
        (timedelta(seconds=1), False),
        (timedelta(seconds=-1), False),
        (timedelta(0), False),
    ],
    ids=str,
)
async def test_the_servers_time_counts_unless_the_difference_is_small(server, client, noon, difference, counts) -> None:
    server.script = [says({}, Date=format_datetime(noon + difference, usegmt=True))]
    await client.get(PODS)
    assert client.now() - noon == (difference if counts else timedelta(0))


@pytest.mark.parametrize("date", ["yesterday", "", "Thu, 01 Jan 2026 00:00:00 -0000"])
async def test_a_date_that_is_none_changes_nothing(server, client, noon, date) -> None:
    ahead = noon + timedelta(hours=1)
    server.script = [says({}, Date=format_datetime(ahead, usegmt=True)), says({}, Date=date)]
    await client.get(PODS)
    await client.get(PODS)
    assert client.now() == ahead


async def _read(client: RestClient) -> list[bytes]:
    async with client.lines(PODS, {"watch": "true"}, accept="application/json") as lines:
        return [line async for line in lines]


async def test_a_watch_gives_whole_lines_however_long(server, client) -> None:
    long = "x" * 5_000_000
    server.script = [stream(long, {"a": 1}, last=b"{half")]
    first, second = await _read(client)
    assert json.loads(first) == long
    assert json.loads(second) == {"a": 1}


async def test_a_watch_that_is_refused_raises(server, client) -> None:
    server.script = [refuses(410, "too old")]
    with pytest.raises(Gone, match="too old"):
        await _read(client)


async def test_a_watch_that_is_cut_is_unavailable(server, client) -> None:
    server.script = [stream({"a": 1}, cut=True)]
    with pytest.raises(Unavailable):
        await _read(client)


async def test_a_watch_that_is_silent_ends(server, client, monkeypatch) -> None:
    monkeypatch.setattr(module, "READ_IDLE_SECONDS", 1.0)  # time enough to read the event on a busy machine
    server.script = [stream({"a": 1}, stays=True)]
    assert len(await _read(client)) == 1


async def test_credentials_come_from_the_kubeconfig(server, tmp_path: Path) -> None:
    config = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "this", "user": "me"}}],
        "clusters": [{"name": "this", "cluster": {"server": server.url}}],
        "users": [{"name": "me", "user": {"token": "sesame"}}],
    }
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps(config))
    client: Client = await connect(str(path), lambda *_: None)
    server.script = [says({})]
    await client.get(PODS)
    await client.close()
    assert server.requests[0].headers["Authorization"] == "Bearer sesame"


@pytest.mark.parametrize(
    ("expires", "tokens"), [("2001-01-01T00:00:00Z", ["t2", "t3"]), ("2999-01-01T00:00:00Z", ["t1", "t1"])]
)
async def test_a_token_of_a_plugin_is_renewed_when_it_has_expired(server, tmp_path: Path, expires, tokens) -> None:
    """Those of clouds live for 15 to 60 minutes, and `qwen35 status --watch` for days."""
    calls = tmp_path / "calls"
    credential = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "kind": "ExecCredential",
        "status": {"token": "TOKEN", "expirationTimestamp": expires},
    }
    script = f"echo >> {calls}; printf '%s' '{json.dumps(credential)}' | sed s/TOKEN/t$(wc -l < {calls} | tr -d ' ')/"
    plugin = {
        "apiVersion": credential["apiVersion"],
        "command": "sh",
        "args": ["-c", script],
        "interactiveMode": "Never",
    }
    config = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "this", "user": "me"}}],
        "clusters": [{"name": "this", "cluster": {"server": server.url}}],
        "users": [{"name": "me", "user": {"exec": plugin}}],
    }
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps(config))
    client: Client = await connect(str(path), lambda *_: None)
    server.script = [says({}), says({})]
    await client.get(PODS)
    await client.get(PODS)
    await client.close()
    assert [request.headers["Authorization"] for request in server.requests] == [f"Bearer {token}" for token in tokens]


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), ConfigException("Token file exists but empty.")])
async def test_credentials_that_cannot_be_read_for_a_moment_are_read_again(server, error) -> None:
    failures = [error] * 2

    def read_token(_: Configuration) -> None:
        if failures:
            raise failures.pop()

    configuration = Configuration()
    configuration.host, configuration.api_key = server.url, {"BearerToken": "Bearer sesame"}
    configuration.refresh_api_key_hook = read_token
    client = RestClient(configuration)
    server.script = [says({"kind": "Pod"})]
    with pytest.raises(Unavailable, match=str(error.args[-1])):
        await client.post(PODS, {})
    assert await client.get(PODS) == {"kind": "Pod"}
    assert server.requests[0].headers["Authorization"] == "Bearer sesame"
    await client.close()


async def test_a_request_that_is_called_off_leaves_the_client_usable(server, client) -> None:
    server.script = [silent(3600), says({"kind": "Pod"})]
    asking = asyncio.create_task(client.get(PODS))
    await until(lambda: server.requests, "the request")
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert await client.get(PODS) == {"kind": "Pod"}


async def test_requests_go_through_the_environments_proxy(server, monkeypatch) -> None:
    monkeypatch.setenv("http_proxy", server.url)
    configuration = Configuration()
    configuration.host = "http://cluster.invalid"
    client = RestClient(configuration)
    server.script = [says({"kind": "Pod"})]
    assert await client.get(PODS) == {"kind": "Pod"}
    assert server.requests[0].host == "cluster.invalid"
    await client.close()


async def test_no_proxy_keeps_requests_from_it(server, monkeypatch) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy.invalid")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    client = server.client()
    server.script = [says({"kind": "Pod"})]
    assert await client.get(PODS) == {"kind": "Pod"}
    await client.close()

"""kopf itself, against a server that has one kind: what it tells of trainings, and what becomes of it when it ends."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import kopf
import pytest
from aiohttp import web

from qwen35_operator import handlers as module
from qwen35_operator.api.v1alpha1 import GROUP, KIND, PLURAL, VERSION
from qwen35_operator.kube.trainings import Trainings
from qwen35_operator.settings import Settings
from tests.operator.kube.server import Server, serving, until

ROOT = f"/apis/{GROUP}/{VERSION}"
KEY = ("team", "demo")


class Trained(Server):
    """Discovery, the list and the watch of trainings. Everything else is as it is where nothing is installed."""

    def __init__(self) -> None:
        super().__init__()
        self.installed = True
        self.allowed = True
        self.listed: list[dict] = []
        self.events: asyncio.Queue[dict | None] = asyncio.Queue()
        self.lists = 0
        self.methods: set[str] = set()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.methods.add(request.method)
        discovery = self._discovery()
        if request.path in discovery:
            return web.json_response(discovery[request.path])
        if not request.path.endswith(PLURAL):
            return web.json_response({"code": 404, "message": "not found"}, status=404)
        if not self.allowed:
            return web.json_response({"kind": "Status", "code": 403, "message": "no"}, status=403)
        if "watch" not in request.query:
            self.lists += 1
            return web.json_response({"metadata": {"resourceVersion": "10"}, "items": self.listed})
        return await self._watch(request)

    def _discovery(self) -> dict[str, dict]:
        """kopf waits for namespaces and definitions to be known kinds, whether it looks for any or not."""
        groups = {"apiextensions.k8s.io": "v1", **({GROUP: VERSION} if self.installed else {})}
        versions = {
            group: {"groupVersion": f"{group}/{version}", "version": version} for group, version in groups.items()
        }
        return {
            "/api": {"versions": ["v1"]},
            "/api/v1": _kinds(namespaces="Namespace", events="Event"),
            "/apis": {
                "groups": [{"name": group, "versions": [v], "preferredVersion": v} for group, v in versions.items()]
            },
            "/apis/apiextensions.k8s.io/v1": _kinds(customresourcedefinitions="CustomResourceDefinition"),
            ROOT: _kinds(**({PLURAL: KIND} if self.installed else {})),
        }

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while (event := await self.events.get()) is not None:
            await response.write(json.dumps(event).encode() + b"\n")
        return response


def _kinds(**kinds: str) -> dict:
    same = {"singularName": "", "namespaced": True, "verbs": ["list", "watch", "patch"]}
    return {"resources": [{"name": plural, "kind": kind, **same} for plural, kind in kinds.items()]}


def body(version: int, *, uid: str = "u1", **more) -> dict:
    about = {"namespace": "team", "name": "demo", "uid": uid, "resourceVersion": str(version)}
    return {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "metadata": about, **more}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch) -> None:
    settings = module.settings

    def impatient() -> kopf.OperatorSettings:
        chosen = settings()
        chosen.networking.error_backoffs = (0.01,)
        return chosen

    monkeypatch.setattr(module, "AGAIN", 0.1)
    monkeypatch.setattr(module, "settings", impatient)


@pytest.fixture
async def server() -> AsyncIterator[Trained]:
    async with serving(Trained()) as server:
        yield server


class Seen:
    """What the operator knows of trainings, and whom it was told of."""

    def __init__(self) -> None:
        self.trainings = Trainings()
        self.told: list[tuple[str, str]] = []

    @property
    def version(self) -> str | None:
        found = self.trainings.get(KEY)
        return None if found is None else found["metadata"]["resourceVersion"]


@asynccontextmanager
async def following(server: Trained, monkeypatch, tmp_path: Path) -> AsyncIterator[Seen]:
    config = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "this", "user": "me"}}],
        "clusters": [{"name": "this", "cluster": {"server": server.url}}],
        "users": [{"name": "me", "user": {"token": "sesame"}}],
    }
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(path))
    seen, client = Seen(), server.client()
    task = asyncio.create_task(module.follow(Settings(), str(path), client, seen.trainings, seen.told.append))
    try:
        yield seen
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.wait({task})
        await client.close()


async def test_what_is_listed_and_what_happens_becomes_bodies_and_work(server, monkeypatch, tmp_path) -> None:
    server.listed = [body(5)]
    async with following(server, monkeypatch, tmp_path) as seen:
        await until(lambda: seen.version == "5", "the listed one")
        server.events.put_nowait({"type": "MODIFIED", "object": body(11, spec={"suspend": True})})
        await until(lambda: seen.version == "11", "the changed one")
        assert seen.trainings.get(KEY)["spec"] == {"suspend": True}
        assert seen.told == [KEY, KEY]
        server.events.put_nowait({"type": "DELETED", "object": body(12)})
        await until(lambda: seen.version is None, "the end of it")
        assert seen.told == [KEY, KEY]  # its children go with it: there is nothing to do
        server.events.put_nowait({"type": "ADDED", "object": body(13, uid="u2")})
        await until(lambda: seen.version == "13", "another of its name")


async def test_nothing_of_kopfs_own_is_written(server, monkeypatch, tmp_path) -> None:
    server.listed = [body(5)]
    async with following(server, monkeypatch, tmp_path) as seen:
        await until(lambda: seen.version == "5", "the listed one")
        server.events.put_nowait({"type": "MODIFIED", "object": body(11)})
        await until(lambda: seen.version == "11", "the changed one")
        await asyncio.sleep(0.2)
    assert server.methods == {"GET"}


async def test_without_the_definition_it_says_so_once_and_begins_when_it_is_there(
    server, monkeypatch, tmp_path, caplog
) -> None:
    server.installed = False
    server.listed = [body(5)]
    async with following(server, monkeypatch, tmp_path) as seen:
        await until(lambda: "qwen35 crd" in caplog.text, "advice")
        await asyncio.sleep(0.3)
        assert caplog.text.count("there is no kind") == 1
        assert server.lists == 0
        server.installed = True
        await until(lambda: seen.version == "5", "the listed one")


async def test_when_kopf_may_not_list_it_begins_anew_until_it_may(server, monkeypatch, tmp_path, caplog) -> None:
    server.allowed = False
    server.listed = [body(5)]
    async with following(server, monkeypatch, tmp_path) as seen:
        await until(lambda: f"events of {PLURAL}" in caplog.text, "a warning")
        server.allowed = True
        await until(lambda: seen.version == "5", "the listed one")


async def test_its_thread_ends_with_it(server, monkeypatch, tmp_path) -> None:
    server.listed = [body(5)]
    async with following(server, monkeypatch, tmp_path) as seen:
        await until(lambda: seen.version == "5", "the listed one")
        assert [thread.name for thread in threading.enumerate()].count("kopf") == 1
    await until(lambda: "kopf" not in [thread.name for thread in threading.enumerate()], "the end of the thread")

"""A small API server: one ConfigMap to patch, one to list and watch, over TLS, with a bearer token."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from qwen35_trainer.contract import Control, ProgressReport
from qwen35_trainer.runtime.link.config_maps import ConfigMapLink
from qwen35_trainer.runtime.link.operator_link import ServiceAccount
from tests.patience import PATIENCE
from tests.testbed.certificates import Authority

COLLECTION = "/api/v1/namespaces/team/configmaps"


@dataclass
class ApiServer:
    """Speaks as much of the API as the link uses, and misbehaves as the test configures."""

    token: str = "first"
    control: str | None = None
    """The key's value; None is a ConfigMap that does not exist."""
    version: int = 1
    broken: int = 0
    """The number of next calls that are answered with 500."""
    gone: int = 0
    """The number of next watches that get the answer that their version is too old."""
    patches: list[dict[str, Any]] = field(default_factory=list)
    """Of `-progress`."""
    histories: list[dict[str, Any]] = field(default_factory=list)
    """Patches of `-history`."""
    calls: list[str] = field(default_factory=list)
    watching: int = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _cut: asyncio.Event = field(default_factory=asyncio.Event)

    def reports(self) -> list[dict[str, Any]]:
        return [json.loads(patch["data"]["progress.json"]) for patch in self.patches]

    def ask(self, control: Control | str | None) -> None:
        self.control = control.text() if isinstance(control, Control) else control
        self.version += 1
        self._changed.set()

    async def until(self, condition: Callable[["ApiServer"], object]) -> None:
        """Wait until the server has come so far."""
        async with asyncio.timeout(PATIENCE):
            while not condition(self):  # noqa: ASYNC110  # nothing announces the change
                await asyncio.sleep(0.02)

    def cut(self) -> None:
        """Drop the watches in the middle of a line."""
        self._cut.set()

    def application(self) -> web.Application:
        application = web.Application()
        application.router.add_get(COLLECTION, self._get)
        application.router.add_patch(COLLECTION + "/demo-progress", self._patch)
        application.router.add_patch(COLLECTION + "/demo-history", self._patch)
        return application

    def _refusal(self, request: web.Request) -> web.Response | None:
        self.calls.append(request.method)
        if self.broken:
            self.broken -= 1
            return web.json_response({"kind": "Status", "message": "etcd is away"}, status=500)
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.json_response({"kind": "Status", "message": "Unauthorized"}, status=401)
        return None

    async def _patch(self, request: web.Request) -> web.Response:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        assert request.content_type == "application/merge-patch+json"
        (self.histories if request.path.endswith("-history") else self.patches).append(await request.json())
        return web.json_response({"kind": "ConfigMap"})

    async def _get(self, request: web.Request) -> web.StreamResponse:
        assert request.query["fieldSelector"] == "metadata.name=demo-control"
        if (refusal := self._refusal(request)) is not None:
            return refusal
        if "watch" in request.query:
            return await self._watch(request)
        items = [] if self.control is None else [self._object()]
        return web.json_response({"metadata": {"resourceVersion": str(self.version)}, "items": items})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        if self.gone:
            self.gone -= 1
            await _event(response, "ERROR", {"kind": "Status", "code": 410, "message": "too old resource version"})
            return response
        seen = int(request.query["resourceVersion"])
        self.watching += 1
        try:
            while not self._cut.is_set():
                if self.version > seen and self.control is not None:
                    seen = self.version
                    await _event(response, "MODIFIED", self._object())
                else:
                    await _event(response, "BOOKMARK", {"metadata": {"resourceVersion": str(seen)}})
                waits = [asyncio.create_task(event.wait()) for event in (self._changed, self._cut)]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for wait in waits:
                    wait.cancel()
                self._changed.clear()
            self._cut.clear()
            await response.write(b'{"type": "MODI')
            assert request.transport is not None
            request.transport.abort()
            return response
        finally:
            self.watching -= 1

    def _object(self) -> dict[str, Any]:
        return {"metadata": {"resourceVersion": str(self.version)}, "data": {"control.json": self.control}}


async def _event(response: web.StreamResponse, kind: str, item: dict[str, Any]) -> None:
    await response.write(json.dumps({"type": kind, "object": item}).encode() + b"\n")


@dataclass
class Pod:
    """Where the link runs: the API server that it has, and its mounted service account."""

    server: ApiServer
    account: Path
    url: str

    def link(self) -> ConfigMapLink:
        return ConfigMapLink(ServiceAccount(self.url, self.account), namespace="team", training="demo")


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.create(tmp_path_factory.mktemp("authority") / "ca")


@pytest.fixture
async def pod(authority: Authority, tmp_path: Path) -> AsyncIterator[Pod]:
    certificate = authority.issue("server", "server", names="IP:127.0.0.1")
    secure = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    secure.load_cert_chain(certificate.certificate, certificate.key)
    server = ApiServer()
    runner = web.AppRunner(server.application(), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=secure)
    await site.start()
    account = tmp_path / "account"
    account.mkdir()
    (account / "token").write_text("first")
    (account / "ca.crt").write_text(authority.ca.read_text())
    yield Pod(server, account, f"https://127.0.0.1:{runner.addresses[0][1]}")
    await runner.cleanup()


@pytest.fixture
def report() -> ProgressReport:
    return ProgressReport(attempt=1, state="Running", time=1.0, update=7)

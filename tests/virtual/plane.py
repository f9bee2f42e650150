"""The cluster in memory as stories see it: the interface of tests.testbed's control plane, in virtual time."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from tests.operator.kube.virtual import Loop
from tests.testbed.api import Refused
from tests.testbed.kwok import NODES, node
from tests.virtual.api_server import ApiServer, Request
from tests.virtual.clock import Clock
from tests.virtual.controllers import Controller, GarbageCollector, resource
from tests.virtual.failures import Failure
from tests.virtual.kuberay import RayClusters, RayJobs
from tests.virtual.nodes import Kubelets, Scheduler, TaintEviction
from tests.virtual.watches import Watch


class VirtualApi:
    """The API server as an administrator sees it: like tests.testbed.api.Api."""

    def __init__(self, server: ApiServer, loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._loop = loop

    def request(self, method: str, path: str, body: Any = None, *, content: str = "application/json") -> Any:
        """The answer's JSON. Raises Refused."""
        parts = urlsplit(path)
        sent = json.loads(body) if isinstance(body, bytes) else body
        request = Request(method, parts.path, dict(parse_qsl(parts.query)), sent, content)
        try:
            return json.loads(json.dumps(self._server.answer(request)))
        except Failure as failure:
            raise Refused(failure.code, failure.message) from None

    def events(self, path: str, query: str = "") -> list[dict[str, Any]]:
        """The events of a watch that ends after a second."""
        request = Request("GET", path, dict(parse_qsl(f"watch=true&timeoutSeconds=1&{query}")))

        async def read() -> list[dict[str, Any]]:
            return [json.loads(line) async for line in Watch(self._server, request).lines()]

        return self._loop.run_until_complete(read())

    def get(self, path: str) -> Any:
        return self.request("GET", path)

    def post(self, path: str, body: Any) -> Any:
        return self.request("POST", path, body)

    def exists(self, path: str) -> bool:
        try:
            self.get(path)
        except Refused as refused:
            if refused.status != 404:
                raise
            return False
        return True


class VirtualPlane:
    """An API server, the controllers that the operator's objects meet, and KubeRay, in one event loop."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.clock = Clock(self.loop)
        self.server = ApiServer(self.clock.now)
        self.api = VirtualApi(self.server, self.loop)
        self.kubelets = Kubelets(self.server)
        self.ray_jobs = RayJobs(self.server)
        self.ray_clusters = RayClusters(self.server)
        controllers: tuple[Controller, ...] = (
            GarbageCollector(self.server),
            Scheduler(self.server),
            TaintEviction(self.server),
            self.kubelets,
            self.ray_jobs,
            self.ray_clusters,
        )
        self.tasks = [self.loop.create_task(controller.run()) for controller in controllers]
        for name, devices in NODES.items():
            self.server.create(resource("nodes"), None, node(name, devices), manager="kwok")

    def now(self) -> float:
        """The cluster's time, in seconds since 1970."""
        return self.clock.now()

    def monotonic(self) -> float:
        """Seconds of a clock that measures waits."""
        return self.clock.monotonic()

    def wait(self, seconds: float) -> None:
        """Let this time pass. Raises the exception with which a part of the cluster has ended, if any."""
        self.loop.run_until_complete(asyncio.sleep(seconds))
        for task in self.tasks:
            if task.done():
                task.result()
                raise AssertionError(f"{task} has ended")

    def wait_until(self, time: float) -> None:
        """Let time pass until this second of `monotonic`, or none if it is over."""
        self.wait(max(time - self.monotonic(), 0.0))

    @contextmanager
    def kubelets_away(self) -> Iterator[None]:
        """Nobody starts pods, or confirms their end."""
        self.kubelets.paused = True
        try:
            yield
        finally:
            self.kubelets.resume()

    def stop_kuberay(self) -> None:
        """RayJobs and RayClusters stay as they are."""
        self.ray_jobs.paused = self.ray_clusters.paused = True

    def start_kuberay(self) -> None:
        self.ray_jobs.resume()
        self.ray_clusters.resume()

    def undefine(self, name: str) -> None:
        """Delete the definition of a kind, such as rayjobs.ray.io, with all of its objects."""
        self.server.undefine(name)

    def define(self, name: str) -> None:
        """Serve the kind again."""
        self.server.undefined.discard(name)

    def close(self) -> None:
        """End everything that runs in the loop."""
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()

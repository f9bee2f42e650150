"""The operator's HTTP servers: metrics for Prometheus, liveness and readiness probes for the kubelet."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from qwen35_operator.metrics import Metrics
from qwen35_trainer.manifest import Problem


@asynccontextmanager
async def serving(
    metrics: Metrics, obstacles: Callable[[], Sequence[Problem]], *, metrics_port: int, health_port: int
) -> AsyncIterator[None]:
    """Context manager: serve metrics and probes while the context is open.

    Port 0 disables a server. obstacles: returns the reasons why objects cannot be watched; the operator is ready while
    there are none. Raises OSError if a port is taken.
    """

    async def show(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def alive(_: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def ready(_: web.Request) -> web.Response:
        reasons = [f"{problem.path}: {problem.message} {problem.fix}" for problem in obstacles()]
        return web.Response(status=503, text="\n".join(reasons)) if reasons else web.Response(text="ok")

    health = web.Application()
    health.add_routes([web.get("/healthz", alive), web.get("/readyz", ready)])
    metrics_application = web.Application()
    metrics_application.add_routes([web.get("/metrics", show)])
    runners = []
    try:
        for application, port in ((metrics_application, metrics_port), (health, health_port)):
            if port:
                runner = web.AppRunner(application, access_log=None)
                runners.append(runner)
                await runner.setup()
                await web.TCPSite(runner, port=port).start()
        yield
    finally:
        for runner in runners:
            await runner.cleanup()

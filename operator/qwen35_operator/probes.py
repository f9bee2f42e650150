"""The operator's HTTP side: metrics for Prometheus, probes for the kubelet."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from qwen35_operator.metrics import Metrics


@asynccontextmanager
async def serving(
    metrics: Metrics, ready: Callable[[], bool], *, metrics_port: int, health_port: int
) -> AsyncIterator[None]:
    """Both servers, for as long as the body runs; port 0 leaves one out. Raises OSError for a port that is taken."""

    async def show(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def alive(_: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def synced(_: web.Request) -> web.Response:
        return web.Response(text="ok") if ready() else web.Response(status=503, text="watches are not synced")

    health = web.Application()
    health.add_routes([web.get("/healthz", alive), web.get("/readyz", synced)])
    numbers = web.Application()
    numbers.add_routes([web.get("/metrics", show)])
    runners = []
    try:
        for application, port in ((numbers, metrics_port), (health, health_port)):
            if port:
                runner = web.AppRunner(application, access_log=None)
                runners.append(runner)
                await runner.setup()
                await web.TCPSite(runner, port=port).start()
        yield
    finally:
        for runner in runners:
            await runner.cleanup()

"""The operator's HTTP servers: metrics for Prometheus, liveness and readiness probes for the kubelet.

The metrics may require a token and use TLS. The probes never do, because a kubelet has no token.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from qwen35_operator.metrics import Metrics
from qwen35_operator.metrics_access import METRICS_PATH, MetricsAccess
from qwen35_operator.metrics_certificate import keep_current, tls_context
from qwen35_trainer.manifest import Problem

type Obstacles = Mapping[str | None, Sequence[Problem]]
"""For each watched namespace, or for None if all are watched: the reasons why the operator cannot serve its trainings."""

SHUTDOWN_SECONDS = 1.0
"""Time for answers in progress when the operator ends. The review of a token may take longer, and is then given up."""


@asynccontextmanager
async def serving(
    metrics: Metrics,
    obstacles: Callable[[], Obstacles],
    *,
    metrics_port: int,
    health_port: int,
    access: MetricsAccess | None = None,
    certificate: Path | None = None,
) -> AsyncIterator[None]:
    """Context manager: serve metrics and probes while the context is open.

    Port 0 disables a server. obstacles: returns the problems from which `readiness` follows. access: decides who may read the metrics; None if everyone may. certificate: folder of the
    certificate of the metrics; None for HTTP without TLS. Raises OSError if a port is taken, and SettingsRefused if the
    certificate cannot be used.
    """

    async def show(request: web.Request) -> web.Response:
        if access is not None:
            answer = await access.check(request.headers.get("Authorization"))
            if answer.status != 200:
                challenge = {"WWW-Authenticate": "Bearer"} if answer.status == 401 else {}
                return web.Response(status=answer.status, text=answer.message, headers=challenge)
        return web.Response(body=generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def alive(_: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def ready(_: web.Request) -> web.Response:
        status, text = readiness(obstacles())
        return web.Response(status=status, text=text)

    health = web.Application()
    health.add_routes([web.get("/healthz", alive), web.get("/readyz", ready)])
    metrics_application = web.Application()
    metrics_application.add_routes([web.get(METRICS_PATH, show)])
    runners = []
    async with _current_context(certificate) as tls:
        try:
            for application, port, context in ((metrics_application, metrics_port, tls), (health, health_port, None)):
                if port:
                    runner = web.AppRunner(application, access_log=None, shutdown_timeout=SHUTDOWN_SECONDS)
                    runners.append(runner)
                    await runner.setup()
                    await web.TCPSite(runner, port=port, ssl_context=context).start()
            yield
        finally:
            for runner in runners:
                await runner.cleanup()


def readiness(obstacles: Obstacles) -> tuple[int, str]:
    """Return the status code and the text of the answer of `/readyz`. The text has a line for each problem.

    The operator is ready while it can serve at least one of the watched namespaces. Otherwise the administrator of one
    namespace, who may delete its RoleBinding, could stop drains of nodes and releases of the operator.
    """
    reasons = [f"{each.path}: {each.message} {each.fix}" for problems in obstacles.values() for each in problems]
    ready = any(not problems for problems in obstacles.values())
    return (200, "\n".join(["ok", *reasons])) if ready else (503, "\n".join(reasons))


@asynccontextmanager
async def _current_context(folder: Path | None) -> AsyncIterator[ssl.SSLContext | None]:
    """Context manager: yield the TLS context with the certificate in a folder, and keep it current. None: yield None."""
    if folder is None:
        yield None
        return
    context = tls_context(folder)
    task = asyncio.create_task(keep_current(context, folder))
    try:
        yield context
    finally:
        task.cancel()
        await asyncio.wait({task})

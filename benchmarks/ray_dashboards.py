"""Stands in for the dashboards of all RayClusters on this machine: every job that is submitted runs and never ends.

    KubeRay ─► API server ─► <pod address>:8265 ─► 0.0.0.0:8265, this process

It answers the two requests with which KubeRay submits a job and then reads its state every 3 s. A real Ray for each cluster
would not fit on one machine; what the requests cost KubeRay and the API server does not depend on who answers.

    python -m benchmarks.ray_dashboards
"""

from __future__ import annotations

import time

from aiohttp import web

from tests.testbed.ray_head import PORT

READY_PATH = "/stand-in"
"""Answered by this process, and by no Ray."""
STARTED = web.AppKey("started", dict[str, int])
"""When each job was submitted, in Unix milliseconds."""


def main() -> None:
    web.run_app(dashboards(), host="0.0.0.0", port=PORT, access_log=None, print=None)


def dashboards() -> web.Application:
    """Return the server. Job ids are unique across clusters."""
    app = web.Application()
    app[STARTED] = {}
    app.add_routes(
        [web.get(READY_PATH, _ready), web.get("/api/jobs/{job}", _state), web.post("/api/jobs/", _submit)],
    )
    return app


async def _ready(_: web.Request) -> web.Response:
    return web.Response(text="ready")


async def _state(request: web.Request) -> web.Response:
    job = request.match_info["job"]
    if (started := request.app[STARTED].get(job)) is None:
        return web.Response(status=404, text=f"Job {job} does not exist")
    message = "Job is currently running."
    return web.json_response(
        {"type": "SUBMISSION", "submission_id": job, "status": "RUNNING", "message": message, "start_time": started}
    )


async def _submit(request: web.Request) -> web.Response:
    job = (await request.json())["submission_id"]
    request.app[STARTED].setdefault(job, round(1000 * time.time()))
    return web.json_response({"job_id": job, "submission_id": job})


if __name__ == "__main__":
    main()

"""Ray's jobs in memory: each is the scripted trainer of tests/controlplane, in virtual time, with its account's rights."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from tests.controlplane.scripted_trainer import Trainer, name_of, scripts_of
from tests.virtual.api_server import ApiServer, Request
from tests.virtual.controllers import resource
from tests.virtual.kuberay import JobInfo
from tests.virtual.rights import Rights
from tests.virtual.stored_objects import Change

STOPPED = 143
"""Exit code of a trainer that a SIGTERM has ended."""


class AccountRequests:
    """Requests of a training's ServiceAccount, which may do what its Role says."""

    def __init__(self, server: ApiServer, namespace: str, account: str) -> None:
        self._server = server
        self._namespace = namespace
        self._account = account

    def request(self, method: str, path: str, body: Any = None) -> Any:
        role = self._server.stored(resource("roles"), self._namespace, self._account)
        user = f"system:serviceaccount:{self._namespace}:{self._account}"
        rights = Rights(user, role.body["rules"], (self._namespace,))
        content = "application/merge-patch+json" if method == "PATCH" else "application/json"
        parts = urlsplit(path)
        request = Request(
            method, parts.path, dict(parse_qsl(parts.query)), body, content, user="trainer", rights=rights
        )
        return json.loads(json.dumps(self._server.answer(request)))


class ScriptedJobs:
    """All jobs that KubeRay has submitted, by cluster and id. Implements kuberay.Dashboards.

    When a cluster is deleted, its pods are, and the kubelet sends its trainer a SIGTERM.
    """

    def __init__(self, server: ApiServer) -> None:
        self._server = server
        self._tasks: dict[tuple[str, str], asyncio.Task[int]] = {}
        self.volumes: dict[str, dict[str, Any]] = {}
        """What trainers have left on their storage, by the id of their training."""
        server.objects.listen(self._heard)

    def find(self, cluster: str, job_id: str) -> JobInfo | None:
        task = self._tasks.get((cluster, job_id))
        if task is None:
            return None
        if not task.done():
            return JobInfo("RUNNING", "Job is currently running.")
        code = task.result()
        if code == 0:
            return JobInfo("SUCCEEDED", "Job finished successfully.")
        return JobInfo("FAILED", f"Job entrypoint command failed with exit code {code}, last available logs:")

    def submit(self, cluster: str, job_id: str) -> None:
        name, attempt, uid = name_of(job_id)
        trainings = self._server.objects.of(resource("qwen35trainings"))
        training = next(item.copy() for item in trainings if item.metadata["uid"].startswith(uid))
        namespace = training["metadata"]["namespace"]
        requests = AccountRequests(self._server, namespace, f"{name}-trainer")
        maps = f"/api/v1/namespaces/{namespace}/configmaps"
        volume = self.volumes.setdefault(uid, {})
        trainer = Trainer(requests, maps, name, attempt, cluster=cluster, volume=volume, clock=self._server.clock)
        trainer.terminate = trainer.interrupted
        steps = trainer.play(scripts_of(training["metadata"]))
        self._tasks[cluster, job_id] = asyncio.ensure_future(_ended(trainer, steps))

    def stop(self, cluster: str, job_id: str) -> None:
        if (cluster, job_id) in self._tasks:
            self._tasks[cluster, job_id].cancel()

    def _heard(self, change: Change) -> None:
        if change.after.resource.plural == "rayclusters" and change.kind == "DELETED":
            for cluster, job_id in self._tasks:
                if cluster == change.after.metadata["name"]:
                    self.stop(cluster, job_id)


async def _ended(trainer: Trainer, steps: Iterator[float]) -> int:
    """Do the steps. Returns the exit code."""
    try:
        for seconds in steps:
            await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        try:
            trainer.interrupted()
        except SystemExit:
            return STOPPED
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0

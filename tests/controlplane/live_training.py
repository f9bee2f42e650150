"""One training on a control plane, real or in memory, and the actions of user, trainer, nodes and queue on it."""

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol

from tests.controlplane.scripted_trainer import ANNOTATION, TRAININGS
from tests.patience import PATIENCE
from tests.testbed.api import Refused
from tests.testbed.core import Core

MERGE = "application/merge-patch+json"
GROUP = TRAININGS.rpartition("/")[0]
SPEC: dict[str, Any] = {
    "accelerator": {"profile": "CPU", "devicesPerNode": 1},
    "model": {
        "name": "tiny",
        "precision": "FP32",
        "source": {"random": {"hiddenSize": 64, "intermediateSize": 128, "layers": 4, "characters": "0123456789"}},
    },
    "data": {"train": [{"name": "train", "files": {"paths": ["train.jsonl"]}}]},
    "rewards": [{"type": "ExactMatch"}],
    "rollout": {"engine": "Torch", "nodes": 2, "minNodes": 1, "maxNodes": 4},
    "train": {"nodes": 1},
    "checkpoint": {"graceSeconds": 60},
    "failurePolicy": {"maxRestarts": 3, "backoffSeconds": 0},
}


class Api(Protocol):
    """The API server as an administrator sees it. Raises Refused."""

    def request(self, method: str, path: str, body: Any = None, *, content: str = "application/json") -> Any: ...

    def get(self, path: str) -> Any: ...

    def post(self, path: str, body: Any) -> Any: ...

    def exists(self, path: str) -> bool: ...


class Plane(Protocol):
    """A control plane as stories use it: tests.testbed.control_plane or tests.virtual.plane."""

    @property
    def api(self) -> Api: ...

    def now(self) -> float:
        """The time in seconds since 1970."""

    def monotonic(self) -> float:
        """Seconds of a clock that measures waits."""

    def wait(self, seconds: float) -> None:
        """Let this time pass."""

    def kubelets_away(self) -> AbstractContextManager[None]:
        """Nobody starts pods, or confirms their end: kwok does both immediately, kubelets take their time."""


@dataclass(frozen=True)
class LiveTraining:
    """A training by its name. It may not exist yet, or no longer."""

    plane: Plane
    namespace: str
    name: str = "demo"
    pause: ClassVar[float] = 0.1
    longest_pause: ClassVar[float] = 0.3
    """Seconds between two polls of a wait; they grow with its duration."""

    # The user.

    def apply(
        self, script: list[Any] | None = None, labels: dict[str, str] | None = None, **sections: Any
    ) -> "LiveTraining":
        """Create the training; sections are merged into a small spec: apply(rollout={"nodes": 3})."""
        spec = deepcopy(SPEC)
        for name, value in sections.items():
            spec[name] = spec.get(name, {}) | value if isinstance(value, dict) else value
        annotations = {} if script is None else {ANNOTATION: json.dumps(script)}
        metadata = {"name": self.name, "labels": labels or {}, "annotations": annotations}
        manifest = {"apiVersion": GROUP.removeprefix("/apis/"), "kind": "Qwen35Training"}
        self.plane.api.post(self.path("qwen35trainings", None), manifest | {"metadata": metadata, "spec": spec})
        return self

    def edit(self, **sections: Any) -> None:
        self.patch(self.path("qwen35trainings"), {"spec": sections})

    def delete(self) -> None:
        self.plane.api.request("DELETE", self.path("qwen35trainings"))

    def scale(self, replicas: int) -> None:
        """As `kubectl scale` does."""
        self.patch(f"{self.path('qwen35trainings')}/scale", {"spec": {"replicas": replicas}})

    def kubectl(self, *arguments: str, input: str | None = None) -> str:  # noqa: A002
        """Run kubectl in this namespace. On a real control plane only."""
        assert isinstance(self.plane, Core)
        return self.plane.kubectl("--namespace", self.namespace, *arguments, input=input)

    # The trainer, when no scripted one is wanted: only its words count.

    def report(self, state: str = "Running", *, attempt: int = 1, **fields: Any) -> None:
        """Written once `-progress` exists, and the RayCluster if the job has one to run in. Every report says everything."""
        self.until(lambda: self._may_report(attempt), f"attempt {attempt} has a RayCluster")
        defaults = {"attempt": attempt, "state": state, "time": self.plane.now(), "update": 1, "version": 1}
        self.write(json.dumps(defaults | fields))

    def write(self, text: str) -> None:
        self.until(lambda: self.find("configmaps", f"{self.name}-progress"), "-progress exists")
        self.patch(self.path("configmaps", f"{self.name}-progress"), {"data": {"progress.json": text}})

    def _may_report(self, attempt: int) -> bool:
        """Whether a trainer can exist. A report from before its RayCluster was created would count as one of an earlier cluster."""
        job = self.job(attempt)
        if job is None or job["spec"].get("suspend") or "deletionTimestamp" in job["metadata"]:
            return True
        if self.job_state(attempt) not in ("", "Initializing"):
            return True
        name = (job.get("status") or {}).get("rayClusterName")
        return name is not None and self.find("rayclusters", name) is not None

    @property
    def control(self) -> dict[str, Any]:
        return dict(json.loads(self.get("configmaps", f"{self.name}-control")["data"]["control.json"]))

    @property
    def order(self) -> dict[str, Any] | None:
        return self.control.get("stop")

    # The cluster.

    def spoil(self, pod: str, reason: str = "", *, exit_code: int = 0, condition: str | None = None) -> None:
        """The pod stops working: its container ends for this reason, or the cluster disrupts it for that."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.plane.now()))
        conditions = [{"type": "Ready", "status": "False", "lastTransitionTime": now}]
        if condition is not None:
            # With its time: Kubernetes takes back a disruption that has not happened for two minutes.
            disrupted = {"type": "DisruptionTarget", "status": "True", "lastTransitionTime": now}
            conditions.append(disrupted | {"reason": condition, "message": "a test"})
        (own, *others) = self.get("pods", pod)["status"]["containerStatuses"]
        if reason:
            ended = {"reason": reason, "exitCode": exit_code, "finishedAt": now}
            own = own | {"ready": False, "state": {"terminated": ended}}
        # Strategic merge finds conditions by their type; containers are written whole.
        change = {"status": {"conditions": conditions, "containerStatuses": [own, *others]}}
        kind = "application/strategic-merge-patch+json"
        self.plane.api.request("PATCH", f"{self.path('pods', pod)}/status", change, content=kind)

    def hold_in_queue(self, suspended: bool, attempt: int = 1) -> None:
        """As Kueue does: it owns a RayJob's `suspend`."""
        self.patch(self.path("rayjobs", f"{self.name}-{attempt}"), {"spec": {"suspend": suspended}})

    # What is.

    @property
    def body(self) -> dict[str, Any]:
        return self.get("qwen35trainings", self.name)

    @property
    def status(self) -> dict[str, Any]:
        return dict(self.body.get("status", {}))

    @property
    def state(self) -> str | None:
        return self.status.get("state")

    @property
    def attempts(self) -> list[dict[str, Any]]:
        return list(self.status.get("attempts", []))

    @property
    def first(self) -> dict[str, Any]:
        """The first attempt as recorded; empty before: its RayJob is made first."""
        return next(iter(self.attempts), {})

    @property
    def newest(self) -> int:
        """Number of the latest attempt."""
        return int(self.attempts[-1]["number"])

    @property
    def restarts(self) -> int:
        return int(self.status.get("restarts", 0))

    def condition(self, kind: str) -> tuple[str, str]:
        """Status and reason."""
        condition = self.whole_condition(kind)
        return condition.get("status", ""), condition.get("reason", "")

    def whole_condition(self, kind: str) -> dict[str, Any]:
        return next((item for item in self.status.get("conditions", []) if item["type"] == kind), {})

    def job(self, attempt: int = 1) -> dict[str, Any] | None:
        return self.find("rayjobs", f"{self.name}-{attempt}")

    def job_state(self, attempt: int = 1) -> str:
        return str(((self.job(attempt) or {}).get("status") or {}).get("jobDeploymentStatus", ""))

    def cluster(self) -> dict[str, Any] | None:
        return next(iter(self.mine("rayclusters")), None)

    def replicas(self) -> int:
        """Of the rollout group, as the live cluster has them."""
        cluster = self.cluster()
        assert cluster is not None
        return next(
            int(group["replicas"]) for group in cluster["spec"]["workerGroupSpecs"] if group["groupName"] == "rollout"
        )

    def pods(self, pool: str) -> list[str]:
        """Those that are there to stay."""
        return sorted(
            item["metadata"]["name"]
            for item in self.mine("pods", f",rl.qwen35.io/pool={pool}")
            if "deletionTimestamp" not in item["metadata"]
        )

    def events(self) -> list[tuple[str, str]]:
        """Reason and text of each, oldest first."""
        events = self.plane.api.get(self.path("events", None))["items"]
        own = [match for match in events if match["involvedObject"].get("name") == self.name]
        own.sort(key=lambda item: item["metadata"]["creationTimestamp"])
        return [(item["reason"], item.get("message", "")) for item in own]

    def announced(self, reason: str) -> bool:
        return any(item == reason for item, _ in self.events())

    # Waiting.

    def until(self, holds: Callable[[], object], what: str) -> None:
        """Polls until it holds; fails with how the training is by then."""
        end, pause = self.plane.monotonic() + PATIENCE, self.pause
        while not holds():
            if self.plane.monotonic() > end:
                raise AssertionError(f"not within {PATIENCE:.0f} s: {what}; {self._now()}")
            self.plane.wait(pause)
            pause = min(pause * 1.2, self.longest_pause)

    def until_state(self, state: str) -> None:
        self.until(lambda: self.state == state, f"{self.name} is {state}")

    def until_condition(self, kind: str, status: str, reason: str) -> None:
        self.until(lambda: self.condition(kind) == (status, reason), f"{kind} {status} {reason}")

    def until_job(self, attempt: int = 1) -> None:
        self.until(lambda: self.job(attempt), f"RayJob of attempt {attempt} exists")

    def until_pods(self, pool: str, count: int) -> list[str]:
        """Names of the pool's pods, once that number of them run."""
        running = partial(self.mine, "pods", f",rl.qwen35.io/pool={pool}")
        self.until(
            lambda: (
                sum(item["status"].get("phase") == "Running" for item in running()) == count == len(self.pods(pool))
            ),
            f"{count} pods of {pool} run",
        )
        return self.pods(pool)

    def _now(self) -> str:
        """Describe the training: on the first line, which summaries of failures show, what matters most."""
        body = self.find("qwen35trainings", self.name)
        status = None if body is None else body.get("status")
        jobs = {
            item["metadata"]["name"]: item.get("status", {}).get("jobDeploymentStatus") for item in self.mine("rayjobs")
        }
        return "\n".join(map(json.dumps, (_brief(status or {}), {"status": status, "jobs": jobs})))

    # Objects.

    def path(self, plural: str, name: str | None = "") -> str:
        """Of an object of this namespace, by default named as the training; None: of the list."""
        groups = {"qwen35trainings": GROUP, "rayjobs": "/apis/ray.io/v1", "rayclusters": "/apis/ray.io/v1"}
        groups |= dict.fromkeys(("roles", "rolebindings"), "/apis/rbac.authorization.k8s.io/v1")
        groups |= {"networkpolicies": "/apis/networking.k8s.io/v1", "poddisruptionbudgets": "/apis/policy/v1"}
        collection = f"{groups.get(plural, '/api/v1')}/namespaces/{self.namespace}/{plural}"
        return collection if name is None else f"{collection}/{name or self.name}"

    def get(self, plural: str, name: str) -> dict[str, Any]:
        return dict(self.plane.api.get(self.path(plural, name)))

    def find(self, plural: str, name: str) -> dict[str, Any] | None:
        try:
            return self.get(plural, name)
        except Refused as refused:
            if refused.status != 404:
                raise
            return None

    def mine(self, plural: str, selector: str = "") -> list[dict[str, Any]]:
        """Objects of this training, by label."""
        query = f"?labelSelector=rl.qwen35.io/training={self.name}{selector}"
        return list(self.plane.api.get(self.path(plural, None) + query)["items"])

    def patch(self, path: str, change: dict[str, Any]) -> None:
        self.plane.api.request("PATCH", path, change, content=MERGE)


CHILDREN = (
    "configmaps",
    "serviceaccounts",
    "roles",
    "rolebindings",
    "networkpolicies",
    "poddisruptionbudgets",
    "rayjobs",
)
"""Kinds that a training has children of."""


def _brief(status: dict[str, Any]) -> dict[str, Any]:
    """What a summary has room for: where the training is, and how its attempts ended."""
    attempts = [
        [attempt.get(part) for part in ("outcome", "reason", "message")] for attempt in status.get("attempts", [])
    ]
    ready = [condition.get("message") for condition in status.get("conditions", []) if condition.get("type") == "Ready"]
    update = status.get("progress", {}).get("update")
    return {"state": status.get("state"), "ready": ready, "update": update, "attempts": attempts}

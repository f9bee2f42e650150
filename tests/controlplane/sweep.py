"""One story told many times, each in a namespace of its own with its own operator, and each disturbed in another way.

    prelude ─► arm the disturbance ─► act ─► as an undisturbed telling ended?

Only the act's writes are counted: what leads to it is the act of another story.
"""

import json
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.controlplane.proxy import Line
from tests.controlplane.story import CHILDREN, Story
from tests.patience import PATIENCE
from tests.testbed.control_plane import ControlPlane

type Verb = Callable[["Telling"], None]
type Disturbance = Callable[[Line], object]
type Picture = dict[str, Any]

SIDE_BY_SIDE = 16
SETTLED = 5.0
"""Seconds without a write after which nothing more is expected."""
SIZES = ("groupName", "replicas", "minReplicas", "maxReplicas")
# What differs between two tellings of the same story: times, and what the cluster makes up.
MADE_UP = frozenset(
    {"uid", "resourceVersion", "creationTimestamp", "generation", "managedFields", "selfLink", "lastTransitionTime"}
    | {"startTime", "endTime", "time", "activeSeconds", "rl.qwen35.io/hash", "namespace", "observedGeneration"}
)


class Telling(Story):
    """Told beside others: it asks less often."""

    pause = 0.4

    def hide_pods(self) -> None:
        """No Service of the namespace leads to a pod: a Ray that answers for pods on this machine is not of this story."""
        hidden = {"count/endpoints": "0", "count/endpointslices.discovery.k8s.io": "0"}
        quota = {"metadata": {"name": "no-endpoints"}, "spec": {"hard": hidden}}
        self.plane.api.post(self.path("resourcequotas", None), quota)
        counted = self.path("resourcequotas", "no-endpoints")
        self.until(lambda: self.plane.api.get(counted).get("status", {}).get("hard") == hidden, "the quota is in force")

    def end_job(self, attempt: int) -> None:
        """The RayJob fails, as when its entrypoint does."""
        path = f"{self.path('rayjobs', f'{self.name}-{attempt}')}/status"
        ended = {"jobStatus": "FAILED", "jobDeploymentStatus": "Failed", "reason": "AppFailed", "message": "lost"}
        # KubeRay deletes the cluster of a job that has an end.
        self.patch(path, {"status": ended | {"endTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}})

    def picture(self) -> Picture:
        """All that is there, but for what is made up."""
        training = self.find("qwen35trainings", self.name)
        objects = {plural: [_plain(one) for one in self.mine(plural)] for plural in CHILDREN if plural != "rayjobs"}
        jobs = [_plain({"metadata": one["metadata"], "spec": one["spec"]}) for one in self.mine("rayjobs")]
        groups = [
            (
                one["metadata"]["labels"]["rl.qwen35.io/attempt"],
                *(group[field] for field in ("groupName", "replicas", "minReplicas", "maxReplicas")),
            )
            for one in self.mine("rayclusters")
            for group in one["spec"]["workerGroupSpecs"]
        ]
        pods = Counter(one["metadata"]["labels"]["rl.qwen35.io/pool"] for one in self.mine("pods"))
        status = None if training is None else _plain(training.get("status", {}))
        return {"status": status, "jobs": jobs, "groups": sorted(groups), "pods": pods} | objects

    def is_as(self, calm: Picture) -> bool:
        """Whether all is as in the picture; the status first, which is mostly the last to be."""
        training = self.find("qwen35trainings", self.name)
        status = None if training is None else _plain(training.get("status", {}))
        return bool(status == calm["status"]) and self.picture() == calm


@dataclass(frozen=True)
class Tale:
    """`prelude` brings a training to where `act` begins."""

    name: str
    act: Verb
    prelude: Verb = lambda telling: None


@dataclass
class Sweep:
    """Tells tales."""

    plane: ControlPlane
    serving: Callable[[str], AbstractContextManager[Line]]
    """An operator for a namespace, behind the proxy."""
    endings: dict[str, tuple[Picture, int]] = field(default_factory=dict)
    """How tales end undisturbed, and the writes of their acts."""

    def calm(self, tales: Iterable[Tale]) -> None:
        """Tells those whose end is not known."""
        unknown = [tale for tale in tales if tale.name not in self.endings]
        with ThreadPoolExecutor(SIDE_BY_SIDE) as workers:
            self.endings |= dict(zip((tale.name for tale in unknown), workers.map(self._calm, unknown), strict=True))

    def disturbed(self, tale: Tale, disturbances: Mapping[str, Disturbance]) -> list[int]:
        """Every disturbance in a telling of its own; each ends as the calm one. Returns how often each struck."""
        with ThreadPoolExecutor(SIDE_BY_SIDE) as workers:
            told = [workers.submit(self._disturbed, tale, name, disturb) for name, disturb in disturbances.items()]
            return [one.result() for one in told]

    def _calm(self, tale: Tale) -> tuple[Picture, int]:
        with self._telling(tale, lambda line: line.arm()) as (telling, line):
            tale.act(telling)
            before: Any = None
            end = time.monotonic() + PATIENCE
            while (now := (line.asked, telling.picture())) != before:
                assert time.monotonic() < end, f"{tale.name} never comes to rest: {line.log[-5:]}"
                before = now
                time.sleep(SETTLED)
            return telling.picture(), line.writes

    def _disturbed(self, tale: Tale, name: str, disturb: Disturbance) -> int:
        calm, _ = self.endings[tale.name]
        with self._telling(tale, disturb) as (telling, line):
            try:
                tale.act(telling)
                telling.until(lambda: telling.is_as(calm), "as undisturbed")
            except AssertionError as problem:
                log = "\n".join(line.log)
                message = f"{tale.name}, {name}: {problem}\n{_difference(calm, telling.picture())}\n{log}"
                raise AssertionError(message) from None
            return line.suffered

    @contextmanager
    def _telling(self, tale: Tale, disturb: Disturbance) -> Iterator[tuple[Telling, Line]]:
        namespace = f"{tale.name.replace('_', '-')}-{secrets.token_hex(3)}"
        self.plane.api.post("/api/v1/namespaces", {"metadata": {"name": namespace}})
        try:
            account = f"/api/v1/namespaces/{namespace}/serviceaccounts/default"
            telling = Telling(self.plane, namespace)
            telling.until(lambda: self.plane.api.exists(account), "the namespace takes pods")
            telling.hide_pods()
            with self.serving(namespace) as line:
                tale.prelude(telling)
                disturb(line)
                yield telling, line
        finally:
            self.plane.api.request("DELETE", f"/api/v1/namespaces/{namespace}")


def _plain(found: Any) -> Any:
    """Without what is made up."""
    if isinstance(found, dict):
        return {key: _plain(value) for key, value in found.items() if key not in MADE_UP}
    if isinstance(found, list):
        return [_plain(value) for value in found]
    if isinstance(found, str):
        if found.startswith("{"):
            said = json.loads(found)
            said["leaving"] = len(said.get("leaving", ()))
            return _plain(said)
        return re.sub(r"\b[a-z-]+-[0-9a-f]{6}\b|\b[0-9a-f]{8}\b", "…", found)
    return found


def _difference(wanted: Any, found: Any, path: str = "") -> str:
    if isinstance(wanted, dict) and isinstance(found, dict):
        parts = [_difference(wanted.get(key), found.get(key), f"{path}.{key}") for key in wanted | found]
        return "\n".join(part for part in parts if part)
    return "" if wanted == found else f"{path}: wanted {wanted}, found {found}"

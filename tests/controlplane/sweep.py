"""One story told many times, each in a namespace of its own with its own operator, and each disturbed in another way.

    prelude ─► arm the disturbance ─► act ─► at rest, as undisturbed? ─► touch ─► still? ─► next act …

Only the acts' writes are counted: what leads to them is the act of another story. A picture counts only at rest: the
operator has reconciled the newest version of the training, its queue is empty and nothing is due soon. The touch, a change
that asks for nothing, makes it look at everything once more: what it would still do wrong, it does then.

The first telling that ends otherwise ends the sweep: the others are abandoned.
"""

import json
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from tests.controlplane.proxy import Line
from tests.controlplane.story import CHILDREN, Story
from tests.testbed.api import Refused
from tests.testbed.control_plane import ControlPlane

type Act = Callable[["Telling"], None]
type Disturbance = Callable[[Line], object]
type Picture = dict[str, Any]

SIDE_BY_SIDE = 16
STILL = 60.0
"""Seconds at rest in which another picture than the undisturbed one is given up: KubeRay may still be at work."""
CALM = 2.0
"""The same for the undisturbed telling, whose acts end only when KubeRay is done."""
TOUCHED = "test.qwen35.io/touched"
# What differs between two tellings of the same story: times, and what the cluster makes up.
MADE_UP = frozenset(
    {"uid", "resourceVersion", "creationTimestamp", "generation", "managedFields", "selfLink", "lastTransitionTime"}
    | {"startTime", "endTime", "time", "activeSeconds", "rl.qwen35.io/hash", "namespace", "observedGeneration"}
)


class Abandoned(Exception):
    """Another telling of the sweep has failed."""


@dataclass(frozen=True)
class Telling(Story):
    """Told beside others: it asks less often, and ends when one of them has failed."""

    line: Line | None = None
    failed: threading.Event = field(default_factory=threading.Event)

    pause = 0.4
    longest_pause = 0.4

    def until(self, holds: Callable[[], object], what: str) -> None:
        def told() -> object:
            if self.failed.is_set():
                raise Abandoned
            return holds()

        super().until(told, what)

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

    # Rest.

    def at_rest(self) -> bool:
        """Whether the operator knows the training as it is now, and has nothing more to do for it."""
        assert self.line is not None
        found = self.find("qwen35trainings", self.name)
        return self.line.rests(self.name, None if found is None else int(found["metadata"]["resourceVersion"]))

    def resting(self) -> Picture | None:
        """The picture, when the operator rests both before and after it was taken."""
        if not self.at_rest():
            return None
        picture = self.picture()
        return picture if self.at_rest() else None

    def settled(self, wanted: Picture | None = None, *, still: float = STILL) -> Picture:
        """The picture at rest: that which is wanted, or one that does not change for so many seconds."""
        since: tuple[float, Picture | None] = (time.monotonic(), None)
        settled: list[Picture] = []

        def settle() -> bool:
            nonlocal since
            picture = self.resting()
            if picture is None or picture != since[1]:
                since = (time.monotonic(), picture)
            if picture is not None and (picture == wanted or time.monotonic() > since[0] + still):
                settled.append(picture)
            return bool(settled)

        self.until(settle, "the operator rests")
        return settled[0]

    def touch(self) -> None:
        """Make the operator look at everything once more. A training that is gone is followed by one that starts nothing."""
        assert self.line is not None
        if self.find("qwen35trainings", self.name) is not None:
            before, looks = self.line.looks(), self.line.looks
            now = {TOUCHED: secrets.token_hex(4)}
            self.patch(self.path("qwen35trainings"), {"metadata": {"annotations": now}})
            self.until(lambda: looks() > before, "the operator looks at what was touched")
            return
        after = replace(self, name="after").apply(suspend=True)
        after.until(lambda: after.state == "Suspended" and after.at_rest(), "a later training is seen")

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


@dataclass(frozen=True)
class Tale:
    """`prelude` brings a training to where the acts begin. Each act ends with what it waits for: then KubeRay is done too."""

    name: str
    acts: tuple[Act, ...]
    prelude: Act = lambda telling: None


@dataclass(frozen=True)
class Told:
    """What became of one disturbed telling."""

    suffered: int
    """How often the disturbance struck."""
    writes: int
    """Carried out during the acts."""


@dataclass
class Sweep:
    """Tells tales."""

    plane: ControlPlane
    serving: Callable[[str], AbstractContextManager[Line]]
    """An operator for a namespace, behind the proxy."""
    endings: dict[str, tuple[list[Picture], int]] = field(default_factory=dict)
    """By tale, how each act ends undisturbed, and how many writes all of them took."""

    def calm(self, tales: Iterable[Tale]) -> None:
        """Tells those whose end is not known."""
        unknown = [tale for tale in tales if tale.name not in self.endings]
        with ThreadPoolExecutor(SIDE_BY_SIDE) as workers:
            self.endings |= dict(zip((tale.name for tale in unknown), workers.map(self._calm, unknown), strict=True))

    def disturbed(self, tale: Tale, disturbances: Mapping[str, Disturbance]) -> list[Told]:
        """Every disturbance in a telling of its own; each act ends as the calm one. Raises at the first that does not."""
        failed = threading.Event()
        with ThreadPoolExecutor(SIDE_BY_SIDE) as workers:
            pending = [
                workers.submit(self._disturbed, tale, name, disturb, failed) for name, disturb in disturbances.items()
            ]
        problems = [one.exception() for one in pending]
        for problem in sorted(filter(None, problems), key=lambda one: isinstance(one, Abandoned)):
            raise problem
        return [one.result() for one in pending]

    def _calm(self, tale: Tale) -> tuple[list[Picture], int]:
        with self._telling(tale, Line.arm, threading.Event()) as telling:
            line, pictures = telling.line, []
            assert line is not None
            for act in tale.acts:
                act(telling)
                telling.settled(still=CALM)
                telling.touch()
                pictures.append(telling.settled(still=CALM))
            return pictures, line.writes

    def _disturbed(self, tale: Tale, name: str, disturb: Disturbance, failed: threading.Event) -> Told:
        pictures, _ = self.endings[tale.name]
        try:
            with self._telling(tale, disturb, failed) as telling:
                line = telling.line
                assert line is not None
                for number, (act, calm) in enumerate(zip(tale.acts, pictures, strict=False), start=1):
                    where = f"{tale.name}, act {number}, {name}"
                    try:
                        act(telling)
                        found = telling.settled(calm)
                        if found == calm:
                            where += ", after a touch"
                            telling.touch()
                            telling.until(telling.at_rest, "the operator rests")
                            found = telling.picture()
                    except AssertionError as problem:
                        raise AssertionError(f"{where}: {problem}\n{_log(line)}") from None
                    assert found == calm, f"{where}:\n{_difference(calm, found)}\n{_log(line)}"
                return Told(line.suffered, line.writes)
        except BaseException:
            failed.set()
            raise

    @contextmanager
    def _telling(self, tale: Tale, disturb: Disturbance, failed: threading.Event) -> Iterator[Telling]:
        namespace = f"{tale.name.replace('_', '-')}-{secrets.token_hex(3)}"
        self.plane.api.post("/api/v1/namespaces", {"metadata": {"name": namespace}})
        account = f"/api/v1/namespaces/{namespace}/serviceaccounts/default"
        telling = Telling(self.plane, namespace, failed=failed)
        telling.until(lambda: self.plane.api.exists(account), "the namespace takes pods")
        telling.hide_pods()
        try:
            with self.serving(namespace) as line:
                told = replace(telling, line=line)
                tale.prelude(told)
                disturb(line)
                yield told
        finally:
            clear(self.plane, namespace)


def clear(plane: ControlPlane, namespace: str) -> None:
    """Delete what makes pods. The namespace stays: to delete one costs the controllers more than a story."""
    for plural in ("rl.qwen35.io/v1alpha1 qwen35trainings", "ray.io/v1 rayjobs", "ray.io/v1 rayclusters"):
        group, name = plural.split()
        try:
            plane.api.request("DELETE", f"/apis/{group}/namespaces/{namespace}/{name}")
        except Refused as refused:
            if refused.status != 404:  # the kind itself was taken away
                raise


def _log(line: Line) -> str:
    return "\n".join(line.log)


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

"""Runs one scenario many times, each run in a namespace with an operator of its own, and each with another disturbance.

    prelude ─► arm the disturbance ─► act ─► at rest, as undisturbed? ─► touch ─► still? ─► next act …

Only writes during the acts are counted; the prelude is an act of another scenario. A picture counts only at rest: the
operator has reconciled the newest version of the training, its queue is empty and nothing is due soon. The touch is a change
without consequences, which makes the operator reconcile once more and so reveals pending mistakes.

The first run with another result ends the sweep: the other runs are abandoned.
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

from tests.controlplane.live_training import CHILDREN, LiveTraining
from tests.controlplane.proxy import Line
from tests.testbed.api import Refused
from tests.testbed.control_plane import ControlPlane

type Act = Callable[["ScenarioRun"], None]
type Disturbance = Callable[[Line], object]
type Picture = dict[str, Any]

SIDE_BY_SIDE = 16
STILL = 60.0
"""Seconds at rest after which a picture that differs from the undisturbed one is final: KubeRay may need this time."""
CALM = 2.0
"""The same for the undisturbed run, whose acts end only when KubeRay is done."""
TOUCHED = "test.qwen35.io/touched"
# Fields that differ between two runs of the same scenario: times, and values that the cluster generates.
MADE_UP = frozenset(
    {"uid", "resourceVersion", "creationTimestamp", "generation", "managedFields", "selfLink", "lastTransitionTime"}
    | {
        "startTime",
        "endTime",
        "activeSince",
        "time",
        "leavingSince",
        "activeSeconds",
        "rl.qwen35.io/hash",
        "namespace",
        "observedGeneration",
    }
)


class Abandoned(Exception):
    """Another run of the sweep has failed."""


@dataclass(frozen=True)
class ScenarioRun(LiveTraining):
    """A training in one of several concurrent runs: it polls less often, and ends when one of the runs has failed."""

    line: Line | None = None
    failed: threading.Event = field(default_factory=threading.Event)

    pause = 0.4
    longest_pause = 0.4

    def until(self, holds: Callable[[], object], what: str) -> None:
        def guarded() -> object:
            if self.failed.is_set():
                raise Abandoned
            return holds()

        super().until(guarded, what)

    def hide_pods(self) -> None:
        """Keep Services of the namespace from reaching pods: a Ray that answers for pods on this machine belongs to another test."""
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
        self.patch(
            path, {"status": ended | {"endTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.plane.now()))}}
        )

    # Rest.

    def at_rest(self) -> bool:
        """Whether the operator knows the training as it is now, and has nothing more to do for it."""
        assert self.line is not None
        body = self.find("qwen35trainings", self.name)
        return self.line.rests(self.name, None if body is None else int(body["metadata"]["resourceVersion"]))

    def resting(self) -> Picture | None:
        """The picture, when the operator rests both before and after it was taken."""
        if not self.at_rest():
            return None
        picture = self.picture()
        return picture if self.at_rest() else None

    def settled(self, wanted: Picture | None = None, *, still: float = STILL) -> Picture:
        """The picture at rest: the expected one, or one that does not change for this number of seconds."""
        since: tuple[float, Picture | None] = (self.plane.monotonic(), None)
        settled: list[Picture] = []

        def settle() -> bool:
            nonlocal since
            picture = self.resting()
            if picture is None or picture != since[1]:
                since = (self.plane.monotonic(), picture)
            if picture is not None and (picture == wanted or self.plane.monotonic() > since[0] + still):
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
        objects = {plural: [_plain(item) for item in self.mine(plural)] for plural in CHILDREN if plural != "rayjobs"}
        jobs = [_plain({"metadata": job["metadata"], "spec": job["spec"]}) for job in self.mine("rayjobs")]
        groups = [
            (
                cluster["metadata"]["labels"]["rl.qwen35.io/attempt"],
                *(group[field] for field in ("groupName", "replicas", "minReplicas", "maxReplicas")),
            )
            for cluster in self.mine("rayclusters")
            for group in cluster["spec"]["workerGroupSpecs"]
        ]
        pods = Counter(pod["metadata"]["labels"]["rl.qwen35.io/pool"] for pod in self.mine("pods"))
        status = None if training is None else _plain(training.get("status", {}))
        return {"status": status, "jobs": jobs, "groups": sorted(groups), "pods": pods} | objects


@dataclass(frozen=True)
class Scenario:
    """`prelude` brings a training into the state in which the acts begin. Each act ends only when KubeRay is done too."""

    name: str
    acts: tuple[Act, ...]
    prelude: Act = lambda run: None


@dataclass(frozen=True)
class RunResult:
    """The result of one disturbed run."""

    suffered: int
    """How often the disturbance struck."""
    writes: int
    """Carried out during the acts."""


type Stage = Callable[[Scenario, threading.Event], AbstractContextManager[ScenarioRun]]
"""Makes a namespace and an operator for one run, and ends both afterwards. The event is set when one of the runs has failed."""


@dataclass
class Sweep:
    """Runs scenarios."""

    stage: Stage
    endings: dict[str, tuple[list[Picture], int]] = field(default_factory=dict)
    """By scenario: the picture after each undisturbed act, and the number of writes of all acts."""
    side_by_side: int = SIDE_BY_SIDE
    """Number of concurrent runs."""

    def calm(self, scenarios: Iterable[Scenario]) -> None:
        """Run those without disturbance whose ending is not known yet."""
        unknown = [scenario for scenario in scenarios if scenario.name not in self.endings]
        with ThreadPoolExecutor(self.side_by_side) as workers:
            self.endings |= dict(
                zip((scenario.name for scenario in unknown), workers.map(self._calm, unknown), strict=True)
            )

    def disturbed(self, scenario: Scenario, disturbances: Mapping[str, Disturbance]) -> list[RunResult]:
        """Run the scenario once with each disturbance. Raises if an act ends in another state than without."""
        failed = threading.Event()
        with ThreadPoolExecutor(self.side_by_side) as workers:
            pending = [
                workers.submit(self._disturbed, scenario, name, disturb, failed)
                for name, disturb in disturbances.items()
            ]
        problems = [future.exception() for future in pending]
        for problem in sorted(filter(None, problems), key=lambda item: isinstance(item, Abandoned)):
            raise problem
        return [future.result() for future in pending]

    def _calm(self, scenario: Scenario) -> tuple[list[Picture], int]:
        with self._run(scenario, Line.arm, threading.Event()) as run:
            line, pictures = run.line, []
            assert line is not None
            for act in scenario.acts:
                act(run)
                run.settled(still=CALM)
                run.touch()
                pictures.append(run.settled(still=CALM))
            return pictures, line.writes

    def _disturbed(self, scenario: Scenario, name: str, disturb: Disturbance, failed: threading.Event) -> RunResult:
        pictures, _ = self.endings[scenario.name]
        try:
            with self._run(scenario, disturb, failed) as run:
                line = run.line
                assert line is not None
                for number, (act, calm) in enumerate(zip(scenario.acts, pictures, strict=False), start=1):
                    where = f"{scenario.name}, act {number}, {name}"
                    try:
                        act(run)
                        picture = run.settled(calm)
                        if picture == calm:
                            where += ", after a touch"
                            run.touch()
                            run.until(run.at_rest, "the operator rests")
                            picture = run.picture()
                    except AssertionError as problem:
                        raise AssertionError(f"{where}: {problem}\n{_log(line)}") from None
                    assert picture == calm, f"{where}:\n{_difference(calm, picture)}\n{_log(line)}"
                return RunResult(line.suffered, line.writes)
        except BaseException:
            failed.set()
            raise

    @contextmanager
    def _run(self, scenario: Scenario, disturb: Disturbance, failed: threading.Event) -> Iterator[ScenarioRun]:
        with self.stage(scenario, failed) as run:
            assert run.line is not None
            scenario.prelude(run)
            disturb(run.line)
            yield run


def on_the_real_plane(plane: ControlPlane, serving: Callable[[str], AbstractContextManager[Line]]) -> Stage:
    """Stages on the real control plane. serving: an operator for a namespace, behind the proxy."""

    @contextmanager
    def stage(scenario: Scenario, failed: threading.Event) -> Iterator[ScenarioRun]:
        namespace = f"{scenario.name.replace('_', '-')}-{secrets.token_hex(3)}"
        plane.api.post("/api/v1/namespaces", {"metadata": {"name": namespace}})
        account = f"/api/v1/namespaces/{namespace}/serviceaccounts/default"
        run = ScenarioRun(plane, namespace, failed=failed)
        run.until(lambda: plane.api.exists(account), "the namespace takes pods")
        run.hide_pods()
        try:
            with serving(namespace) as line:
                yield replace(run, line=line)
        finally:
            clear(plane, namespace)

    return stage


def clear(plane: ControlPlane, namespace: str) -> None:
    """Delete what makes pods. The namespace stays: deleting it costs the controllers more than a scenario."""
    for plural in ("rl.qwen35.io/v1alpha1 qwen35trainings", "ray.io/v1 rayjobs", "ray.io/v1 rayclusters"):
        group, name = plural.split()
        try:
            plane.api.request("DELETE", f"/apis/{group}/namespaces/{namespace}/{name}")
        except Refused as refused:
            if refused.status != 404:  # the kind itself was taken away
                raise


def _log(line: Line) -> str:
    return "\n".join(line.log)


def _plain(node: Any) -> Any:
    """Without what is made up."""
    if isinstance(node, dict):
        return {key: _plain(value) for key, value in node.items() if key not in MADE_UP}
    if isinstance(node, list):
        return [_plain(value) for value in node]
    if isinstance(node, str):
        if node.startswith("{"):
            parsed = json.loads(node)
            parsed["leaving"] = len(parsed.get("leaving", ()))
            return _plain(parsed)
        return re.sub(
            r"\b[a-z-]+-[0-9a-f]{6}\b|\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b|\b[0-9a-f]{8}\b", "…", node
        )
    return node


def _difference(wanted: Any, actual: Any, path: str = "") -> str:
    if isinstance(wanted, dict) and isinstance(actual, dict):
        parts = [_difference(wanted.get(key), actual.get(key), f"{path}.{key}") for key in wanted | actual]
        return "\n".join(part for part in parts if part)
    return "" if wanted == actual else f"{path}: wanted {wanted}, found {actual}"

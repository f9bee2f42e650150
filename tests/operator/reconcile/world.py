"""A cluster in memory: the effects of the API server, KubeRay and the trainer on the objects of one training.

    World.observe() ─► decide ─► World.apply(write) … ─► World.status = …
         ▲                                │
         └── kuberay() · trainer verbs ◄──┘

It keeps only what `decide` reads. Every method is one step of one party, so that tests choose the order.
"""

import json
from copy import deepcopy
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from qwen35_operator.api.training_resource import TrainingResource
from qwen35_operator.api.v1alpha1 import TrainingStatus
from qwen35_operator.kube.object_records import Child, OwnWrite, Pod, RayCluster, RayJob, WorkerGroup
from qwen35_operator.operator_settings import OperatorSettings
from qwen35_operator.reconcile.decide import decide
from qwen35_operator.reconcile.leftovers import nodes_to_read
from qwen35_operator.reconcile.new_status import status_after_refusal
from qwen35_operator.reconcile.observed import NodeState, Observed, ReadReport
from qwen35_operator.reconcile.writes import (
    Apply,
    Create,
    Delete,
    PostEvent,
    RefusedWrite,
    RemoveFinalizer,
    Scale,
    is_repair,
)
from qwen35_trainer.contract import CheckpointReport, Control, ProgressReport, StopOrder, parse_control
from qwen35_trainer.contract.shared_names import CONTROL_KEY, control_name, progress_name
from qwen35_trainer.manifest import parse_spec

START = datetime(2026, 1, 1, tzinfo=UTC)
UID = "11111111-2222-3333-4444-555555555555"
SPEC = {
    "accelerator": {"profile": "NVIDIA", "devicesPerNode": 8},
    "model": {"name": "Qwen/Qwen3.5-9B", "source": {"persistentVolumeClaim": {"claimName": "models"}}},
    "data": {"train": [{"name": "math", "files": {"paths": ["/data/math.jsonl"]}}]},
    "rewards": [{"type": "Math"}],
    "rollout": {"nodes": 2, "minNodes": 1, "maxNodes": 4},
    "train": {"nodes": 2},
    "checkpoint": {"graceSeconds": 300, "storage": {"persistentVolumeClaim": {"claimName": "checkpoints"}}},
    "failurePolicy": {"maxRestarts": 2, "backoffSeconds": 10},
}


@dataclass
class World:
    """One training named demo."""

    spec: dict = field(default_factory=lambda: deepcopy(SPEC))
    labels: dict = field(default_factory=dict)
    retry: str = ""
    update_request: str = ""
    settings: OperatorSettings = field(default_factory=OperatorSettings)
    image_id: str = ""
    force_start: str = ""
    reports_since: datetime | None = None
    """When the operator began to lead."""
    nodes: dict[str, NodeState] = field(default_factory=dict)
    """Name of a node → its state. All others exist."""
    now: datetime = START
    status: TrainingStatus = field(default_factory=TrainingStatus)
    generation: int = 1
    children: dict = field(default_factory=dict)
    jobs: dict[str, RayJob] = field(default_factory=dict)
    clusters: dict[str, RayCluster] = field(default_factory=dict)
    pods: dict[str, Pod] = field(default_factory=dict)
    progress: ProgressReport | None = None
    written: datetime | None = None
    unreadable: str | None = None
    foreign: set = field(default_factory=set)
    protected: set = field(default_factory=set)
    """Kinds and names of objects that an admission policy does not let the operator delete."""
    running: int = 0
    """Number of running trainings, with those that are not in this world."""
    unavailable: tuple = ()
    deleting: bool = False
    finalizers: tuple[str, ...] = ()
    events: list[PostEvent] = field(default_factory=list)
    writes: int = 0
    wanted_after: float | None = None
    uids: int = 0
    pod_count: int = 0

    # The user.

    def edit(self, **sections) -> None:
        """Merge sections into the spec: edit(suspend=True, rollout={"nodes": 3})."""
        for name, value in sections.items():
            merged = {**self.spec.get(name, {}), **value} if isinstance(value, dict) else value
            self.spec = {**self.spec, name: merged}
        self.generation += 1

    def delete(self) -> None:
        """Delete the training, and the objects that it owns as soon as it has no finalizer."""
        self.deleting = True
        if not self.finalizers:
            self._collect()

    def _collect(self) -> None:
        self.children.clear(), self.jobs.clear(), self.clusters.clear(), self.pods.clear()

    # The operator.

    def observe(self) -> Observed:
        pods = tuple(self.pods.values())
        read = nodes_to_read(self.status, pods, self.now)
        spec, problems = parse_spec(deepcopy(self.spec), new=False)
        training = None
        if not problems:
            training = TrainingResource("demo", "team", UID, self.generation, spec, self.labels)
        control = self.children.get(("ConfigMap", control_name("demo")))
        return Observed(
            training=training,
            name="demo",
            namespace="team",
            uid=UID,
            generation=self.generation,
            version=str(self.writes),
            created=START,
            deleting=self.deleting,
            finalizers=self.finalizers,
            status=self.status,
            retry=self.retry,
            update_request=self.update_request,
            problems=tuple(problems),
            unavailable=self.unavailable,
            children={key: child for key, (child, _) in self.children.items()},
            jobs=tuple(self.jobs.values()),
            clusters=tuple(self.clusters.values()),
            pods=pods,
            nodes={name: self.nodes.get(name, "Exists") for name in read},
            force_start=self.force_start,
            reports_since=self.reports_since,
            report=self._read_report(),
            control=None if control is None else parse_control(control[1]["data"]["control.json"]),
            running=self.running,
        )

    def _read_report(self) -> ReadReport | None:
        if self.unreadable is not None:
            return ReadReport(None, self.unreadable, self.now)
        return None if self.progress is None else ReadReport(self.progress, None, self.written)

    def reconcile(self, *, writes: int | None = None) -> bool:
        """Reconcile once; with `writes`, crash after this number of writes. Returns whether the reconcile completed."""
        seen = self.observe()
        decision = decide(seen, self.settings, self.now)
        self.wanted_after = decision.after
        remaining = writes
        refused: list[RefusedWrite] = []
        for write in decision.writes:
            blocked = not all(is_repair(earlier.write) for earlier in refused)
            if blocked and not isinstance(write, Delete) and not is_repair(write):
                continue
            if remaining == 0:
                return False
            if (refusal := self.apply(write)) is not None:
                refused.append(refusal)
                continue
            if remaining is not None and not isinstance(write, PostEvent):
                remaining -= 1
        if refused:
            self._write(status_after_refusal(seen, decision, refused, self.now))
            return True
        if remaining == 0 and decision.status != self.status:
            return False
        self._write(decision.status)
        if decision.after == 0.0 and writes is None:
            return self.reconcile()
        return True

    def _write(self, status: TrainingStatus) -> None:
        if status != self.status:
            self.status, self.writes = status, self.writes + 1

    def apply(self, write) -> RefusedWrite | None:
        match write:
            case PostEvent():
                self.events.append(write)
            case Create(manifest):
                return self._create(write, manifest)
            case Apply(manifest, uid):
                key = manifest["kind"], manifest["metadata"]["name"]
                if key in self.children and self.children[key][0].uid == uid:
                    own_write = OwnWrite("1", self.now, _hash(manifest))
                    child = replace(self.children[key][0], version="1", hash=_hash(manifest), own_write=own_write)
                    self.children[key] = child, manifest
                    self.writes += 1
            case Scale():
                self._scale(write)
            case Delete(kind, name, uid):
                if (kind, name) in self.protected:
                    return RefusedWrite(write, "Forbidden", f"{kind} {name} is protected")
                self._delete(kind, name, uid)
            case RemoveFinalizer(name):
                self.finalizers = tuple(other for other in self.finalizers if other != name)
                self.writes += 1
                if self.deleting and not self.finalizers:
                    self._collect()
        return None

    def _create(self, write: Create, manifest) -> RefusedWrite | None:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        if (kind, name) in self.foreign:
            return RefusedWrite(write, "NameTaken", f"{kind} {name} is not ours")
        if kind == "RayJob":
            if name not in self.jobs:
                self.jobs[name] = self._job(name, manifest)
                self.writes += 1
            return None
        if (kind, name) not in self.children:
            self.children[kind, name] = self._child(kind, name, _hash(manifest)), manifest
            self.writes += 1
        return None

    def _child(self, kind, name, digest) -> Child:
        return Child(kind, name, "team", self._uid(), "1", UID, digest, None, own_write=OwnWrite("1", self.now, digest))

    def _job(self, name, manifest) -> RayJob:
        return RayJob(
            "RayJob",
            name,
            "team",
            self._uid(),
            "1",
            UID,
            _hash(manifest),
            None,
            training="demo",
            attempt=int(manifest["metadata"]["labels"]["rl.qwen35.io/attempt"]),
            spec_hash=manifest["metadata"]["annotations"]["rl.qwen35.io/spec-hash"],
            created=self.now,
            suspended="kueue.x-k8s.io/queue-name" in self.labels,
            deployment="",
            status="",
            reason="",
            message="",
            cluster="",
            queued="kueue.x-k8s.io/queue-name" in manifest["metadata"]["labels"],
            rollout_nodes=sum(
                group["replicas"]
                for group in manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"]
                if group["groupName"] in ("rollout", "lane")
            ),
            image=manifest["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["image"],
            image_reference=manifest["metadata"]["annotations"]["rl.qwen35.io/image"],
            ray_version=manifest["spec"]["rayClusterSpec"]["rayVersion"],
            update_request=manifest["metadata"]["annotations"].get("rl.qwen35.io/update", ""),
        )

    def _scale(self, scale: Scale) -> None:
        cluster = self.clusters[scale.cluster]
        group = cluster.groups[scale.index]
        if (cluster.uid, group.name, group.replicas) != (scale.uid, scale.group, scale.current_replicas):
            return
        group = replace(
            group,
            replicas=scale.replicas,
            min_replicas=scale.min_replicas,
            max_replicas=scale.max_replicas,
            leaving=scale.pods_to_delete or group.leaving,
        )
        groups = tuple(group if at == scale.index else item for at, item in enumerate(cluster.groups))
        self.clusters[cluster.name] = replace(cluster, groups=groups)
        self.writes += 1

    def _delete(self, kind, name, uid) -> None:
        if kind == "RayJob" and name in self.jobs and self.jobs[name].uid == uid:
            self.jobs[name] = replace(self.jobs[name], deleting=self.jobs[name].deleting or self.now)
            self.writes += 1
        elif (kind, name) in self.children and self.children[kind, name][0].uid == uid:
            del self.children[kind, name]
            self.writes += 1

    def _uid(self) -> str:
        self.uids += 1
        return f"uid-{self.uids}"

    # KubeRay.

    def kuberay(self) -> None:
        """One round of KubeRay: create clusters for new jobs and pods for groups, delete those of ended jobs."""
        for job in list(self.jobs.values()):
            if job.deleting is not None:
                del self.jobs[job.name]
                self._forget(job)
            elif job.deployment in ("Complete", "Failed"):
                self._forget(job)
            elif not job.suspended:
                self._provision(job)

    def _provision(self, job: RayJob) -> None:
        name = job.cluster or f"{job.name}-cluster-{self._uid()}"
        if not job.cluster:
            self.jobs[job.name] = replace(job, cluster=name, deployment="Initializing")
        if name not in self.clusters:
            nodes = parse_control(self.children["ConfigMap", control_name("demo")][1]["data"]["control.json"])
            lane = self.spec.get("rollout", {}).get("stragglerLane", {}).get("nodes", 0)
            groups = (
                WorkerGroup("rollout", nodes.rolloutNodes - lane, 1, 4, ()),
                *([WorkerGroup("lane", lane, lane, lane, ())] if lane else []),
                WorkerGroup("train", 2, 2, 2, ()),
            )
            self.clusters[name] = RayCluster(
                "RayCluster",
                name,
                "team",
                self._uid(),
                "1",
                job.uid,
                None,
                None,
                training="demo",
                attempt=job.attempt,
                created=self.now,
                state="",
                failure="",
                groups=groups,
                autoscaled=False,
            )
        cluster = self.clusters[name]
        for pool, count in (("head", 1), *((group.name, group.replicas) for group in cluster.groups)):
            leaving = next((g.leaving for g in cluster.groups if g.name == pool), ())
            self._fill(name, job.attempt, pool, count, leaving)
        own_pods = [pod for pod in self.pods.values() if pod.cluster == name]
        if all(pod.ready for pod in own_pods) and self.jobs[job.name].deployment == "Initializing":
            self.clusters[name] = replace(cluster, state="ready")
            self.jobs[job.name] = replace(self.jobs[job.name], deployment="Running", status="RUNNING")

    def _fill(self, cluster, attempt, group, count, leaving) -> None:
        lane, pool = group == "lane", "rollout" if group == "lane" else group
        identity = attempt, pool, lane
        own_pods = sorted(
            (
                pod
                for pod in self.pods.values()
                if pod.cluster == cluster and (pod.attempt, pod.pool, pod.lane) == identity
            ),
            key=lambda pod: pod.name,
        )
        while len(own_pods) > count:
            victim = next((pod for pod in own_pods if pod.name in leaving), own_pods[0])
            own_pods.remove(victim)
            del self.pods[victim.name]
        for pod in own_pods:
            self.pods[pod.name] = replace(pod, phase="Running", ready=not pod.reason, image_id=self.image_id)
        for _ in range(count - len(own_pods)):
            self.pod_count += 1
            name = f"demo-{attempt}-{group}-{self.pod_count}"
            since = self.now
            self.pods[name] = Pod(
                name,
                "team",
                self._uid(),
                "1",
                "demo",
                *identity,
                "Pending",
                False,
                since,
                None,
                "",
                None,
                "",
                f"node-of-{name}",
                cluster=cluster,
            )

    def delete_failed_pods(self) -> None:
        """KubeRay deletes pods that have failed, because containers never restart in them. Its next round creates others
        (`shouldDeletePod` in KubeRay's raycluster_controller.go)."""
        self.pods = {name: pod for name, pod in self.pods.items() if not pod.reason}

    def _forget(self, job: RayJob) -> None:
        self.clusters = {name: item for name, item in self.clusters.items() if item.attempt != job.attempt}
        self.pods = {name: item for name, item in self.pods.items() if item.attempt != job.attempt}

    def finish_job(self, *, ok: bool, reason: str = "", message: str = "") -> None:
        """End the newest RayJob, whatever the trainer reported."""
        name = max(self.jobs, key=lambda name: self.jobs[name].attempt)
        status, deployment = ("SUCCEEDED", "Complete") if ok else ("FAILED", "Failed")
        self.jobs[name] = replace(
            self.jobs[name],
            status=status,
            deployment=deployment,
            reason=reason or ("" if ok else "AppFailed"),
            message=message,
        )

    def fault(self, pool: str, reason: str, exit_code: int | None = None) -> str:
        """Make the first pod of the newest attempt's pool fail. Returns its name."""
        newest = max(pod.attempt for pod in self.pods.values())
        name = min(pod.name for pod in self.pods.values() if (pod.attempt, pod.pool) == (newest, pool))
        self.pods[name] = replace(self.pods[name], ready=False, reason=reason, exit_code=exit_code, message="seen")
        return name

    # The queue.

    def admit(self) -> None:
        """Kueue admits the newest RayJob, and KubeRay resumes it."""
        name = max(self.jobs, key=lambda name: self.jobs[name].attempt)
        self.jobs[name] = replace(self.jobs[name], suspended=False, deployment="", cluster="")
        self.settle(4)

    def evict(self, *, report: dict | None = None) -> None:
        """Kueue evicts the newest RayJob, whose trainer reports this before its cluster is gone."""
        name = max(self.jobs, key=lambda name: self.jobs[name].attempt)
        self.jobs[name] = replace(self.jobs[name], suspended=True)
        self.reconcile()
        self.jobs[name] = replace(self.jobs[name], deployment="Suspending")
        self.reconcile()
        if report is not None:
            self.report(**report)
            self.reconcile()
        self._forget(self.jobs[name])
        self.jobs[name] = replace(self.jobs[name], deployment="Suspended", status="", cluster="")
        self.reconcile()

    # The trainer.

    def report(self, state="Running", *, attempt: int | None = None, **fields) -> None:
        number = attempt or max(job.attempt for job in self.jobs.values())
        before = (
            {} if self.progress is None else self.progress.model_dump(exclude={"state", "stopAcknowledged", "reason"})
        )
        heads = [name for name, pod in self.pods.items() if (pod.attempt, pod.pool) == (number, "head")]
        clusters = [name for name, cluster in self.clusters.items() if cluster.attempt == number]
        report = {"attempt": number, "state": state, "time": self.now.timestamp(), "head": heads[0] if heads else None}
        if clusters:  # a trainer that outlives its cluster still knows its name
            report["cluster"] = clusters[-1]
        self.progress = ProgressReport.model_validate(before | report | fields)
        self.written = self.now

    @property
    def order(self):
        control = self.observe().control
        return None if control is None else control.stop

    def order_to_stop(self, order: StopOrder | None) -> None:
        """Write an order as somebody does who may write the namespace's ConfigMaps: only the data change."""
        key = "ConfigMap", control_name("demo")
        child, manifest = self.children[key]
        text = Control(attempt=self.status.attempts[-1].number, stop=order).text()
        self.children[key] = child, manifest | {"data": {CONTROL_KEY: text}}

    def obey(self, *, update: int = 7) -> None:
        """Report that the trainer saved and stopped as ordered."""
        saved = CheckpointReport(uri="/checkpoints/update-000007", update=update, time=self.now.timestamp())
        self.report("Stopped", stopAcknowledged=self.order.id, checkpoint=saved, update=update)

    # Time.

    def wait(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    def settle(self, rounds: int = 12) -> None:
        """Let operator and KubeRay take turns, one second each."""
        for _ in range(rounds):
            self.reconcile()
            self.kuberay()
            self.wait(1)
        self.reconcile()

    def until_running(self) -> None:
        self.settle(4)
        self.report(update=1, version=1)
        self.reconcile()
        assert self.status.state == "Running"

    # Queries of tests.

    def condition(self, kind: str):
        return next(item for item in self.status.conditions if item.type == kind)

    def is_true(self, kind: str) -> bool:
        return self.condition(kind).status == "True"

    def spent(self) -> dict:
        """The state that must be the same after any crash: objects and status, without times and uids."""
        status = json.loads(self.status.model_dump_json(exclude_none=True))
        for item in status.get("conditions", []):
            item.pop("lastTransitionTime")
        for attempt in status.get("attempts", []):
            for name in ("startTime", "endTime", "activeSince", "activeSeconds"):
                attempt.pop(name, None)
            attempt.get("stop", {}).pop("time", None)
        status.pop("activeSeconds", None), status.get("progress", {}).pop("time", None)
        return {
            "status": status,
            "children": sorted(self.children),
            "jobs": sorted((job.name, job.deployment) for job in self.jobs.values()),
            "groups": sorted((g.name, g.replicas) for c in self.clusters.values() for g in c.groups),
            "stops": None if self.order is None else self.order.reason,
        }


def _hash(manifest):
    return manifest["metadata"].get("annotations", {}).get("rl.qwen35.io/hash")


__all__ = ["START", "World", "progress_name"]

"""Kueue, as far as a RayJob shows it: it suspends the job at its creation, admits it, and preempts it for a more important one.

    RayJob created ─► suspended ─► Workload ─► quota reserved ─► resumed ─► runs ─► finished
                          ▲                         ▲                        │
                          │                         └── requeued, in its place
                          └──────── suspended again ◄── evicted: preempted ──┘

Every step names the function of Kueue that it follows: repository kubernetes-sigs/kueue at df7e05b844e0, folder pkg/, and the number
of the step in ReconcileGenericJob (controller/jobframework/reconciler.go). Left out: several queues and cohorts, flavors of
resources except their node labels, partial admission, admission checks, waitForPodsReady, topologies, MultiKueue, and the
RayCluster that KubeRay makes, which Kueue leaves to its job. Quota is counted in pods. No test has run against Kueue itself.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from tests.virtual.api_server import ApiServer
from tests.virtual.controllers import Controller, resource
from tests.virtual.resources import Resource
from tests.virtual.stored_objects import Stored

QUEUE = "kueue.x-k8s.io/queue-name"
PRIORITY_CLASS = "kueue.x-k8s.io/priority-class"
FLAVOR = {"kubernetes.io/os": "linux"}
"""Labels of the nodes of the only ResourceFlavor."""
FINAL = ("Complete", "Failed")


class Kueue(Controller):
    """One ClusterQueue with one LocalQueue of any name. pods: its quota. priorities: value of each WorkloadPriorityClass."""

    kinds = ("rayjobs", "workloads")

    def __init__(self, server: ApiServer, *, pods: int, priorities: Mapping[str, int] | None = None) -> None:
        super().__init__(server)
        self._pods = pods
        self._priorities = priorities or {}
        server.admission.append(self.admit_creation)

    def admit_creation(self, kind: Resource, body: dict[str, Any]) -> None:
        """The webhook: ApplyDefaultForSuspend in controller/jobframework/defaults.go, and RayJobWebhook.validateCreate."""
        if kind.plural != "rayjobs" or QUEUE not in body["metadata"].get("labels", {}):
            return
        assert body["spec"]["shutdownAfterJobFinishes"], "a kueue managed job should delete the cluster after finishing"
        assert not body["spec"].get("clusterSelector"), "a kueue managed job should not use an existing cluster"
        cluster = body["spec"]["rayClusterSpec"]
        assert not cluster.get("enableInTreeAutoscaling"), "autoscaling needs workload slicing"
        assert len(cluster["workerGroupSpecs"]) <= 7
        body["spec"]["suspend"] = True

    def look(self) -> None:
        for job in self.of("rayjobs"):
            if QUEUE in job.metadata.get("labels", {}) and "deletionTimestamp" not in job.metadata:
                self._reconcile(job)
        self._schedule()

    # ReconcileGenericJob: the numbers are those of its comments.

    def _reconcile(self, job: Stored) -> None:
        workload = self._workload(job)  # 1: ensureOneWorkload
        suspended, deployment = job.body["spec"].get("suspend", False), _deployment(job)
        if deployment in FINAL:  # 2
            if workload is not None:
                self._set(workload, Finished=("True", "Succeeded" if deployment == "Complete" else "Failed"))
        elif workload is None:  # 3
            self._without_workload(job)
        elif _is(workload, "Evicted"):  # 6
            self._suspend(job, workload)
            if _is(workload, "QuotaReserved") and deployment == "Suspended":
                requeued = {"Requeued": ("True", _reason(workload, "Evicted"))}
                self._set(workload, QuotaReserved=("False", "Pending"), Admitted=("False", "NoReservation"), **requeued)
        elif suspended and _is(workload, "Admitted"):  # 7: startJob
            self._resume(job)
        elif not suspended and not _is(workload, "Admitted"):  # 8
            self._suspend(job, workload)

    def _without_workload(self, job: Stored) -> None:
        """ensureOneWorkload, which stops a job that nothing has admitted, and handleJobWithNoWorkload."""
        if not job.body["spec"].get("suspend"):
            self._suspend(job, None)
        elif _deployment(job) == "Suspended":  # RayJob.IsActive is false
            self._create_workload(job)

    def _create_workload(self, job: Stored) -> None:
        """Do what constructWorkload, prepareWorkload and RayJob.PodSets do."""
        labels = job.metadata["labels"]
        owner = {"apiVersion": "ray.io/v1", "kind": "RayJob", "name": job.metadata["name"], "uid": job.metadata["uid"]}
        sets = [
            {"name": name, "count": count, "template": group["template"]} for name, count, group in _groups(job.body)
        ]
        priority = self._priorities.get(labels.get(PRIORITY_CLASS, ""), 0)
        metadata = {
            "name": f"rayjob-{job.metadata['name']}-{job.metadata['uid'][:5]}",
            "ownerReferences": [owner | {"controller": True}],
        }
        spec = {"podSets": sets, "queueName": labels[QUEUE], "priority": priority}
        self.server.create(
            resource("workloads"), job.metadata["namespace"], {"metadata": metadata, "spec": spec}, manager="kueue"
        )

    def _suspend(self, job: Stored, workload: Stored | None) -> None:
        """Do what stopJob and RayJob.RestorePodSetsInfo do: the templates become those of the Workload again."""
        if job.body["spec"].get("suspend"):
            return
        body = job.copy()
        body["spec"]["suspend"] = True
        if workload is not None:
            sets = {item["name"]: item["template"] for item in workload.copy()["spec"]["podSets"]}
            for name, _, group in _groups(body):
                group["template"] = sets[name]
        self.server.replace(job, body, manager="kueue")

    def _resume(self, job: Stored) -> None:
        """Do what startJob, RayJob.RunWithPodSetsInfo and podset.Merge do: the pods go to nodes of the flavor."""
        body = job.copy()
        body["spec"]["suspend"] = False
        for _, _, group in _groups(body):
            spec = group["template"]["spec"]
            spec["nodeSelector"] = {**spec.get("nodeSelector", {}), **FLAVOR}
        self.server.replace(job, body, manager="kueue")

    # The scheduler.

    def _schedule(self) -> None:
        """Do what scheduler/scheduler.go does, with the queueing strategy BestEffortFIFO.

        Workloads are ordered by priority, then by GetQueueOrderTimestamp (workload/workload.go): for a preempted one, its creation.
        """
        for workload in sorted(
            self._pending(), key=lambda item: (-_priority(item), item.metadata["creationTimestamp"])
        ):
            free = self._pods - sum(_count(item) for item in self._reserving())
            if _count(workload) <= free:
                self._reserve(workload)
            elif self._preempt(workload, _count(workload) - free):
                return  # it is admitted when their pods are gone

    def _reserve(self, workload: Stored) -> None:
        """Do what SetQuotaReservation and SyncAdmittedCondition (workload/workload.go, admissionchecks.go) do."""
        reset = {kind: ("False", "QuotaReserved") for kind in ("Evicted", "Preempted") if _is(workload, kind)}
        self._set(workload, QuotaReserved=("True", "QuotaReserved"), Admitted=("True", "Admitted"), **reset)

    def _preempt(self, preemptor: Stored, missing: int) -> bool:
        """Do what IssuePreemptions (scheduler/preemption/preemption.go) does with withinClusterQueue: LowerPriority.

        Returns whether the preemptor may wait for pods to end.
        """
        candidates = [item for item in self._reserving() if _priority(item) < _priority(preemptor)]
        if sum(_count(item) for item in candidates) < missing:
            return False
        for victim in sorted(candidates, key=_priority):
            if missing > 0 and not _is(victim, "Evicted"):
                self._set(victim, Evicted=("True", "Preempted"), Preempted=("True", "InClusterQueue"))
            missing -= _count(victim)
        return True

    def _pending(self) -> list[Stored]:
        return [item for item in self.of("workloads") if not _is(item, "QuotaReserved") and not _is(item, "Finished")]

    def _reserving(self) -> list[Stored]:
        return [item for item in self.of("workloads") if _is(item, "QuotaReserved") and not _is(item, "Finished")]

    # Workloads.

    def _workload(self, job: Stored) -> Stored | None:
        uid = job.metadata["uid"]
        own = (
            item
            for item in self.of("workloads", job.metadata["namespace"])
            if any(owner["uid"] == uid for owner in item.metadata.get("ownerReferences", ()))
        )
        return next(own, None)

    def _set(self, workload: Stored, **changes: tuple[str, str]) -> None:
        """Set conditions: their status and reason by type."""
        current = self.server.stored(*workload.key)
        conditions = {item["type"]: item for item in _conditions(current)}
        for kind, (status, reason) in changes.items():
            old = conditions.get(kind, {})
            if (old.get("status"), old.get("reason")) != (status, reason):
                conditions[kind] = {
                    "type": kind,
                    "status": status,
                    "reason": reason,
                    "lastTransitionTime": self.server.now,
                }
        self.write_status(current, {**current.body.get("status", {}), "conditions": list(conditions.values())})


def _groups(job: Mapping[str, Any]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Name, number of pods and group of each pod set of a RayJob's body."""
    cluster = job["spec"]["rayClusterSpec"]
    yield "head", 1, cluster["headGroupSpec"]
    for group in cluster["workerGroupSpecs"]:
        yield group["groupName"].lower(), int(group.get("replicas", 1)), group


def _deployment(job: Stored) -> str:
    return str((job.body.get("status") or {}).get("jobDeploymentStatus", ""))


def _conditions(workload: Stored) -> list[dict[str, Any]]:
    return list(workload.body.get("status", {}).get("conditions", ()))


def _is(workload: Stored, kind: str) -> bool:
    return any(item["type"] == kind and item["status"] == "True" for item in _conditions(workload))


def _reason(workload: Stored, kind: str) -> str:
    return next(str(item["reason"]) for item in _conditions(workload) if item["type"] == kind)


def _priority(workload: Stored) -> int:
    return int(workload.body["spec"].get("priority", 0))


def _count(workload: Stored) -> int:
    return sum(int(item["count"]) for item in workload.body["spec"]["podSets"])

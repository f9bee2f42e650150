"""KubeRay, as far as objects show it: RayJob → RayCluster → pods, and back into the statuses.

    RayJob:  "" ─► Initializing ─► Running ─► Complete or Failed (the cluster goes)
                        │             │
                        └─ suspend ───┴─► Suspending (the cluster goes) ─► Suspended ─► ""

The steps are those of KubeRay 1.6.1: rayjob_controller.go (Reconcile) and raycluster_controller.go (reconcilePods,
calculateStatus). Left out: Services, submitters other than HTTPMode, autoscaling, groups of several hosts, batch schedulers.
"""

import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from tests.virtual.controllers import Controller, resource
from tests.virtual.stored_objects import Stored

FINALIZER = "ray.io/rayjob-finalizer"
FINAL = ("STOPPED", "SUCCEEDED", "FAILED")


class JobInfo(NamedTuple):
    """What Ray's dashboard says about a job."""

    status: str
    message: str


class Dashboards(Protocol):
    """The dashboards of all Ray clusters."""

    def find(self, cluster: str, job_id: str) -> JobInfo | None: ...

    def submit(self, cluster: str, job_id: str) -> None: ...

    def stop(self, cluster: str, job_id: str) -> None: ...


class RayJobs(Controller):
    """The controller of RayJobs. dashboards: None while nobody answers for head pods."""

    kinds = ("rayjobs", "rayclusters")
    again = 3.0

    dashboards: Dashboards | None = None

    def look(self) -> None:
        for job in self.of("rayjobs"):
            if "deletionTimestamp" in job.metadata:
                self._finalize(job)
            else:
                self._step(job)

    def _finalize(self, job: Stored) -> None:
        status = job.body.get("status") or {}
        if self.dashboards is not None and status.get("jobStatus") not in FINAL and status.get("jobId"):
            self.dashboards.stop(status["rayClusterName"], status["jobId"])
        body = job.copy()
        body["metadata"]["finalizers"] = [name for name in body["metadata"].get("finalizers", []) if name != FINALIZER]
        self.server.replace(job, body, manager="kuberay-operator")

    def _step(self, job: Stored) -> None:
        status, suspended = dict(job.body.get("status") or {}), job.body["spec"].get("suspend", False)
        match status.get("jobDeploymentStatus", ""):
            case "":
                self._begin(job, status)
            case "Initializing" | "Running" if suspended:
                self._write(job, status | {"jobDeploymentStatus": "Suspending"})
            case "Initializing":
                self._provision(job, status)
            case "Running":
                self._ask(job, status)
            case "Suspending":
                if self._cluster_is_gone(job):
                    self._write(job, {"jobStatus": "", "jobDeploymentStatus": "Suspended", "rayClusterStatus": {}})
            case "Suspended" if not suspended:
                self._write(job, status | {"jobStatus": "", "jobDeploymentStatus": ""})
            case "Complete" | "Failed" if job.body["spec"].get("shutdownAfterJobFinishes"):
                self._cluster_is_gone(job)

    def _begin(self, job: Stored, status: dict[str, Any]) -> None:
        """Add the finalizer, and name the cluster and the job."""
        if FINALIZER not in job.metadata.get("finalizers", ()):
            body = job.copy()
            body["metadata"].setdefault("finalizers", []).append(FINALIZER)
            # It writes the whole object, and its own types have this field.
            for group in body["spec"].get("rayClusterSpec", {}).get("workerGroupSpecs", []):
                group.setdefault("scaleStrategy", {})
            self.server.replace(job, body, manager="kuberay-operator")
            job = self.server.stored(*job.key)
        name, spec = job.metadata["name"], job.body["spec"]
        chosen = (spec.get("clusterSelector") or {}).get("ray.io/cluster")
        begun = {
            "jobId": spec.get("jobId") or f"{name}-{secrets.token_hex(3)[:5]}",
            "rayClusterName": chosen or f"{name}-{secrets.token_hex(3)[:5]}",
            "jobStatus": "",
            "jobDeploymentStatus": "Initializing",
            "startTime": self.server.now,
        }
        self._write(job, status | begun)

    def _provision(self, job: Stored, status: dict[str, Any]) -> None:
        cluster = self._cluster(job)
        if cluster is None:
            return
        own = dict(cluster.body.get("status") or {})
        if own.get("state") != "ready":
            self._write(job, status | {"rayClusterStatus": own})
            return
        url = f"{cluster.metadata['name']}-head-svc.{job.metadata['namespace']}.svc.cluster.local:8265"
        self._write(job, status | {"dashboardURL": url, "jobDeploymentStatus": "Running"})

    def _ask(self, job: Stored, status: dict[str, Any]) -> None:
        cluster = self._cluster(job)
        if cluster is None or self.dashboards is None:
            return
        name = status["rayClusterName"]
        if (info := self.dashboards.find(name, status["jobId"])) is None:
            self.dashboards.submit(name, status["jobId"])
            return
        changed = {"jobStatus": info.status, "message": info.message, "rayClusterStatus": cluster.body.get("status")}
        if info.status in FINAL:
            failed = info.status == "FAILED"
            changed["jobDeploymentStatus"] = "Failed" if failed else "Complete"
            changed |= {"reason": "AppFailed"} if failed else {}
            changed["endTime"] = self.server.now
        self._write(job, status | changed)

    def _cluster(self, job: Stored) -> Stored | None:
        """Return the job's cluster, which is created if there is none; None if the job names a cluster that does not exist."""
        kind, (_, namespace, name) = resource("rayclusters"), job.key
        cluster_name = job.body["status"]["rayClusterName"]
        if (cluster := self.server.objects.find(kind, namespace, cluster_name)) is not None:
            return cluster
        if job.body["spec"].get("clusterSelector"):
            return None
        origin = {"ray.io/originated-from-cr-name": name, "ray.io/originated-from-crd": "RayJob"}
        metadata = {
            "name": cluster_name,
            "labels": {**job.metadata.get("labels", {}), **origin, "ray.io/job-submission-mode": "HTTPMode"},
            "annotations": dict(job.metadata.get("annotations", {})),
            "ownerReferences": [_controller(job)],
        }
        body = {"metadata": metadata, "spec": job.copy()["spec"]["rayClusterSpec"]}
        self.server.create(kind, namespace, body, manager="kuberay-operator")
        return self.server.stored(kind, namespace, cluster_name)

    def _cluster_is_gone(self, job: Stored) -> bool:
        """Delete the job's cluster. Returns whether it is gone."""
        name = job.body["status"].get("rayClusterName", "")
        cluster = self.server.objects.find(resource("rayclusters"), job.metadata["namespace"], name)
        if cluster is not None:
            self.delete(cluster)
        return cluster is None

    def _write(self, job: Stored, status: dict[str, Any]) -> None:
        """Write the status if what KubeRay compares has changed (updateRayJobStatus)."""
        old = job.body.get("status") or {}
        names = ("jobStatus", "jobDeploymentStatus", "rayClusterStatus")
        if any((old.get(name) or "") != (status.get(name) or "") for name in names):
            self.write_status(job, status)


class RayClusters(Controller):
    """The controller of RayClusters."""

    kinds = ("rayclusters", "pods")

    def look(self) -> None:
        for cluster in self.of("rayclusters"):
            healthy = self._reconcile_pods(cluster)
            self.write_status(cluster, self._status(cluster, healthy=healthy))

    def _pods(self, cluster: Stored, group: str | None = None) -> list[Stored]:
        wanted = {"ray.io/cluster": cluster.metadata["name"]} | ({} if group is None else {"ray.io/group": group})
        pods = self.of("pods", cluster.metadata["namespace"])
        return [pod for pod in pods if wanted.items() <= (pod.metadata.get("labels") or {}).items()]

    def _reconcile_pods(self, cluster: Stored) -> bool:
        """Create and delete pods. Returns whether none had to be deleted because it had ended."""
        heads = self._pods(cluster, "headgroup")
        if not heads:
            self._create(cluster, cluster.body["spec"]["headGroupSpec"], "head", "headgroup")
        elif _ended(heads[0]):
            self.delete(heads[0])
            return False
        return all(self._reconcile_group(cluster, group) for group in cluster.body["spec"].get("workerGroupSpecs", ()))

    def _reconcile_group(self, cluster: Stored, group: Mapping[str, Any]) -> bool:
        pods = self._pods(cluster, group["groupName"])
        if ended := [pod for pod in pods if _ended(pod)]:
            for pod in ended:
                self.delete(pod)
            return False
        chosen = (group.get("scaleStrategy") or {}).get("workersToDelete") or ()
        for pod in (pod for pod in pods if pod.metadata["name"] in chosen):
            self.delete(pod)
        staying = [pod for pod in pods if pod.metadata["name"] not in chosen]
        missing = _desired(group) - len(staying)
        for _ in range(missing):
            self._create(cluster, group, "worker", group["groupName"])
        for pod in staying[: max(-missing, 0)]:
            self.delete(pod)
        return True

    def _create(self, cluster: Stored, group: Mapping[str, Any], node_type: str, name: str) -> None:
        own = {"ray.io/cluster": cluster.metadata["name"], "ray.io/node-type": node_type, "ray.io/group": name}
        own |= {"ray.io/is-ray-node": "yes", "app.kubernetes.io/created-by": "kuberay-operator"}
        prefix = cluster.metadata["name"] + ("-head-" if node_type == "head" else f"-{name}-worker-")
        template = group["template"]
        metadata = {
            "generateName": prefix,
            "labels": {**template.get("metadata", {}).get("labels", {}), **group.get("labels", {}), **own},
            "annotations": dict(template.get("metadata", {}).get("annotations", {})),
            "ownerReferences": [_controller(cluster)],
        }
        body = {"metadata": metadata, "spec": template["spec"]}
        self.server.create(resource("pods"), cluster.metadata["namespace"], body, manager="kuberay-operator")

    def _status(self, cluster: Stored, *, healthy: bool) -> dict[str, Any]:
        groups = cluster.body["spec"].get("workerGroupSpecs", ())
        pods, desired = self._pods(cluster), sum(_desired(group) for group in groups)
        running = bool(pods) and all(_runs(pod) for pod in pods)
        status = dict(cluster.body.get("status") or {})
        status |= {
            "observedGeneration": cluster.metadata["generation"],
            "desiredWorkerReplicas": desired,
            "readyWorkerReplicas": sum(_runs(pod) and not _is_head(pod) for pod in pods),
            "availableWorkerReplicas": sum(_phase(pod) == "Running" and not _is_head(pod) for pod in pods),
        }
        if healthy and running and len(pods) == desired + 1:
            status["state"] = "ready"
        head = next((pod for pod in pods if _is_head(pod)), None)
        old = {condition["type"]: condition for condition in status.get("conditions", ())}
        provisioned = running or old.get("RayClusterProvisioned", {}).get("status") == "True"
        conditions = {"HeadPodReady": head is not None and _runs(head), "RayClusterProvisioned": provisioned}
        status["conditions"] = [self._condition(old.get(kind), kind, is_true) for kind, is_true in conditions.items()]
        return status

    def _condition(self, old: Mapping[str, Any] | None, kind: str, is_true: bool) -> dict[str, Any]:
        status = str(is_true)
        if old is not None and old["status"] == status:
            return dict(old)
        return {"type": kind, "status": status, "reason": kind, "message": "", "lastTransitionTime": self.server.now}


def _controller(owner: Stored) -> dict[str, Any]:
    return {
        "apiVersion": owner.resource.api_version,
        "kind": owner.resource.kind,
        "name": owner.metadata["name"],
        "uid": owner.metadata["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def _desired(group: Mapping[str, Any]) -> int:
    """The number of pods of a group: its replicas, within its bounds."""
    return int(min(max(group.get("replicas", 0), group.get("minReplicas", 0)), group.get("maxReplicas", 2**31)))


def _phase(pod: Stored) -> str:
    return str((pod.body.get("status") or {}).get("phase", "Pending"))


def _runs(pod: Stored) -> bool:
    conditions = (pod.body.get("status") or {}).get("conditions", ())
    return _phase(pod) == "Running" and all(item["status"] == "True" for item in conditions if item["type"] == "Ready")


def _is_head(pod: Stored) -> bool:
    return bool(pod.metadata["labels"]["ray.io/node-type"] == "head")


def _ended(pod: Stored) -> bool:
    """Whether KubeRay deletes the pod because it, or its first container, has ended (shouldDeletePod)."""
    first = pod.body["spec"]["containers"][0]["name"]
    containers = (pod.body.get("status") or {}).get("containerStatuses", ())
    terminated = any(item["name"] == first and "terminated" in item.get("state", {}) for item in containers)
    never = pod.body["spec"].get("restartPolicy") == "Never"
    return _phase(pod) in ("Failed", "Succeeded") or (_phase(pod) == "Running" and terminated and never)

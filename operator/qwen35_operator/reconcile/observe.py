"""What is: from the stores, the training's body, and at most one live read."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from qwen35_operator.api.training import Training
from qwen35_operator.api.v1alpha1 import TrainingStatus
from qwen35_operator.desired.config import KEPT
from qwen35_operator.desired.queueing import handed_on
from qwen35_operator.kube.client import Client
from qwen35_operator.kube.cluster import Cluster
from qwen35_operator.kube.errors import NotFound
from qwen35_operator.kube.kinds import CONFIG_MAP, POD, RAY_CLUSTER, RAY_JOB
from qwen35_operator.kube.parse import Message, control, record, reported
from qwen35_operator.reconcile.attempts import OVER
from qwen35_operator.reconcile.observed import Child, ChildKey, Observed, Pod, RayCluster, RayJob
from qwen35_operator.status.times import parse as time
from qwen35_trainer.contract.names import control_name, progress_name
from qwen35_trainer.spec import Problem, TrainingSpec, parse_spec

FINISHED = ("SUCCEEDED", "FAILED", "STOPPED")


class Parsed:
    """The trainings seen last, read: most reconciles are about a child, and find the very same one."""

    def __init__(self, size: int = KEPT) -> None:
        self._size = size
        self._known: dict[str, tuple[list[object], Training | None, tuple[Problem, ...]]] = {}

    def of(self, raw: Mapping[str, Any]) -> tuple[Training | None, tuple[Problem, ...]]:
        """The training, or what is wrong with its spec."""
        about = raw["metadata"]
        given = [handed_on(about.get(part, {})) for part in ("labels", "annotations")]
        state = [about["generation"], *given]
        known = self._known.pop(about["uid"], None)
        if known is None or known[0] != state:
            spec, problems = parse_spec(raw.get("spec", {}))
            training = None if problems or spec is None else _training(about, spec, *given)
            known = state, training, tuple(problems)
        self._known[about["uid"]] = known  # the youngest now
        while len(self._known) > self._size:
            del self._known[next(iter(self._known))]
        return known[1:]


async def observe(raw: Mapping[str, Any], cluster: Cluster, parsed: Parsed, client: Client) -> Observed:
    """Everything that a decision about this training may look at. Raises ApiError when the live read fails."""
    about = raw["metadata"]
    key, uid, created = (about["namespace"], about["name"]), about["uid"], time(about["creationTimestamp"])
    training, problems = parsed.of(raw)
    jobs = [job for job in cluster.stores[RAY_JOB].of(key) if isinstance(job, RayJob) and job.owner == uid]
    children = _children(cluster, key, uid)
    progress = children.get(("ConfigMap", progress_name(about["name"])))
    progress = await _last_word(progress, jobs, client)
    order = children.get(("ConfigMap", control_name(about["name"])))
    return Observed(
        training=training,
        name=about["name"],
        namespace=about["namespace"],
        uid=uid,
        generation=about["generation"],
        version=about["resourceVersion"],
        created=created,
        deleting="deletionTimestamp" in about,
        status=TrainingStatus.model_validate(raw.get("status") or {}),
        problems=problems,
        unavailable=cluster.problems(about["namespace"]),
        children=children,
        jobs=tuple(jobs),
        clusters=_clusters(cluster, key, {job.uid for job in jobs}),
        pods=_pods(cluster, key, created),
        reported=reported(progress) if isinstance(progress, Message) else None,
        control=control(order) if isinstance(order, Message) else None,
    )


def _training(
    about: Mapping[str, Any], spec: TrainingSpec, labels: Mapping[str, str], annotations: Mapping[str, str]
) -> Training:
    return Training(
        name=about["name"],
        namespace=about["namespace"],
        uid=about["uid"],
        generation=about["generation"],
        spec=spec,
        labels=labels,
        annotations=annotations,
    )


def _children(cluster: Cluster, key: tuple[str, str], uid: str) -> dict[ChildKey, Child]:
    others = (store for kind, store in cluster.stores.items() if kind not in (RAY_JOB, RAY_CLUSTER, POD))
    found = [child for store in others for child in store.of(key)]
    return {(child.kind, child.name): child for child in found if isinstance(child, Child) and child.owner == uid}


def _clusters(cluster: Cluster, key: tuple[str, str], jobs: set[str]) -> tuple[RayCluster, ...]:
    """Clusters of the training; those whose RayJob is no longer ours belong to no attempt, and are in its way."""
    found = [one for one in cluster.stores[RAY_CLUSTER].of(key) if isinstance(one, RayCluster)]
    return tuple(one if one.owner in jobs else replace(one, attempt=0) for one in found)


def _pods(cluster: Cluster, key: tuple[str, str], created: datetime) -> tuple[Pod, ...]:
    """Pods of the training; those of an earlier training of its name belong to no attempt."""
    found = [pod for pod in cluster.stores[POD].of(key) if isinstance(pod, Pod)]
    return tuple(pod if pod.created >= created else replace(pod, attempt=0) for pod in found)


async def _last_word(progress: Child | None, jobs: list[RayJob], client: Client) -> Child | None:
    """`-progress`, read anew when a job is over and its report does not say so: success must not hang on a late watch."""
    newest = max(jobs, key=lambda job: job.attempt, default=None)
    if not isinstance(progress, Message) or newest is None:
        return progress
    if newest.deployment not in OVER and newest.status not in FINISHED:
        return progress
    known = reported(progress)
    if known is not None and known.progress is not None:
        report = known.progress
        if report.attempt > newest.attempt or (report.attempt == newest.attempt and report.state != "Running"):
            return progress
    try:
        raw = await client.get(CONFIG_MAP.path(progress.namespace, progress.name))
    except NotFound:
        return None
    fresh = record(CONFIG_MAP, raw)
    return fresh if isinstance(fresh, Child) and fresh.owner == progress.owner else None

"""Collects the input of a decision.

The input is the training's object and the cached records of its child objects. Some decisions also need requests to the
API server: for a report by which an attempt may end, and for nodes with pods that hold up the next attempt.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, NamedTuple

from qwen35_operator.api.training_resource import TrainingResource
from qwen35_operator.api.v1alpha1 import TrainingStatus
from qwen35_operator.desired import object_names
from qwen35_operator.desired.object_names import FORCE_START, RETRY, UPDATE
from qwen35_operator.desired.objects import KubeObject
from qwen35_operator.desired.problem_limits import first_problems
from qwen35_operator.desired.queueing import copied_to_job
from qwen35_operator.kube.api_errors import Forbidden, NotFound
from qwen35_operator.kube.client import Client
from qwen35_operator.kube.kinds import CONFIG_MAP, NODE, POD, RAY_CLUSTER, RAY_JOB
from qwen35_operator.kube.object_cache import ObjectCache
from qwen35_operator.kube.object_parsing import MAX_REQUEST_CHARACTERS, record
from qwen35_operator.kube.object_records import Child, MessageConfigMap, OwnWrite, Pod, RayCluster, RayJob
from qwen35_operator.kube.store import TrainingKey
from qwen35_operator.kube.trainings import (
    LEFT_OUT,
    MAX_NEW_PODS_BYTES,
    MAX_SPEC_BYTES,
    MAX_SPEC_DEPTH,
    OVERSIZED,
    OVERSIZED_PODS,
    TOO_DEEP,
)
from qwen35_operator.reconcile import leftovers, stall
from qwen35_operator.reconcile.drift import Start, drifted
from qwen35_operator.reconcile.observed import ChildKey, NodeState, Observed, ReadReport
from qwen35_operator.status.times import parse as parse_time
from qwen35_trainer.contract import ContractError, Control, parse_control, parse_progress
from qwen35_trainer.contract.shared_names import control_name, history_name, progress_name
from qwen35_trainer.manifest import Problem, TrainingSpec, parse_stored_spec

FINAL_RAY_STATUSES = ("SUCCEEDED", "FAILED", "STOPPED")
"""Values of status.jobStatus that a Ray job never leaves."""
OUT_OF_SERVICE_TAINT = "node.kubernetes.io/out-of-service"
"""Taint by which an administrator confirms that a node does not run: Kubernetes then gives up its pods and volumes."""
MAX_CACHED_BYTES = 4 * 2**20
"""Maximum size of the specs, as JSON, whose parsed trainings are kept: 2,000 of usual specs. A parsed spec takes up to 25 times as
much memory."""


class _Parsed(NamedTuple):
    """The result of parsing one version of a training. size: bytes of its spec as JSON."""

    version: list[object]
    training: TrainingResource | None
    problems: tuple[Problem, ...]
    size: int


class TrainingParser:
    """Parses trainings and keeps the results of the most recently used ones.

    Most reconciles follow a change of a child object and not of the training, so its spec need not be parsed again.
    """

    def __init__(self, max_bytes: int = MAX_CACHED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._parsed: dict[str, _Parsed] = {}

    def parse(self, raw: KubeObject) -> tuple[TrainingResource | None, tuple[Problem, ...]]:
        """Return the training, or None and the problems of its spec.

        Calls for one training return the same object until the training's spec, or one of the labels and annotations
        that RayJobs copy, has changed.
        """
        metadata = raw["metadata"]
        labels, annotations = (copied_to_job(metadata.get(field, {})) for field in ("labels", "annotations"))
        version = [metadata["generation"], labels, annotations, *(raw.get(field) for field in LEFT_OUT)]
        parsed = self._parsed.pop(metadata["uid"], None)
        self._bytes -= 0 if parsed is None else parsed.size
        if parsed is None or parsed.version != version:
            unknown: tuple[str, ...] = ()
            if any(field in raw for field in LEFT_OUT):
                spec, problems = None, [_left_out(raw)]
            else:
                spec, problems, unknown = parse_stored_spec(raw.get("spec", {}))
            training = None
            if spec is not None and not problems:
                training = TrainingResource(
                    name=metadata["name"],
                    namespace=metadata["namespace"],
                    uid=metadata["uid"],
                    generation=metadata["generation"],
                    spec=spec,
                    labels=labels,
                    annotations=annotations,
                    unknown=unknown,
                )
            parsed = _Parsed(version, training, tuple(first_problems(problems)), len(json.dumps(raw.get("spec", {}))))
        self._parsed[metadata["uid"]] = parsed  # inserted again, as the most recently used
        self._bytes += parsed.size
        while self._bytes > self._max_bytes and len(self._parsed) > 1:
            self._bytes -= self._parsed.pop(next(iter(self._parsed))).size
        return parsed.training, parsed.problems


def _left_out(raw: KubeObject) -> Problem:
    """Return the problem of a spec that was left out of the stored training."""
    if OVERSIZED in raw:
        message = f"has {raw[OVERSIZED]} bytes as JSON, with the labels for queues, but the operator reads at most {MAX_SPEC_BYTES}."
        fix = "Move data and code out of the manifest, into files, claims or ConfigMaps, and remove labels and annotations for queues."
        return Problem("spec", message, fix)
    if OVERSIZED_PODS in raw:
        message = f"has {raw[OVERSIZED_PODS]} bytes as JSON, but in a new training the operator reads at most {MAX_NEW_PODS_BYTES}."
        return Problem("spec.pods", message, "Move data and code out of the pods, into images, claims or ConfigMaps.")
    message = (
        f"has {raw[TOO_DEEP]} or more levels of objects and lists, but the operator reads at most {MAX_SPEC_DEPTH}."
    )
    return Problem(
        "spec", message, "No field of a pod needs more: look for an object that contains itself in spec.pods."
    )


async def observe(
    raw: KubeObject,
    cache: ObjectCache,
    parser: TrainingParser,
    client: Client,
    *,
    reads_nodes: bool = True,
    reports_since: datetime | None = None,
    known_version: int = 0,
    running: int = 0,
    budget_try: OwnWrite | None = None,
) -> Observed:
    """Collect everything that a decision about this training depends on.

    reads_nodes: whether the operator may read nodes, which no Role of a namespace can grant. reports_since: since when
    this process leads, and reports of trainers can be seen; None if that is unknown. known_version: the resourceVersion up to
    which an earlier leader has usually acted on changes. running: number of all trainings that are Running. budget_try: see `Observed`.
    Raises ApiError if a request to the API server fails.
    """
    metadata = raw["metadata"]
    name, namespace, uid = metadata["name"], metadata["namespace"], metadata["uid"]
    key, created = (namespace, name), parse_time(metadata["creationTimestamp"])
    training, problems = parser.parse(raw)
    jobs = _jobs(cache, key, uid)
    children = _children(cache, key, uid)
    of_trainer = progress_name(name), history_name(name)
    own_children = [child for child in children.values() if child.name not in of_trainer]
    runs = (raw.get("status") or {}).get("state") == "Running"
    start = Start(reports_since, known_version, running) if runs and reports_since is not None else None
    changed, repair_after = drifted(own_children, client.now(), start)
    spec = None if training is None else training.spec
    pods = _pods(cache, key, created)
    newest = max(jobs, key=lambda job: job.attempt, default=None)
    headless = newest is not None and _is_headless(newest, pods)
    cached = children.get(("ConfigMap", progress_name(name)))
    progress = await _newest_report(cached, newest, spec, client, reports_since, headless=headless)
    report = read_report(progress) if isinstance(progress, MessageConfigMap) else None
    if report is not None and report.written is not None:
        # A time from the future would let every report be copied immediately. The trainer may write managedFields too.
        report = replace(report, written=min(report.written, client.now()))
    # A later operator, or the defaults of a later CRD, may have set fields that this operator does not know.
    status = TrainingStatus.model_validate(raw.get("status") or {}, extra="ignore")
    closed = {attempt.number for attempt in status.attempts if attempt.outcome != "Running"}
    if newest is not None and newest.attempt not in closed:
        jobs = await _with_eviction(jobs, newest, report, client, headless=headless)
    control = children.get(("ConfigMap", control_name(name)))
    return Observed(
        training=training,
        name=name,
        namespace=namespace,
        uid=uid,
        generation=metadata["generation"],
        version=metadata["resourceVersion"],
        created=created,
        deleting="deletionTimestamp" in metadata,
        finalizers=tuple(metadata.get("finalizers", ())),
        status=status,
        retry=metadata.get("annotations", {}).get(RETRY, "")[:MAX_REQUEST_CHARACTERS],
        update_request=metadata.get("annotations", {}).get(UPDATE, "")[:MAX_REQUEST_CHARACTERS],
        force_start=metadata.get("annotations", {}).get(FORCE_START, "")[:MAX_REQUEST_CHARACTERS],
        problems=problems,
        unavailable=cache.problems(namespace),
        children=children,
        drifted=changed,
        repair_after=repair_after,
        unrepaired=tuple(
            child.own_write.refusal for child in own_children if child.own_write and child.own_write.refusal
        ),
        budget_try=budget_try,
        limitations=cache.limitations(namespace),
        jobs=tuple(jobs),
        clusters=_clusters(cache, key, {job.uid for job in jobs}),
        pods=pods,
        nodes=await _nodes(leftovers.nodes_to_read(status, pods, client.now()), client if reads_nodes else None),
        report=report,
        reports_since=reports_since,
        control=read_control(control) if isinstance(control, MessageConfigMap) else None,
        running=running,
    )


def read_report(config_map: MessageConfigMap) -> ReadReport | None:
    """Parse the trainer's report in the ConfigMap `-progress`.

    Returns None if the ConfigMap is empty. If the report is unreadable, the result contains the problem.
    """
    if not config_map.text:
        return None
    try:
        return ReadReport(parse_progress(config_map.text), None, config_map.written)
    except ContractError as error:
        return ReadReport(None, str(error), config_map.written)


def read_control(config_map: MessageConfigMap) -> Control | None:
    """Parse the operator's last message in the ConfigMap `-control`.

    Returns None if the message is empty or unreadable. The operator then writes the message again.
    """
    if not config_map.text:
        return None
    try:
        return parse_control(config_map.text)
    except ContractError:
        return None


def _children(cache: ObjectCache, key: TrainingKey, uid: str) -> dict[ChildKey, Child]:
    stores = (store for kind, store in cache.stores.items() if kind not in (RAY_JOB, RAY_CLUSTER, POD))
    records = [record for store in stores for record in store.of(key)]
    return {(child.kind, child.name): child for child in records if isinstance(child, Child) and child.owner == uid}


def _jobs(cache: ObjectCache, key: TrainingKey, uid: str) -> list[RayJob]:
    """Return the RayJobs that the operator has created for a training. uid: uid of the training.

    The name must fit the number of the attempt: a copy that somebody has made of a RayJob has the owner and the labels of
    the original, and would count as a second RayJob of the same attempt.
    """
    jobs = (job for job in cache.stores[RAY_JOB].of(key) if isinstance(job, RayJob) and job.owner == uid)
    return [
        job
        for job in jobs
        if job.attempt <= object_names.MAX_ATTEMPT_NUMBER and job.name == object_names.job_name(key[1], job.attempt)
    ]


def _clusters(cache: ObjectCache, key: TrainingKey, jobs: set[str]) -> tuple[RayCluster, ...]:
    """Return the training's RayClusters. jobs: uids of the training's RayJobs.

    A RayCluster that none of these RayJobs owns gets attempt number 0: it belongs to no attempt, but the next attempt
    must wait until it is gone.
    """
    clusters = [cluster for cluster in cache.stores[RAY_CLUSTER].of(key) if isinstance(cluster, RayCluster)]
    return tuple(cluster if cluster.owner in jobs else replace(cluster, attempt=0) for cluster in clusters)


def _pods(cache: ObjectCache, key: TrainingKey, created: datetime) -> tuple[Pod, ...]:
    """Return the training's pods. created: when the training was created.

    A pod of an earlier training of the same name gets attempt number 0: it belongs to no attempt. A pod that no
    RayCluster controls is left out: somebody has created it with the same labels, for example to debug.
    """
    pods = [pod for pod in cache.stores[POD].of(key) if isinstance(pod, Pod) and pod.cluster]
    return tuple(pod if pod.created >= created else replace(pod, attempt=0) for pod in pods)


async def _nodes(names: Sequence[str], client: Client | None) -> dict[str, NodeState]:
    """Return the states of the Kubernetes nodes with these names. client: None if the operator may not read nodes."""
    return {name: "Unreadable" if client is None else await _node(name, client) for name in names}


async def _node(name: str, client: Client) -> NodeState:
    try:
        raw = await client.get(NODE.path(None, name))
    except NotFound:
        return "Gone"
    except Forbidden:
        return "Unreadable"
    taints = raw.get("spec", {}).get("taints") or ()
    return "OutOfService" if any(taint.get("key") == OUT_OF_SERVICE_TAINT for taint in taints) else "Exists"


def _is_headless(job: RayJob, pods: Sequence[Pod]) -> bool:
    """Return whether the Ray cluster that a RayJob names has no head pod."""
    heads = (pod for pod in pods if pod.pool == "head" and pod.attempt == job.attempt)
    return bool(job.cluster) and not any(pod.cluster == job.cluster for pod in heads)


async def _newest_report(
    progress: Child | None,
    newest: RayJob | None,
    spec: TrainingSpec | None,
    client: Client,
    reports_since: datetime | None,
    *,
    headless: bool,
) -> Child | None:
    """Return the ConfigMap `-progress`, with the newest report if an attempt may end by it; None if it does not exist.

    The ConfigMap is read from the API server if the newest job has ended, or its head pod is gone, and the cached report is
    not final, or if the cached report would be a stall. Without this read, a late watch event could end a healthy attempt, or turn a
    success into a failure. progress: the cached ConfigMap. headless: whether the newest job has no head pod.
    """
    if not isinstance(progress, MessageConfigMap) or newest is None:
        return progress
    cached = read_report(progress)
    ended = newest.ended or newest.status in FINAL_RAY_STATUSES or headless
    if not (_lacks_final_report(cached, newest) if ended else _is_stalled(cached, newest, spec, client, reports_since)):
        return progress
    try:
        raw: Mapping[str, Any] = await client.get(CONFIG_MAP.path(progress.namespace, progress.name))
    except NotFound:
        return None
    current = record(CONFIG_MAP, raw)
    return current if isinstance(current, Child) and current.owner == progress.owner else None


async def _with_eviction(
    jobs: list[RayJob], newest: RayJob, report: ReadReport | None, client: Client, *, headless: bool
) -> list[RayJob]:
    """Return the RayJobs, with the newest one as it is on the API server if the trainer ended and the RayJob seems to run.

    When its queue evicts an attempt, the trainer reports that it was stopped, or its pod is gone before it can (`headless`). While a
    RayJob is held back, this is not a failure, but the watch of RayJobs may be later than those of reports and pods. newest: the
    newest RayJob, of an attempt whose end the status has not recorded.
    """
    progress = None if report is None else report.progress
    if progress is None or newest.ended or newest.held or newest.deleting is not None:
        return jobs
    if progress.attempt != newest.attempt or not (headless or progress.state in ("Failed", "Stopped")):
        return jobs
    try:
        raw: Mapping[str, Any] = await client.get(RAY_JOB.path(newest.namespace, newest.name))
    except NotFound:
        return jobs  # the watch will say so
    current = record(RAY_JOB, raw)
    if not isinstance(current, RayJob) or current.uid != newest.uid:
        return jobs
    return [current if job is newest else job for job in jobs]


def _lacks_final_report(cached: ReadReport | None, newest: RayJob) -> bool:
    """Return whether the cached report is not the final report of the newest job, nor one of a later attempt."""
    report = None if cached is None else cached.progress
    return (
        report is None
        or report.attempt < newest.attempt
        or (report.attempt == newest.attempt and report.state == "Running")
    )


def _is_stalled(
    cached: ReadReport | None, newest: RayJob, spec: TrainingSpec | None, client: Client, reports_since: datetime | None
) -> bool:
    """Return whether the cached report of the newest job has a latest weight version of an age that is a stall."""
    report = None if cached is None else cached.progress
    if spec is None or report is None or report.attempt != newest.attempt or newest.held:
        return False
    pace = stall.measure(spec, cached, reports_since, client.now())
    return pace is not None and pace.stalled

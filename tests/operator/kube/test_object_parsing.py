"""What is read out of raw objects, above all why a pod does not work."""

import json
import sys
from datetime import UTC, datetime

import pytest

from qwen35_operator.api.v1alpha1 import ReleaseStatus
from qwen35_operator.desired import object_names
from qwen35_operator.kube import object_parsing
from qwen35_operator.kube.kinds import CONFIG_MAP, POD, RAY_CLUSTER, RAY_JOB, ROLE
from qwen35_operator.kube.object_parsing import record
from qwen35_operator.kube.object_records import MessageConfigMap, WorkerGroup
from qwen35_operator.reconcile import observe
from qwen35_operator.reconcile.observe import read_report
from qwen35_trainer.contract.message import MAX_MESSAGE_BYTES
from tests.operator.kube import raw_objects

OOM = {"exitCode": 137, "reason": "OOMKilled", "finishedAt": "2026-01-01T00:05:00Z"}


def at(hour: int, minute: int = 0, second: int = 0) -> datetime:
    return datetime(2026, 1, 1, hour, minute, second, tzinfo=UTC)


def ended(name: str = "ray", **terminated) -> dict:
    return {"containerStatuses": [{"name": name, "state": {"terminated": terminated}}]}


def waiting(reason: str, message: str = "", name: str = "ray") -> dict:
    return {"containerStatuses": [{"name": name, "state": {"waiting": {"reason": reason, "message": message}}}]}


def condition(kind: str, reason: str = "", message: str = "", status: str = "True") -> dict:
    return {"conditions": [{"type": kind, "status": status, "reason": reason, "message": message}]}


FAULTS = {
    "nothing yet": ({}, ("", None, "")),
    "running": ({"containerStatuses": [{"name": "ray", "state": {"running": {}}}]}, ("", None, "")),
    "out of memory": (ended(**OOM), ("OOMKilled", 137, "exit code 137")),
    "an error with words": (ended(exitCode=1, reason="Error", message="boom"), ("Error", 1, "boom")),
    "ended well": (ended(exitCode=0, reason="Completed"), ("", None, "")),
    "no image": (waiting("ImagePullBackOff", "no such tag"), ("ImagePullBackOff", None, "no such tag")),
    "crashing": (waiting("CrashLoopBackOff", "back-off"), ("CrashLoopBackOff", None, "back-off")),
    "starting": (waiting("ContainerCreating"), ("", None, "")),
    "init containers run": (waiting("PodInitializing"), ("", None, "")),
    "waits for no reason": (waiting(""), ("", None, "")),
    "init container failed": (
        {
            **waiting("PodInitializing"),
            "initContainerStatuses": [{"name": "wait-gcs-ready", "state": {"terminated": {"exitCode": 2}}}],
        },
        ("Error", 2, "exit code 2"),
    ),
    "init container has no image": (
        {
            **waiting("PodInitializing"),
            "initContainerStatuses": [
                {"name": "load", "state": {"waiting": {"reason": "ErrImagePull", "message": "no"}}}
            ],
        },
        ("ErrImagePull", None, "no"),
    ),
    "ours before a sidecar": (
        {
            "containerStatuses": [
                {"name": "sidecar", "state": {"terminated": {"exitCode": 3, "reason": "Error"}}},
                {"name": "ray", "state": {"terminated": OOM}},
            ]
        },
        ("OOMKilled", 137, "exit code 137"),
    ),
    "a sidecar alone": (
        {
            "containerStatuses": [
                {"name": "logs", "state": {"terminated": {"exitCode": 1, "reason": "Error"}}},
                {"name": "ray", "state": {"running": {}}},
            ]
        },
        ("SidecarFailed", 1, "container logs: Error: exit code 1"),
    ),
    "a sidecar out of memory": (
        ended("logs", **OOM),
        ("SidecarFailed", 137, "container logs: OOMKilled: exit code 137"),
    ),
    "evicted by the kubelet": (
        {"phase": "Failed", "reason": "Evicted", "message": "low on memory"},
        ("Evicted", None, "low on memory"),
    ),
    "node lost": ({"reason": "NodeLost", "message": "no heartbeat"}, ("NodeLost", None, "no heartbeat")),
    "node shuts down": ({"phase": "Failed", "reason": "NodeShutdown"}, ("NodeLost", None, "")),
    "preempting": ({"phase": "Failed", "reason": "Preempting"}, ("Preempted", None, "")),
    "what was done to it, not what it did": (
        {**ended(**OOM), **condition("DisruptionTarget", "PreemptionByScheduler", "for another")},
        ("Preempted", None, "for another"),
    ),
    "a disruption that was called off": (
        condition("DisruptionTarget", "EvictionByEvictionAPI", "", "False"),
        ("", None, ""),
    ),
    "no place": (
        condition("PodScheduled", "Unschedulable", "0/6 nodes", "False"),
        ("Unschedulable", None, "0/6 nodes"),
    ),
    "held back": (condition("PodScheduled", "SchedulingGated", "", "False"), ("SchedulingGated", None, "")),
    "failed, and nobody says why": ({"phase": "Failed", "message": "?"}, ("Error", None, "?")),
    "nulls": ({"containerStatuses": [{"name": "ray", "state": None}]}, ("", None, "")),
}


@pytest.mark.parametrize(("status", "fault"), FAULTS.values(), ids=FAULTS)
def test_a_pods_fault(status, fault) -> None:
    pod = object_parsing.record(POD, raw_objects.pod(status=status))
    assert (pod.reason, pod.exit_code, pod.message) == fault


NATIVE_SIDECAR = {"initContainers": [{"name": "load"}, {"name": "proxy", "restartPolicy": "Always"}]}


@pytest.mark.parametrize(
    ("statuses", "fault"),
    [
        ({"proxy": {"exitCode": 1}}, ("SidecarFailed", 1, "container proxy: Error: exit code 1")),
        ({"proxy": OOM}, ("SidecarFailed", 137, "container proxy: OOMKilled: exit code 137")),
        ({"proxy": {"exitCode": 1}, "load": {"exitCode": 2}}, ("Error", 2, "exit code 2")),
        ({"proxy": {"exitCode": 0}}, ("", None, "")),
    ],
)
def test_an_init_container_that_runs_as_long_as_ray_fails_as_a_sidecar(statuses, fault) -> None:
    init = [{"name": name, "state": {"terminated": ended}} for name, ended in statuses.items()]
    raw = raw_objects.pod(pool="head", status={"initContainerStatuses": init})
    pod = object_parsing.record(POD, {**raw, "spec": raw["spec"] | NATIVE_SIDECAR})
    assert (pod.reason, pod.exit_code, pod.message) == fault


@pytest.mark.parametrize(
    ("reason", "word"),
    [
        ("PreemptionByScheduler", "Preempted"),
        ("DeletionByTaintManager", "NodeLost"),
        ("DeletionByPodGC", "NodeLost"),
        ("EvictionByEvictionAPI", "Evicted"),
        ("TerminationByKubelet", "Evicted"),
        ("SomethingNew", "Evicted"),
    ],
)
def test_a_disruption_has_one_word(reason, word) -> None:
    assert (
        object_parsing.record(POD, raw_objects.pod(status=condition("DisruptionTarget", reason, "why"))).reason == word
    )


def test_a_pod_is_asked_to_go_before_its_grace_is_over() -> None:
    pod = object_parsing.record(
        POD, raw_objects.pod(deletionTimestamp="2026-01-01T00:10:30Z", deletionGracePeriodSeconds=30)
    )
    assert pod.deleting == at(0, 10)


@pytest.mark.parametrize(
    ("grace", "end"),
    [(9 * 10**9, "2311-03-15T16:10:00Z"), (10**11, "2272-02-08T12:03:51Z"), (10**18, "1806-05-16T06:29:32Z")],
)
def test_a_grace_period_of_any_length_is_subtracted_as_the_api_server_adds_it(grace, end) -> None:
    """The API server counts in nanoseconds of 64 bits: 10**11 s are 7766279631452241920 ns after five turns."""
    going = {"deletionTimestamp": end, "deletionGracePeriodSeconds": grace}
    pod = object_parsing.record(POD, raw_objects.pod(**going))
    assert abs((pod.deleting - at(0, 10)).total_seconds()) <= 1


def test_a_container_that_ended_after_its_pods_deletion_was_requested_is_not_a_fault() -> None:
    status = {"phase": "Failed", **ended(exitCode=143, reason="Error", finishedAt="2026-01-01T00:10:05Z")}
    going = {"deletionTimestamp": "2026-01-01T00:10:30Z", "deletionGracePeriodSeconds": 30}
    assert object_parsing.record(POD, raw_objects.pod(status=status, **going)).reason == ""


def test_a_container_that_ended_before_the_pod_was_asked_to_go_is_why() -> None:
    going = {"deletionTimestamp": "2026-01-01T00:10:30Z", "deletionGracePeriodSeconds": 30}
    assert object_parsing.record(POD, raw_objects.pod(status=ended(**OOM), **going)).reason == "OOMKilled"


def test_a_pod_is_ready_when_its_condition_says_so() -> None:
    assert object_parsing.record(POD, raw_objects.pod(status=condition("Ready"))).ready
    assert not object_parsing.record(POD, raw_objects.pod(status=condition("Ready", status="False"))).ready
    assert not object_parsing.record(POD, raw_objects.pod()).ready


def changed(kind: str, status: str, time: str | None) -> dict:
    return {"type": kind, "status": status, "lastTransitionTime": time}


@pytest.mark.parametrize(
    ("conditions", "since"),
    [
        ([], None),
        ([changed("PodScheduled", "False", "2026-01-01T10:00:00Z")], None),
        ([changed("PodScheduled", "True", None)], None),
        ([changed("PodScheduled", "True", "2026-01-01T10:00:00Z")], (10, 0)),
        (
            [
                changed("PodScheduled", "True", "2026-01-01T10:00:00Z"),
                changed("Ready", "False", "2026-01-01T10:30:00Z"),
            ],
            (10, 30),
        ),
        (
            [
                changed("PodScheduled", "True", "2026-01-01T10:00:00Z"),
                changed("Ready", "True", "2026-01-01T10:30:00Z"),
            ],
            (10, 0),
        ),
    ],
)
def test_a_pod_is_not_ready_since_it_got_its_node_or_was_last_ready(conditions, since) -> None:
    pod = object_parsing.record(POD, raw_objects.pod(status={"conditions": conditions}))
    assert pod.unready_since == (None if since is None else at(*since))


def test_a_long_message_is_cut() -> None:
    assert (
        len(object_parsing.record(POD, raw_objects.pod(status=waiting("ErrImagePull", "x" * 9999))).message)
        == object_parsing.MAX_MESSAGE_CHARACTERS
    )


def test_a_pod_belongs_to_a_training_an_attempt_and_a_pool() -> None:
    pod = object_parsing.record(POD, raw_objects.pod(pool="train", training="other", uid="p", version=7))
    assert (pod.training, pod.attempt, pod.pool, pod.uid, pod.version) == ("other", 1, "train", "p", "7")
    assert pod.created == at(0)


@pytest.mark.parametrize(("label", "lane"), [("", False), ("false", False), ("true", True)])
def test_a_label_says_whether_a_pod_is_a_node_of_the_lane(label, lane) -> None:
    pod = object_parsing.record(POD, raw_objects.pod(lane=label))
    assert (pod.pool, pod.lane) == ("rollout", lane)


@pytest.mark.parametrize(
    "broken",
    [
        raw_objects.pod(pool="somewhere"),
        {
            "metadata": {
                **raw_objects.metadata("a"),
                "labels": {object_names.TRAINING: "demo", object_names.ATTEMPT: "first"},
            }
        },
        {"metadata": {"labels": {object_names.TRAINING: "demo"}}},
    ],
    ids=["pool", "attempt", "no name"],
)
def test_a_pod_that_is_not_ours_gives_no_record(broken) -> None:
    with pytest.raises((KeyError, ValueError)):
        object_parsing.record(POD, broken)


def test_a_job_without_a_status() -> None:
    job = object_parsing.record(RAY_JOB, raw_objects.ray_job("demo-3", attempt=3))
    assert (job.attempt, job.owner, job.hash, job.spec_hash) == (3, raw_objects.UID, "h", "s")
    assert (job.deployment, job.status, job.reason, job.message, job.cluster) == ("", "", "", "", "")
    assert job.deleting is None
    assert not job.suspended


@pytest.mark.parametrize("label", ["first", "", "-1", "7", None])
def test_a_job_whose_label_somebody_changed_is_of_the_attempt_in_its_name(label) -> None:
    raw = raw_objects.ray_job(attempt=3)
    raw["metadata"]["name"] = "demo-3"
    raw["metadata"]["labels"]["rl.qwen35.io/attempt"] = label
    if label is None:
        del raw["metadata"]["labels"]["rl.qwen35.io/attempt"]
    assert object_parsing.record(RAY_JOB, raw).attempt == 3


def test_what_the_pods_of_a_job_run() -> None:
    body = raw_objects.ray_job()
    job = object_parsing.record(RAY_JOB, body)
    assert (job.image, job.image_reference, job.ray_version, job.update_request) == ("", "", "", "")
    containers = [{"name": "sidecar", "image": "other"}, {"name": "ray", "image": "trainer@sha256:1"}]
    head = {"template": {"spec": {"containers": containers}}}
    body["spec"] = {"rayClusterSpec": {"rayVersion": "2.56.0", "headGroupSpec": head}}
    body["metadata"]["annotations"] |= {object_names.IMAGE: "trainer:1", object_names.UPDATE: "now"}
    job = object_parsing.record(RAY_JOB, body)
    assert (job.image, job.image_reference) == ("trainer@sha256:1", "trainer:1")
    assert (job.ray_version, job.update_request) == ("2.56.0", "now")


def test_the_image_of_a_pod_is_that_of_the_container_ray() -> None:
    statuses = [{"name": "sidecar", "imageID": "other"}, {"name": "ray", "imageID": "trainer@sha256:1", "state": {}}]
    assert object_parsing.record(POD, raw_objects.pod(status={"containerStatuses": statuses})).image_id == (
        "trainer@sha256:1"
    )
    assert object_parsing.record(POD, raw_objects.pod()).image_id == ""


def test_a_job_with_a_status() -> None:
    status = {
        "jobDeploymentStatus": "Failed",
        "jobStatus": "FAILED",
        "reason": "AppFailed",
        "message": "exit 1",
        "rayClusterName": "demo-1-x",
    }
    body = raw_objects.ray_job(status=status, deletionTimestamp="2026-01-01T01:00:00Z")
    job = object_parsing.record(RAY_JOB, {**body, "spec": {"suspend": True}})
    assert (job.deployment, job.status, job.reason, job.message, job.cluster) == tuple(status.values())
    assert job.suspended
    assert job.deleting == at(1)


def test_a_cluster_with_its_groups() -> None:
    groups = [
        {
            "groupName": "rollout",
            "replicas": 2,
            "minReplicas": 1,
            "maxReplicas": 4,
            "scaleStrategy": {"workersToDelete": ["a", "b"]},
        },
        {"groupName": "train", "scaleStrategy": None},
    ]
    status = {
        "state": "ready",
        "conditions": [
            {"type": "ReplicaFailure", "status": "True", "message": "quota"},
            {"type": "HeadPodReady", "status": "True", "message": "all is well"},
        ],
    }
    cluster = object_parsing.record(RAY_CLUSTER, raw_objects.ray_cluster(groups=groups, status=status))
    assert cluster.groups == (WorkerGroup("rollout", 2, 1, 4, ("a", "b")), WorkerGroup("train", 0, 0, 0, ()))
    assert (cluster.state, cluster.failure, cluster.autoscaled) == ("ready", "quota", False)


def test_a_failure_that_is_over_is_none() -> None:
    status = {"conditions": [{"type": "ReplicaFailure", "status": "False", "message": "quota"}]}
    assert object_parsing.record(RAY_CLUSTER, raw_objects.ray_cluster(status=status)).failure == ""


@pytest.mark.parametrize("owners", [[], [{"uid": "other"}], [{"uid": "other", "controller": False}]])
def test_only_a_controller_is_an_owner(owners) -> None:
    body = {"metadata": {**raw_objects.metadata("a"), "ownerReferences": owners}}
    assert object_parsing.record(ROLE, body).owner is None


def test_of_an_owner_that_somebody_made_up_only_a_bounded_part_is_kept() -> None:
    """Any text may be the uid or the name of an owner of a kind that does not exist."""
    owner = {"apiVersion": "no/v1", "kind": "RayCluster", "name": "n" * 10**6, "uid": "u" * 10**6, "controller": True}
    role = object_parsing.record(ROLE, {"metadata": raw_objects.metadata("r") | {"ownerReferences": [owner]}})
    pod = raw_objects.pod()
    pod["metadata"]["ownerReferences"] = [owner]
    assert len(role.owner) == 64
    assert len(object_parsing.record(POD, pod).cluster) == 253


def test_of_other_kinds_the_metadata_is_enough() -> None:
    role = object_parsing.record(
        ROLE, {"metadata": raw_objects.metadata("demo-trainer", annotations={object_names.HASH: "abc"})}
    )
    assert (role.kind, role.name, role.owner, role.hash) == ("Role", "demo-trainer", raw_objects.UID, "abc")


def written(key: str, time: str, operation: str = "Update") -> dict:
    return {"operation": operation, "time": time, "fieldsV1": {"f:data": {".": {}, f"f:{key}": {}}}}


def test_a_report_was_written_when_the_newest_owner_of_its_key_wrote() -> None:
    fields = [
        written("progress.json", "2026-01-01T01:00:00Z"),
        written("progress.json", "2026-01-01T02:00:00Z"),
        written("other", "2026-01-01T03:00:00Z"),
        {"operation": "Update", "time": "2026-01-01T04:00:00Z", "fieldsV1": {"f:metadata": {}}},
    ]
    message = object_parsing.record(
        CONFIG_MAP, raw_objects.config_map(data={"progress.json": "x"}, managedFields=fields)
    )
    assert (message.text, message.written) == (b"x", at(2))


def test_times_that_somebody_made_up_do_not_hide_a_report() -> None:
    """Users who may patch an object may also patch managedFields; the API server accepts any year from 0000 to 9999."""
    fields = [written("progress.json", "0000-01-01T00:00:00Z"), written("progress.json", "2026-01-01T01:00:00Z")]
    body = raw_objects.config_map(data={"progress.json": "x"}, managedFields=fields)
    assert object_parsing.record(CONFIG_MAP, body).written == at(1)
    body["metadata"]["managedFields"] = fields[:1]
    assert object_parsing.record(CONFIG_MAP, body).written is None


def test_of_long_texts_only_the_beginning_is_kept() -> None:
    long = "x" * 200_000
    body = raw_objects.ray_job(status={"message": long, "reason": long})
    body["metadata"]["annotations"] = dict.fromkeys(
        (object_names.HASH, object_names.SPEC_HASH, object_names.IMAGE, object_names.UPDATE), long
    )
    head = {"template": {"spec": {"containers": [{"name": "ray", "image": long}]}}}
    body["spec"] = {"rayClusterSpec": {"rayVersion": long, "headGroupSpec": head}}
    job = object_parsing.record(RAY_JOB, body)
    assert max(len(text) for text in (getattr(job, name) for name in job.__slots__) if isinstance(text, str)) <= 4096
    release = ReleaseStatus(
        attempt=1,
        image=job.image,
        reference=job.image_reference,
        rayVersion=job.ray_version,
        request=job.update_request,
    )
    assert release.rayVersion == "x" * 64
    account = {"metadata": raw_objects.metadata("demo-trainer", annotations={object_names.HASH: long})}
    assert len(object_parsing.record(ROLE, account).hash or "") == 64


def test_of_a_cluster_only_bounded_parts_are_kept() -> None:
    """Anybody who may create RayClusters can give them the operator's label, and each has a record."""
    long = "x" * 100_000
    group = {"groupName": long, "scaleStrategy": {"workersToDelete": [long] * 5000}}
    cluster = record(RAY_CLUSTER, raw_objects.ray_cluster(groups=[group] * 17, status={"state": long}))
    assert len(cluster.groups) == 4
    assert len(cluster.groups[0].leaving) == 1024
    assert {len(name) for name in cluster.groups[0].leaving} == {len(cluster.groups[0].name)} == {253}
    assert len(cluster.state) == 64
    assert len(record(RAY_JOB, raw_objects.ray_job(status={"rayClusterName": long})).cluster) == 253


@pytest.mark.parametrize("data", [None, {}, {"other": "x"}, {"progress.json": ""}])
def test_an_empty_report_is_none(data) -> None:
    message = object_parsing.record(CONFIG_MAP, raw_objects.config_map(data=data))
    assert message.written is None
    assert observe.read_report(message) is None


def test_a_report_that_can_be_read() -> None:
    text = json.dumps({"attempt": 2, "state": "Running", "time": 1.0, "update": 7})
    report = observe.read_report(
        object_parsing.record(CONFIG_MAP, raw_objects.config_map(data={"progress.json": text}))
    )
    assert (report.progress.attempt, report.progress.update, report.problem) == (2, 7, None)


UNREADABLE = [
    *("{", "{}", "[1", "[]", "null", "x" * 1_000_000, "\u0000\ud7ff", '{"attempt": "one"}', '{"attempt": 0}'),
    '{"attempt": 1, "state": "Fine", "time": 1}',
]


@pytest.mark.parametrize("text", UNREADABLE, ids=lambda text: repr(text[:20]))
def test_a_report_that_cannot_be_read_says_why(text) -> None:
    report = observe.read_report(
        object_parsing.record(CONFIG_MAP, raw_objects.config_map(data={"progress.json": text}))
    )
    assert report.progress is None
    assert "progress.json" in report.problem


def test_an_order_that_can_be_read() -> None:
    order = object_parsing.record(
        CONFIG_MAP, raw_objects.config_map("demo-control", {"control.json": '{"attempt": 4}'})
    )
    assert observe.read_control(order).attempt == 4


@pytest.mark.parametrize("data", [{}, {"control.json": "{"}, {"control.json": '{"attempt": "x"}'}])
def test_an_order_that_cannot_be_read_is_nobodys(data) -> None:
    assert observe.read_control(object_parsing.record(CONFIG_MAP, raw_objects.config_map("demo-control", data))) is None


def test_other_config_maps_are_not_kept_as_text() -> None:
    assert not isinstance(
        object_parsing.record(CONFIG_MAP, raw_objects.config_map("demo-config", {"training.yaml": "x"})),
        MessageConfigMap,
    )


def test_what_bears_no_label_is_nobodys() -> None:
    assert object_parsing.training_of({"metadata": {"name": "a"}}) == ""


@pytest.mark.parametrize("letter", ["x", "\u8bad", "\U0001f600"])
def test_a_report_that_is_far_too_long_takes_no_memory_and_is_recognized(letter) -> None:
    """A ConfigMap of 1 MiB with one emoji took 4 MiB, and 128 of them took what the operator may have."""
    raw = raw_objects.config_map(data={"progress.json": "a" * (1024 * 1024 - 8) + letter})
    message = record(CONFIG_MAP, raw)
    assert sys.getsizeof(message.text) <= MAX_MESSAGE_BYTES + 100
    assert read_report(message).problem == "progress.json has more than 262144 bytes, which is the maximum"
    message = record(CONFIG_MAP, raw_objects.config_map(data={"progress.json": letter * MAX_MESSAGE_BYTES}))
    assert sys.getsizeof(message.text) <= MAX_MESSAGE_BYTES + 100

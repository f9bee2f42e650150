"""Which objects count as the training's, and when the API server is read directly."""

import json
from datetime import UTC, datetime, timedelta

import pytest

from qwen35_operator.kube.api_errors import Forbidden, Unavailable
from qwen35_operator.kube.kinds import CONFIG_MAP, NODE, POD, RAY_CLUSTER, RAY_JOB, ROLE, ObjectKind
from qwen35_operator.kube.object_cache import ObjectCache
from qwen35_operator.kube.object_parsing import record, training_of
from qwen35_operator.operator_settings import OperatorSettings
from qwen35_operator.reconcile import acceptance
from qwen35_operator.reconcile.child_writes import config_map
from qwen35_operator.reconcile.observe import MAX_CACHED_BYTES, TrainingParser, observe
from qwen35_trainer.manifest import Problem
from tests.operator.kube import raw_objects
from tests.operator.kube.memory_api import START, MemoryApi
from tests.operator.reconcile.world import SPEC

PROGRESS, JOB = CONFIG_MAP.path("team", "demo-progress"), RAY_JOB.path("team", "demo-1")
TRAINING = {
    "metadata": {
        "name": "demo",
        "namespace": "team",
        "uid": raw_objects.UID,
        "generation": 3,
        "resourceVersion": "77",
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "labels": {"kueue.x-k8s.io/queue-name": "gpus"},
    },
    "spec": SPEC,
}


class ObserveSetup:
    """Stores to fill, and an API server that is asked for what they may not have yet."""

    def __init__(self) -> None:
        self.api = MemoryApi()
        self.parser = TrainingParser()
        self.cluster = ObjectCache((), lambda key: None, lambda kind: None)

    def put(self, kind: ObjectKind, *bodies: dict) -> None:
        for body in bodies:
            self.cluster.stores[kind].put(training_of(body), record(kind, body))

    async def observe(self, **changes):
        return await observe({**TRAINING, **changes}, self.cluster, self.parser, self.api)


@pytest.fixture
def setup() -> ObserveSetup:
    return ObserveSetup()


def report(state: str = "Running", attempt: int = 1, **metadata) -> dict:
    text = json.dumps({"attempt": attempt, "state": state, "time": 1.0})
    return raw_objects.config_map(data={"progress.json": text}, **metadata)


async def test_what_the_body_says(setup) -> None:
    seen = await setup.observe()
    assert (seen.name, seen.namespace, seen.uid, seen.generation, seen.version) == (
        "demo",
        "team",
        raw_objects.UID,
        3,
        "77",
    )
    assert seen.created == datetime(2026, 1, 1, tzinfo=UTC)
    assert not seen.deleting
    assert seen.training.labels == {"kueue.x-k8s.io/queue-name": "gpus"}
    assert seen.training.spec.rollout.nodes == 2
    assert (seen.children, seen.jobs, seen.clusters, seen.pods, seen.report, seen.control) == (
        {},
        (),
        (),
        (),
        None,
        None,
    )
    assert setup.api.requests == []


async def test_a_training_that_is_deleted_is_seen_as_such(setup) -> None:
    metadata = {**TRAINING["metadata"], "deletionTimestamp": "2026-01-01T01:00:00Z"}
    assert (await setup.observe(metadata=metadata)).deleting


async def test_a_spec_that_cannot_be_read_is_none_with_its_problems(setup) -> None:
    seen = await setup.observe(spec={**SPEC, "rollout": {"nodes": -1}})
    assert seen.training is None
    assert any("rollout" in problem.path for problem in seen.problems)


async def test_a_body_without_spec_and_status_can_be_looked_at(setup) -> None:
    seen = await observe({"metadata": TRAINING["metadata"]}, setup.cluster, setup.parser, setup.api)
    assert seen.training is None
    assert seen.problems


async def test_what_has_another_owner_is_not_its_child(setup) -> None:
    setup.put(
        CONFIG_MAP, raw_objects.config_map("demo-config"), raw_objects.config_map("foreign", uid="u2", owner="other")
    )
    setup.put(ROLE, {"metadata": raw_objects.metadata("demo-trainer")})
    setup.put(
        RAY_JOB,
        raw_objects.ray_job("demo-1"),
        raw_objects.ray_job("demo-9", attempt=9, uid="u2", owner="an earlier demo"),
    )
    setup.put(CONFIG_MAP, raw_objects.config_map("other-config", training="other", uid="u3"))
    seen = await setup.observe()
    assert set(seen.children) == {("ConfigMap", "demo-config"), ("Role", "demo-trainer")}
    assert [job.name for job in seen.jobs] == ["demo-1"]


async def test_a_copy_of_a_job_is_not_a_second_job_of_the_attempt(setup) -> None:
    """A copy has the owner and the labels of the original. No status can contain two attempts of one number, or 10**30."""
    setup.put(
        RAY_JOB,
        raw_objects.ray_job("demo-1"),
        raw_objects.ray_job("demo-copy", attempt=1, uid="u2"),
        raw_objects.ray_job("demo-2x", attempt=2, uid="u3"),
        raw_objects.ray_job(f"demo-{10**30}", attempt=10**30, uid="u4"),
    )
    setup.put(CONFIG_MAP, raw_objects.config_map("demo-config"))
    setup.put(ROLE, {"metadata": raw_objects.metadata("demo-trainer")})
    seen = await setup.observe()
    assert set(seen.children) == {("ConfigMap", "demo-config"), ("Role", "demo-trainer")}
    assert [job.name for job in seen.jobs] == ["demo-1"]


async def test_a_report_or_order_of_somebody_else_is_none(setup) -> None:
    order = raw_objects.config_map("demo-control", {"control.json": '{"attempt": 1}'}, uid="u2", owner="other")
    setup.put(CONFIG_MAP, report(owner="other"), order)
    seen = await setup.observe()
    assert (seen.report, seen.control) == (None, None)


async def test_report_and_order_are_read(setup) -> None:
    setup.put(
        CONFIG_MAP, report(), raw_objects.config_map("demo-control", {"control.json": '{"attempt": 4}'}, uid="u2")
    )
    seen = await setup.observe()
    assert seen.report.progress.state == "Running"
    assert seen.control.attempt == 4


async def test_a_cluster_whose_job_is_not_ours_belongs_to_no_attempt(setup) -> None:
    setup.put(RAY_JOB, raw_objects.ray_job("demo-1", uid="job"))
    own, lost = (
        raw_objects.ray_cluster("demo-1-a", owner="job"),
        raw_objects.ray_cluster("demo-1-b", uid="u2", owner="gone"),
    )
    setup.put(RAY_CLUSTER, own, lost)
    seen = await setup.observe()
    assert {cluster.name: cluster.attempt for cluster in seen.clusters} == {"demo-1-a": 1, "demo-1-b": 0}


async def test_a_pod_older_than_the_training_belongs_to_no_attempt(setup) -> None:
    old = raw_objects.pod("old", uid="u2")
    old["metadata"]["creationTimestamp"] = "2025-12-31T23:59:59Z"
    setup.put(POD, raw_objects.pod("new"), old)
    assert {pod.name: pod.attempt for pod in (await setup.observe()).pods} == {"new": 1, "old": 0}


async def test_a_pod_has_the_name_of_its_cluster_and_one_without_a_cluster_is_left_out(setup) -> None:
    setup.put(POD, raw_objects.pod("in"), raw_objects.pod("by hand", uid="u2", ownerReferences=[]))
    assert {pod.name: pod.cluster for pod in (await setup.observe()).pods} == {"in": "demo-1-x"}


@pytest.mark.parametrize("state", ["Failed", "Stopped"])
async def test_an_eviction_is_read_live_that_the_watch_has_not_brought_before_the_trainer_reports_its_end(
    setup, state
) -> None:
    setup.put(RAY_JOB, raw_objects.ray_job(status={"jobDeploymentStatus": "Running"}))
    setup.put(CONFIG_MAP, report(state))
    evicted = raw_objects.ray_job(version=2, status={"jobDeploymentStatus": "Suspending"})
    setup.api.place(JOB, evicted | {"spec": {"suspend": True}})
    (job,) = (await setup.observe()).jobs
    assert job.held
    assert setup.api.requests == [("GET", JOB)]


@pytest.mark.parametrize("attempt", [1, 2])
async def test_a_job_is_not_read_live_while_its_trainer_runs(setup, attempt) -> None:
    setup.put(RAY_JOB, raw_objects.ray_job("demo-2", attempt=2, status={"jobDeploymentStatus": "Running"}))
    setup.put(CONFIG_MAP, report("Running" if attempt == 2 else "Failed", attempt))
    await setup.observe()
    assert setup.api.requests == []


async def test_a_job_is_not_read_live_when_the_end_of_its_attempt_is_recorded(setup) -> None:
    """The next attempt is tried again every second until this job has ended, for up to a minute."""
    setup.put(RAY_JOB, raw_objects.ray_job(status={"jobDeploymentStatus": "Running"}))
    setup.put(CONFIG_MAP, report("Failed"))
    ended = {"number": 1, "job": "demo-1", "outcome": "Failed", "startTime": "2026-01-01T00:00:00Z"}
    await setup.observe(status={"attempts": [ended]})
    assert setup.api.requests == []
    setup.api.place(JOB, raw_objects.ray_job(status={"jobDeploymentStatus": "Running"}))
    await setup.observe(status={"attempts": [ended | {"outcome": "Running"}]})
    assert setup.api.requests == [("GET", JOB)]


async def test_a_job_that_is_gone_or_new_is_left_to_the_watch(setup) -> None:
    setup.put(RAY_JOB, raw_objects.ray_job(status={"jobDeploymentStatus": "Running"}))
    setup.put(CONFIG_MAP, report("Failed"))
    before = (await setup.observe()).jobs
    setup.api.place(JOB, raw_objects.ray_job(uid="another", status={"jobDeploymentStatus": "Running"}))
    assert (await setup.observe()).jobs == before


async def test_no_report_was_written_in_the_future(setup) -> None:
    """Otherwise the trainer could have each report copied immediately, by a time of its own in managedFields."""
    fields = {"f:data": {"f:progress.json": {}}}
    ahead = [{"manager": "x", "operation": "Update", "time": "2999-01-01T00:00:00Z", "fieldsV1": fields}]
    setup.put(CONFIG_MAP, report(managedFields=ahead))
    assert (await setup.observe()).report.written == setup.api.now()


async def test_an_object_without_the_operators_hash_is_checked_except_those_that_the_trainer_writes(setup) -> None:
    setup.put(
        CONFIG_MAP,
        report(),
        raw_objects.config_map("demo-history", uid="u2"),
        raw_objects.config_map("demo-config", uid="u3"),
    )
    assert (await setup.observe()).drifted == {("ConfigMap", "demo-config")}


async def test_a_kind_that_cannot_be_watched_is_reported(setup) -> None:
    problem = Problem("pods", "the operator may not watch it", "grant it")
    setup.cluster.watches[0].problem = problem
    assert (await setup.observe()).unavailable == (problem,)


OVER = [{"jobDeploymentStatus": "Complete"}, {"jobDeploymentStatus": "Failed"}, {"jobStatus": "SUCCEEDED"}]
OVER += [{"jobStatus": "FAILED"}, {"jobStatus": "STOPPED"}, {"jobDeploymentStatus": "ValidationFailed"}]


@pytest.mark.parametrize("status", OVER, ids=str)
async def test_the_last_report_of_a_job_that_is_over_is_read_live(setup, status) -> None:
    setup.put(RAY_JOB, raw_objects.ray_job(status=status))
    setup.put(CONFIG_MAP, report("Running"))
    setup.api.place(PROGRESS, report("Succeeded"))
    seen = await setup.observe()
    assert seen.report.progress.state == "Succeeded"
    assert setup.api.requests == [("GET", PROGRESS)]


@pytest.mark.parametrize("text", [None, "", "{"])
async def test_it_is_read_live_also_when_there_was_none_or_none_to_be_read(setup, text) -> None:
    setup.put(RAY_JOB, raw_objects.ray_job(status=OVER[0]))
    setup.put(CONFIG_MAP, raw_objects.config_map(data=None if text is None else {"progress.json": text}))
    setup.api.place(PROGRESS, report("Succeeded"))
    assert (await setup.observe()).report.progress.state == "Succeeded"


async def test_it_is_read_live_while_it_is_of_an_earlier_attempt(setup) -> None:
    setup.put(
        RAY_JOB,
        raw_objects.ray_job("demo-1", status=OVER[1]),
        raw_objects.ray_job("demo-2", attempt=2, status=OVER[0], uid="u2"),
    )
    setup.put(CONFIG_MAP, report("Failed", attempt=1))
    setup.api.place(PROGRESS, report("Succeeded", attempt=2))
    assert (await setup.observe()).report.progress.attempt == 2


@pytest.mark.parametrize("status", [None, {"jobStatus": "RUNNING"}, {"jobDeploymentStatus": "Initializing"}], ids=str)
async def test_nothing_is_read_live_while_the_job_runs(setup, status) -> None:
    setup.put(RAY_JOB, raw_objects.ray_job(status=status))
    setup.put(CONFIG_MAP, report("Running"))
    await setup.observe()
    assert setup.api.requests == []


@pytest.mark.parametrize("state", ["Succeeded", "Failed", "Stopped"])
async def test_nothing_is_read_live_when_the_last_report_is_known(setup, state) -> None:
    setup.put(RAY_JOB, raw_objects.ray_job(status=OVER[0]))
    setup.put(CONFIG_MAP, report(state))
    assert (await setup.observe()).report.progress.state == state
    assert setup.api.requests == []


async def test_nothing_is_read_where_there_is_no_report_or_no_job(setup) -> None:
    setup.put(RAY_JOB, raw_objects.ray_job(status=OVER[0]))
    await setup.observe()
    other = ObserveSetup()
    other.put(CONFIG_MAP, report())
    await other.observe()
    assert setup.api.requests == other.api.requests == []


async def test_a_report_that_is_gone_or_anothers_by_now_is_none(setup) -> None:
    setup.put(RAY_JOB, raw_objects.ray_job(status=OVER[0]))
    setup.put(CONFIG_MAP, report("Running"))
    assert (await setup.observe()).report is None
    setup.api.place(PROGRESS, report("Succeeded", owner="other"))
    assert (await setup.observe()).report is None


async def test_a_last_word_that_cannot_be_had_now_decides_nothing(setup) -> None:
    setup.put(RAY_JOB, raw_objects.ray_job(status=OVER[0]))
    setup.put(CONFIG_MAP, report("Running"))
    setup.api.refuse("GET", "configmaps", Unavailable(503, "not now"))
    with pytest.raises(Unavailable):
        await setup.observe()


def paced(age: float, **fields: object) -> dict:
    """A report whose newest version is `age` seconds old."""
    time = START.timestamp()
    text = {"attempt": 1, "state": "Running", "time": time, "versionTime": time - age, "versionSeconds": 5.0}
    return raw_objects.config_map(data={"progress.json": json.dumps(text | fields)})


@pytest.mark.parametrize(("age", "reads"), [(101.0, 1), (99.0, 0)])
async def test_a_report_that_would_be_a_stall_is_read_again(setup, age, reads) -> None:
    setup.put(RAY_JOB, raw_objects.ray_job(status={"jobDeploymentStatus": "Running"}))
    setup.put(CONFIG_MAP, paced(age))
    setup.api.place(PROGRESS, paced(1.0, update=9))
    seen = await setup.observe()
    assert setup.api.requests.count(("GET", PROGRESS)) == reads
    assert seen.report.progress.update == (9 if reads else 0)


async def test_while_a_queue_holds_the_job_no_report_is_read_again(setup) -> None:
    setup.put(RAY_JOB, raw_objects.ray_job() | {"spec": {"suspend": True}})
    setup.put(CONFIG_MAP, paced(9999.0))
    await setup.observe()
    assert setup.api.requests == []


def body(uid: str = "u", generation: int = 1, spec: object = SPEC, **metadata) -> dict:
    return {"metadata": {**TRAINING["metadata"], "uid": uid, "generation": generation, **metadata}, "spec": spec}


def test_a_training_is_read_once_in_a_generation() -> None:
    parser = TrainingParser()
    first, _ = parser.parse(body())
    assert parser.parse(body())[0] is first
    assert parser.parse(body(spec={"nonsense": 1}))[0] is first
    changed, problems = parser.parse(body(generation=2, spec={**SPEC, "rollout": {"nodes": 3, "maxNodes": 4}}))
    assert problems == ()
    assert changed.spec.rollout.nodes == 3


def test_a_training_is_read_again_when_copied_labels_or_annotations_have_changed() -> None:
    parser = TrainingParser()
    first, _ = parser.parse(body())
    assert parser.parse(body(annotations={"note": "it is copied nowhere"}))[0] is first
    moved, _ = parser.parse(body(labels={"kueue.x-k8s.io/queue-name": "others"}))
    assert moved.labels == {"kueue.x-k8s.io/queue-name": "others"}
    topology, _ = parser.parse(body(annotations={"huawei.com/schedule": "near"}))
    assert topology.annotations == {"huawei.com/schedule": "near"}


def test_problems_are_kept_as_well() -> None:
    parser = TrainingParser()
    assert parser.parse(body(spec={}))[0] is None
    assert parser.parse(body())[1]


def test_of_too_many_trainings_the_one_unused_longest_goes() -> None:
    parser = TrainingParser(max_bytes=2 * len(json.dumps(SPEC)))
    a, _ = parser.parse(body("a"))
    b, _ = parser.parse(body("b"))
    parser.parse(body("a"))
    parser.parse(body("c"))
    assert parser.parse(body("a"))[0] is a
    assert parser.parse(body("b"))[0] is not b


def test_large_specs_do_not_fill_the_memory_with_parsed_trainings() -> None:
    """80,000 empty objects, where the definition keeps unknown fields, take 240 KB as JSON and 6 MB when they are parsed."""
    parser = TrainingParser()
    affinity = {"any": [{}] * 80_000}
    large = {**SPEC, "pods": {"train": {"spec": {"affinity": affinity}}}}
    for number in range(3 * MAX_CACHED_BYTES // 240_000):
        parser.parse(body(str(number), spec=large))
    assert sum(parsed.size for parsed in parser._parsed.values()) == parser._bytes <= MAX_CACHED_BYTES


def test_a_spec_is_checked_once_and_again_for_other_settings(monkeypatch) -> None:
    checked: list[object] = []
    monkeypatch.setattr(acceptance, "cannot_run", lambda spec: checked.append(spec) or [])
    training, _ = TrainingParser().parse(body())
    for settings in (OperatorSettings(), OperatorSettings(), OperatorSettings(workers=3)):
        assert acceptance.refusals(training, settings) == ()
    assert len(checked) == 2


async def test_what_is_costly_to_make_of_a_training_is_made_once(setup) -> None:
    first, again = (await setup.observe()).training, (await setup.observe()).training
    assert config_map(again) is config_map(first)
    metadata = {**TRAINING["metadata"], "generation": 4}
    changed = (await setup.observe(metadata=metadata, spec={**SPEC, "seed": 5})).training
    assert "seed: 5" in config_map(changed)["data"]["training.yaml"]


async def test_a_pod_with_copied_labels_is_not_one_of_the_trainings_pods(setup) -> None:
    """A pod to debug, made with `kubectl run --labels`, would hold up the next attempt for ever."""
    setup.put(POD, raw_objects.pod("debug", pool="train", ownerReferences=[]), raw_objects.pod("real", pool="train"))
    assert [pod.name for pod in (await setup.observe()).pods] == ["real"]


LOST = {"deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": 0}


@pytest.mark.parametrize(
    ("node", "state"),
    [
        (None, "Gone"),
        ({}, "Exists"),
        ({"taints": [{"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}]}, "Exists"),
        ({"taints": [{"key": "node.kubernetes.io/out-of-service", "effect": "NoExecute"}]}, "OutOfService"),
    ],
)
async def test_the_node_of_a_pod_whose_end_nobody_confirms_is_read(setup, node, state) -> None:
    setup.put(POD, raw_objects.pod("lost", pool="train", **LOST))
    setup.api.time += timedelta(seconds=60)
    if node is not None:
        setup.api.place(NODE.path(None, "node-1"), {"metadata": {"name": "node-1"}, "spec": node})
    assert (await setup.observe()).nodes == {"node-1": state}
    running = {"attempts": [{"number": 1, "job": "demo-1", "outcome": "Running"}]}
    assert (await setup.observe(status=running)).nodes == {}, "nothing waits for it"


async def test_a_node_that_may_not_be_read_proves_nothing(setup) -> None:
    setup.put(POD, raw_objects.pod("lost", pool="train", **LOST))
    setup.api.time += timedelta(seconds=60)
    setup.api.refuse("GET", "nodes", Forbidden(403, "may not"))
    assert (await setup.observe()).nodes == {"node-1": "Unreadable"}
    requests = len(setup.api.requests)
    seen = await observe(TRAINING, setup.cluster, setup.parser, setup.api, reads_nodes=False)
    assert (seen.nodes, len(setup.api.requests)) == ({"node-1": "Unreadable"}, requests)


async def test_the_nodes_of_rollout_pods_and_of_pods_that_end_in_time_are_not_read(setup) -> None:
    setup.put(POD, raw_objects.pod("rollout", **LOST), raw_objects.pod("train", pool="train"))
    setup.api.time += timedelta(seconds=60)
    assert (await setup.observe()).nodes == {}

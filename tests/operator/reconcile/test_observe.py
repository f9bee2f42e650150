"""What is taken for the training's own, and when the API server is asked directly."""

import json
from datetime import UTC, datetime

import pytest

from qwen35_operator.desired import config
from qwen35_operator.kube.cluster import Cluster
from qwen35_operator.kube.errors import Unavailable
from qwen35_operator.kube.kinds import CONFIG_MAP, POD, RAY_CLUSTER, RAY_JOB, ROLE, Kind
from qwen35_operator.kube.parse import record, training_of
from qwen35_operator.reconcile.observe import Parsed, observe
from qwen35_trainer.spec import Problem
from tests.operator.kube import raw
from tests.operator.kube.memory import Memory
from tests.operator.reconcile.world import SPEC

PROGRESS = CONFIG_MAP.path("team", "demo-progress")
TRAINING = {
    "metadata": {
        "name": "demo",
        "namespace": "team",
        "uid": raw.UID,
        "generation": 3,
        "resourceVersion": "77",
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "labels": {"kueue.x-k8s.io/queue-name": "gpus"},
    },
    "spec": SPEC,
}


class Scene:
    """Stores to fill, and an API server that is asked for what they may not have yet."""

    def __init__(self) -> None:
        self.api = Memory()
        self.parsed = Parsed()
        self.cluster = Cluster((), lambda key: None, lambda kind: None)

    def put(self, kind: Kind, *bodies: dict) -> None:
        for body in bodies:
            self.cluster.stores[kind].put(training_of(body), record(kind, body))

    async def observe(self, **changes):
        return await observe({**TRAINING, **changes}, self.cluster, self.parsed, self.api)


@pytest.fixture
def scene() -> Scene:
    return Scene()


def report(state: str = "Running", attempt: int = 1, **about) -> dict:
    text = json.dumps({"attempt": attempt, "state": state, "time": 1.0})
    return raw.config_map(data={"progress.json": text}, **about)


async def test_what_the_body_says(scene) -> None:
    seen = await scene.observe()
    assert (seen.name, seen.namespace, seen.uid, seen.generation, seen.version) == ("demo", "team", raw.UID, 3, "77")
    assert seen.created == datetime(2026, 1, 1, tzinfo=UTC)
    assert not seen.deleting
    assert seen.training.labels == {"kueue.x-k8s.io/queue-name": "gpus"}
    assert seen.training.spec.rollout.nodes == 2
    assert (seen.children, seen.jobs, seen.clusters, seen.pods, seen.reported, seen.control) == (
        {},
        (),
        (),
        (),
        None,
        None,
    )
    assert scene.api.requests == []


async def test_a_training_that_is_deleted_is_seen_as_such(scene) -> None:
    about = {**TRAINING["metadata"], "deletionTimestamp": "2026-01-01T01:00:00Z"}
    assert (await scene.observe(metadata=about)).deleting


async def test_a_spec_that_cannot_be_read_is_none_with_its_problems(scene) -> None:
    seen = await scene.observe(spec={**SPEC, "rollout": {"nodes": -1}})
    assert seen.training is None
    assert any("rollout" in problem.path for problem in seen.problems)


async def test_a_body_without_spec_and_status_can_be_looked_at(scene) -> None:
    seen = await observe({"metadata": TRAINING["metadata"]}, scene.cluster, scene.parsed, scene.api)
    assert seen.training is None
    assert seen.problems


async def test_what_has_another_owner_is_not_its_child(scene) -> None:
    scene.put(CONFIG_MAP, raw.config_map("demo-config"), raw.config_map("foreign", uid="u2", owner="other"))
    scene.put(ROLE, {"metadata": raw.metadata("demo-trainer")})
    scene.put(RAY_JOB, raw.ray_job("demo-1"), raw.ray_job("demo-9", attempt=9, uid="u2", owner="an earlier demo"))
    scene.put(CONFIG_MAP, raw.config_map("other-config", training="other", uid="u3"))
    seen = await scene.observe()
    assert set(seen.children) == {("ConfigMap", "demo-config"), ("Role", "demo-trainer")}
    assert [job.name for job in seen.jobs] == ["demo-1"]


async def test_a_report_or_order_of_somebody_else_is_none(scene) -> None:
    order = raw.config_map("demo-control", {"control.json": '{"attempt": 1}'}, uid="u2", owner="other")
    scene.put(CONFIG_MAP, report(owner="other"), order)
    seen = await scene.observe()
    assert (seen.reported, seen.control) == (None, None)


async def test_report_and_order_are_read(scene) -> None:
    scene.put(CONFIG_MAP, report(), raw.config_map("demo-control", {"control.json": '{"attempt": 4}'}, uid="u2"))
    seen = await scene.observe()
    assert seen.reported.progress.state == "Running"
    assert seen.control.attempt == 4


async def test_a_cluster_whose_job_is_not_ours_belongs_to_no_attempt(scene) -> None:
    scene.put(RAY_JOB, raw.ray_job("demo-1", uid="job"))
    mine, lost = raw.ray_cluster("demo-1-a", owner="job"), raw.ray_cluster("demo-1-b", uid="u2", owner="gone")
    scene.put(RAY_CLUSTER, mine, lost)
    seen = await scene.observe()
    assert {cluster.name: cluster.attempt for cluster in seen.clusters} == {"demo-1-a": 1, "demo-1-b": 0}


async def test_a_pod_older_than_the_training_belongs_to_no_attempt(scene) -> None:
    old = raw.pod("old", uid="u2")
    old["metadata"]["creationTimestamp"] = "2025-12-31T23:59:59Z"
    scene.put(POD, raw.pod("new"), old)
    assert {pod.name: pod.attempt for pod in (await scene.observe()).pods} == {"new": 1, "old": 0}


async def test_what_cannot_be_watched_is_told(scene) -> None:
    problem = Problem("pods", "the operator may not watch it", "grant it")
    scene.cluster.watches[0].problem = problem
    assert (await scene.observe()).unavailable == (problem,)


OVER = [{"jobDeploymentStatus": "Complete"}, {"jobDeploymentStatus": "Failed"}, {"jobStatus": "SUCCEEDED"}]
OVER += [{"jobStatus": "FAILED"}, {"jobStatus": "STOPPED"}, {"jobDeploymentStatus": "ValidationFailed"}]


@pytest.mark.parametrize("status", OVER, ids=str)
async def test_the_last_word_of_a_job_that_is_over_is_read_anew(scene, status) -> None:
    scene.put(RAY_JOB, raw.ray_job(status=status))
    scene.put(CONFIG_MAP, report("Running"))
    scene.api.place(PROGRESS, report("Succeeded"))
    seen = await scene.observe()
    assert seen.reported.progress.state == "Succeeded"
    assert scene.api.requests == [("GET", PROGRESS)]


@pytest.mark.parametrize("text", [None, "", "{"])
async def test_it_is_read_anew_also_when_there_was_none_or_none_to_be_read(scene, text) -> None:
    scene.put(RAY_JOB, raw.ray_job(status=OVER[0]))
    scene.put(CONFIG_MAP, raw.config_map(data=None if text is None else {"progress.json": text}))
    scene.api.place(PROGRESS, report("Succeeded"))
    assert (await scene.observe()).reported.progress.state == "Succeeded"


async def test_it_is_read_anew_while_it_is_of_an_earlier_attempt(scene) -> None:
    scene.put(
        RAY_JOB, raw.ray_job("demo-1", status=OVER[1]), raw.ray_job("demo-2", attempt=2, status=OVER[0], uid="u2")
    )
    scene.put(CONFIG_MAP, report("Failed", attempt=1))
    scene.api.place(PROGRESS, report("Succeeded", attempt=2))
    assert (await scene.observe()).reported.progress.attempt == 2


@pytest.mark.parametrize("status", [None, {"jobStatus": "RUNNING"}, {"jobDeploymentStatus": "Initializing"}], ids=str)
async def test_nothing_is_read_anew_while_the_job_runs(scene, status) -> None:
    scene.put(RAY_JOB, raw.ray_job(status=status))
    scene.put(CONFIG_MAP, report("Running"))
    await scene.observe()
    assert scene.api.requests == []


@pytest.mark.parametrize("state", ["Succeeded", "Failed", "Stopped"])
async def test_nothing_is_read_anew_when_the_last_word_is_known(scene, state) -> None:
    scene.put(RAY_JOB, raw.ray_job(status=OVER[0]))
    scene.put(CONFIG_MAP, report(state))
    assert (await scene.observe()).reported.progress.state == state
    assert scene.api.requests == []


async def test_nothing_is_read_where_there_is_no_report_or_no_job(scene) -> None:
    scene.put(RAY_JOB, raw.ray_job(status=OVER[0]))
    await scene.observe()
    other = Scene()
    other.put(CONFIG_MAP, report())
    await other.observe()
    assert scene.api.requests == other.api.requests == []


async def test_a_report_that_is_gone_or_anothers_by_now_is_none(scene) -> None:
    scene.put(RAY_JOB, raw.ray_job(status=OVER[0]))
    scene.put(CONFIG_MAP, report("Running"))
    assert (await scene.observe()).reported is None
    scene.api.place(PROGRESS, report("Succeeded", owner="other"))
    assert (await scene.observe()).reported is None


async def test_a_last_word_that_cannot_be_had_now_decides_nothing(scene) -> None:
    scene.put(RAY_JOB, raw.ray_job(status=OVER[0]))
    scene.put(CONFIG_MAP, report("Running"))
    scene.api.refuse("GET", "configmaps", Unavailable(503, "not now"))
    with pytest.raises(Unavailable):
        await scene.observe()


def body(uid: str = "u", generation: int = 1, spec: object = SPEC, **about) -> dict:
    return {"metadata": {**TRAINING["metadata"], "uid": uid, "generation": generation, **about}, "spec": spec}


def test_a_training_is_read_once_in_a_generation() -> None:
    parsed = Parsed()
    first, _ = parsed.of(body())
    assert parsed.of(body())[0] is first
    assert parsed.of(body(spec={"nonsense": 1}))[0] is first
    changed, problems = parsed.of(body(generation=2, spec={**SPEC, "rollout": {"nodes": 3, "maxNodes": 4}}))
    assert problems == ()
    assert changed.spec.rollout.nodes == 3


def test_a_training_is_read_again_when_what_it_hands_on_has_changed() -> None:
    parsed = Parsed()
    first, _ = parsed.of(body())
    assert parsed.of(body(annotations={"note": "nobody hands it on"}))[0] is first
    moved, _ = parsed.of(body(labels={"kueue.x-k8s.io/queue-name": "others"}))
    assert moved.labels == {"kueue.x-k8s.io/queue-name": "others"}
    topology, _ = parsed.of(body(annotations={"huawei.com/schedule": "near"}))
    assert topology.annotations == {"huawei.com/schedule": "near"}


def test_problems_are_kept_as_well() -> None:
    parsed = Parsed()
    assert parsed.of(body(spec={}))[0] is None
    assert parsed.of(body())[1]


def test_of_too_many_trainings_the_one_unused_longest_goes() -> None:
    parsed = Parsed(size=2)
    a, _ = parsed.of(body("a"))
    b, _ = parsed.of(body("b"))
    parsed.of(body("a"))
    parsed.of(body("c"))
    assert parsed.of(body("a"))[0] is a
    assert parsed.of(body("b"))[0] is not b


async def test_what_is_costly_to_make_of_a_training_is_made_once(scene) -> None:
    first, again = (await scene.observe()).training, (await scene.observe()).training
    assert config.build(again) is config.build(first)
    about = {**TRAINING["metadata"], "generation": 4}
    changed = (await scene.observe(metadata=about, spec={**SPEC, "seed": 5})).training
    assert "seed: 5" in config.build(changed)["data"]["training.yaml"]

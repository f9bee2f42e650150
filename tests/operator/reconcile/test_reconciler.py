"""One reconcile against an API server in memory: what is written, how often, and what becomes of what is refused."""

from copy import deepcopy

import pytest

from qwen35_operator.desired import names
from qwen35_operator.kube.cluster import Cluster
from qwen35_operator.kube.errors import Conflict, Forbidden, Unavailable
from qwen35_operator.kube.kinds import CONFIG_MAP, RAY_JOB, TRAINING, WRITTEN
from qwen35_operator.kube.trainings import Trainings
from qwen35_operator.reconcile.reconciler import Reconciler, Refusal
from qwen35_operator.settings import Settings
from tests.operator.kube import raw
from tests.operator.kube.memory import Memory
from tests.operator.reconcile.world import SPEC

KEY = ("team", "demo")
PATH = TRAINING.path("team", "demo")
STATUS = f"{PATH}/status"
JOB = RAY_JOB.path("team", "demo-1")


class Stage:
    """A training in the API server and in the operator's view of it."""

    def __init__(self, **spec) -> None:
        self.api = Memory()
        self.cluster = Cluster((), lambda key: None, lambda kind: None)
        self.trainings = Trainings()
        self.reconciler = Reconciler(Settings(), self.api, self.cluster, self.trainings)
        about = {"name": "demo", "namespace": "team", "uid": raw.UID, "generation": 1}
        self.api.place(PATH, {"metadata": about, "spec": {**deepcopy(SPEC), **spec}})
        self.watched()

    def watched(self) -> None:
        """The watch of trainings tells what is."""
        self.trainings.put(self.api.objects[PATH])

    async def reconcile(self) -> float | None:
        return await self.reconciler.reconcile(KEY)

    @property
    def status(self) -> dict:
        return self.api.objects[PATH]["status"]

    def condition(self, kind: str) -> dict:
        return next(one for one in self.status["conditions"] if one["type"] == kind)

    def writes_of_status(self) -> int:
        return self.api.requests.count(("PATCH", STATUS))


@pytest.fixture
def stage() -> Stage:
    return Stage()


async def test_a_training_that_nobody_knows_needs_nothing(stage) -> None:
    assert await stage.reconciler.reconcile(("team", "unknown")) is None
    assert stage.api.requests == []


async def test_the_children_are_created_then_the_status_is_written_once(stage) -> None:
    assert await stage.reconcile() == 0.0
    verbs = [verb for verb, _ in stage.api.wrote()]
    assert verbs == ["POST"] * (len(verbs) - 1) + ["PATCH"]
    assert stage.status["state"] == "Starting"
    assert stage.status["attempts"][0]["job"] == "demo-1"
    assert JOB in stage.api.objects


async def test_what_has_been_done_is_not_done_again(stage) -> None:
    await stage.reconcile()
    wrote = stage.api.wrote()
    await stage.reconcile()
    settled = stage.api.wrote()
    assert all(verb == "PATCH" for verb, _ in settled[len(wrote) :])
    await stage.reconcile()
    assert stage.api.wrote() == settled


async def test_the_status_is_written_only_over_the_one_that_was_read(stage) -> None:
    await stage.reconcile()
    moved = {**stage.api.objects[PATH], "status": {}}
    stage.api.place(PATH, moved)
    stage.trainings.put({**moved, "metadata": {**moved["metadata"], "resourceVersion": "9999"}})
    with pytest.raises(Conflict):
        await stage.reconcile()
    assert stage.status == {}


async def test_the_next_reconcile_sees_the_status_that_the_last_one_wrote(stage) -> None:
    await stage.reconcile()
    assert stage.trainings.get(KEY)["status"] == stage.status


async def test_a_refusal_is_told_in_the_status_and_then_raised(stage) -> None:
    stage.api.refuse("POST", "rayjobs", Forbidden(403, "cannot create"))
    with pytest.raises(Refusal, match="may not create rayjobs"):
        await stage.reconcile()
    assert stage.status["state"] == "Pending"
    assert "attempts" not in stage.status or stage.status["attempts"] == []
    assert "may not create rayjobs" in stage.condition("Ready")["message"]
    await stage.reconcile()
    assert stage.status["state"] == "Starting"


async def test_the_same_refusal_is_written_once(stage) -> None:
    stage.api.refuse("POST", "rayjobs", *[Forbidden(403, "cannot create")] * 3)
    for _ in range(3):
        with pytest.raises(Refusal):
            await stage.reconcile()
    assert stage.writes_of_status() == 1


async def test_a_name_that_is_taken_is_not_accepted(stage) -> None:
    path = CONFIG_MAP.path("team", "demo-config")
    stage.api.place(path, {"metadata": {"name": "demo-config", "namespace": "team"}, "data": {"theirs": "x"}})
    with pytest.raises(Refusal, match="demo-config exists"):
        await stage.reconcile()
    assert (stage.condition("Accepted")["status"], stage.condition("Accepted")["reason"]) == ("False", "NameTaken")
    assert stage.api.objects[path]["data"] == {"theirs": "x"}
    assert JOB not in stage.api.objects


CHILDREN = [
    ("ConfigMap", "demo-config"),
    ("ConfigMap", "demo-control"),
    ("ConfigMap", "demo-progress"),
    ("ServiceAccount", "demo-trainer"),
    ("Role", "demo-trainer"),
    ("RoleBinding", "demo-trainer"),
    ("NetworkPolicy", "demo"),
]


@pytest.mark.parametrize(("kind", "name"), [*CHILDREN, ("RayJob", "demo-1")])
@pytest.mark.parametrize("labelled", [False, True], ids=["", "labelled as ours"])
async def test_a_foreign_object_of_any_kind_is_named_and_never_touched(stage, kind, name, labelled) -> None:
    path = WRITTEN[kind].path("team", name)
    labels = {names.TRAINING: "demo"} if labelled else {}
    there = stage.api.place(path, {"kind": kind, "metadata": {"name": name, "namespace": "team", "labels": labels}})
    with pytest.raises(Refusal, match=f"{kind} {name} exists and is not this training's"):
        await stage.reconcile()
    assert (stage.condition("Accepted")["status"], stage.condition("Accepted")["reason"]) == ("False", "NameTaken")
    assert stage.api.objects[path] == there
    assert kind == "RayJob" or JOB not in stage.api.objects
    del stage.api.objects[path]
    await stage.reconcile()
    assert stage.api.objects[path]["metadata"]["ownerReferences"][0]["uid"] == raw.UID
    assert stage.condition("Accepted")["status"] == "True"


async def test_every_child_but_the_history_has_a_case(stage) -> None:
    """The history is large, and has a story of its own on the real API server."""
    await stage.reconcile()
    made = {(one.get("kind"), one["metadata"]["name"]) for one in stage.api.objects.values()}
    others = {(None, "demo"), ("RayJob", "demo-1"), ("ConfigMap", "demo-history")}
    assert {one for one in made - others if one[0] != "Event"} == set(CHILDREN)


@pytest.mark.parametrize(("kind", "name"), CHILDREN)
async def test_a_deleted_child_of_any_kind_is_created_again(stage, kind, name) -> None:
    await stage.reconcile()
    await stage.reconcile()
    path = WRITTEN[kind].path("team", name)
    gone = stage.api.objects.pop(path)
    about = gone["metadata"]
    stage.cluster.stores[WRITTEN[kind]].remove("team", name, about["uid"], "1000")
    wrote = len(stage.api.wrote())
    await stage.reconcile()
    assert stage.api.objects[path]["metadata"]["uid"] != about["uid"]
    assert stage.api.objects[path]["metadata"].get("annotations") == about.get("annotations")
    assert [verb for verb, _ in stage.api.wrote()[wrote:]][:1] == ["POST"]
    assert [one["outcome"] for one in stage.status["attempts"]] == ["Running"]


async def test_what_the_server_does_not_answer_is_raised_and_no_status_written(stage) -> None:
    stage.api.refuse("POST", "rayjobs", Unavailable(503, "not now"))
    with pytest.raises(Unavailable):
        await stage.reconcile()
    assert stage.writes_of_status() == 0
    await stage.reconcile()
    assert len([path for path in stage.api.objects if path.startswith(RAY_JOB.path("team"))]) == 1


async def test_a_creation_whose_answer_was_lost_is_found(stage) -> None:
    lost = iter([True])

    async def before(verb: str, path: str) -> None:
        if verb == "POST" and path.endswith("/rayjobs") and next(lost, False):
            stage.api.place(JOB, stage.api.bodies[-1])
            raise Unavailable(0, "reset by peer")

    stage.api.before = before
    with pytest.raises(Unavailable):
        await stage.reconcile()
    uid = stage.api.objects[JOB]["metadata"]["uid"]
    await stage.reconcile()
    assert stage.api.objects[JOB]["metadata"]["uid"] == uid
    assert [attempt["job"] for attempt in stage.status["attempts"]] == ["demo-1"]


async def test_for_a_training_that_was_deleted_meanwhile_nothing_is_created(stage) -> None:
    del stage.api.objects[PATH]
    assert await stage.reconcile() is None
    assert stage.api.wrote() == []
    assert stage.trainings.get(KEY) is None


async def test_for_one_that_is_on_its_way_out_nothing_is_created(stage) -> None:
    about = {**stage.api.objects[PATH]["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}
    stage.api.place(PATH, {**stage.api.objects[PATH], "metadata": about})
    assert await stage.reconcile() is None
    assert stage.api.wrote() == []


async def test_for_another_of_its_name_nothing_is_created_in_the_name_of_the_first(stage) -> None:
    again = stage.api.objects[PATH]
    stage.api.place(PATH, {**again, "metadata": {**again["metadata"], "uid": "a later one"}})
    assert await stage.reconcile() is None
    assert stage.api.wrote() == []
    stage.watched()
    await stage.reconcile()
    assert stage.api.objects[JOB]["metadata"]["ownerReferences"][0]["uid"] == "a later one"


async def test_a_training_that_goes_before_its_status_is_written_is_forgotten(stage) -> None:
    async def before(verb: str, path: str) -> None:
        if path == STATUS:
            stage.api.objects.pop(PATH, None)

    stage.api.before = before
    await stage.reconcile()
    assert stage.trainings.get(KEY) is None
    assert PATH not in stage.api.objects


async def test_a_training_that_is_being_deleted_is_left_alone(stage) -> None:
    about = {**stage.api.objects[PATH]["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}
    stage.api.place(PATH, {**stage.api.objects[PATH], "metadata": about})
    stage.watched()
    assert await stage.reconcile() is None
    assert stage.api.requests == []


async def test_a_spec_that_cannot_be_run_is_told_and_nothing_created() -> None:
    stage = Stage(train={"nodes": 0})
    assert await stage.reconcile() is None
    assert stage.api.wrote() == [("PATCH", "status")]
    assert stage.condition("Accepted")["status"] == "False"
    assert "spec.train" in stage.condition("Accepted")["message"]

"""One reconcile against an API server in memory: what is written, how often, and what happens to refused writes."""

from contextlib import suppress
from copy import deepcopy
from datetime import timedelta

import pytest

from qwen35_operator.desired import object_names
from qwen35_operator.kube.api_errors import Conflict, Forbidden, Invalid, Unavailable, api_error
from qwen35_operator.kube.kinds import CONFIG_MAP, RAY_JOB, ROLE, TRAINING, WRITTEN
from qwen35_operator.kube.object_cache import ObjectCache
from qwen35_operator.kube.object_parsing import record
from qwen35_operator.kube.trainings import Trainings
from qwen35_operator.operator_settings import OperatorSettings
from qwen35_operator.reconcile.drift import REPAIR_SECONDS
from qwen35_operator.reconcile.reconciler import Reconciler, Refusal
from qwen35_operator.reconcile.status_losses import FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS, StatusLosses, lost_fields
from qwen35_operator.reconcile.write_pace import BURST, PERIOD_SECONDS
from qwen35_operator.reconcile.writer import NotLeading
from qwen35_trainer.contract import ProgressReport
from qwen35_trainer.contract.progress_report import CheckpointReport
from qwen35_trainer.contract.shared_names import PROGRESS_KEY, progress_name
from tests.operator.kube import raw_objects
from tests.operator.kube.memory_api import START, MemoryApi
from tests.operator.reconcile.world import SPEC

KEY = ("team", "demo")
PATH = TRAINING.path("team", "demo")
STATUS = f"{PATH}/status"
JOB = RAY_JOB.path("team", "demo-1")


class ReconcilerSetup:
    """A training in the API server and in the operator's view of it."""

    def __init__(self, **spec) -> None:
        self.api = MemoryApi()
        self.cluster = ObjectCache((), lambda key: None, lambda kind: None)
        self.trainings = Trainings()
        self.reconciler = Reconciler(OperatorSettings(), self.api, self.cluster, self.trainings)
        metadata = {"name": "demo", "namespace": "team", "uid": raw_objects.UID, "generation": 1}
        self.api.place(PATH, {"metadata": metadata, "spec": {**deepcopy(SPEC), **spec}})
        self.watched()

    def watched(self) -> None:
        """The watch of trainings delivers the present object."""
        self.trainings.put(self.api.objects[PATH])

    async def reconcile(self) -> float | None:
        return await self.reconciler.reconcile(KEY)

    @property
    def status(self) -> dict:
        return self.api.objects[PATH]["status"]

    def delete(self, kind: str, name: str) -> str:
        """Somebody deletes a child, and the watch delivers this. Returns its path."""
        path = WRITTEN[kind].path("team", name)
        gone = self.api.objects.pop(path)
        self.cluster.stores[WRITTEN[kind]].remove("team", name, gone["metadata"]["uid"], "1000000")
        return path

    def report_checkpoint(self, update: int) -> None:
        saved = CheckpointReport(uri=f"/checkpoints/{update}", update=update, time=self.api.time.timestamp())
        self.report(state="Running", checkpoint=saved)

    def report(self, **fields) -> None:
        """The watch delivers a report of the trainer."""
        path = CONFIG_MAP.path("team", progress_name("demo"))
        report = ProgressReport(attempt=1, time=self.api.time.timestamp(), **fields)
        changed = self.api.objects[path] | {"data": {PROGRESS_KEY: report.model_dump_json()}}
        self.cluster.stores[CONFIG_MAP].put("demo", record(CONFIG_MAP, self.api.place(path, changed)))

    def condition(self, kind: str) -> dict:
        return next(item for item in self.status["conditions"] if item["type"] == kind)

    def writes_of_status(self) -> int:
        return self.api.requests.count(("PATCH", STATUS))


@pytest.fixture
def setup() -> ReconcilerSetup:
    return ReconcilerSetup()


async def test_a_training_that_nobody_knows_needs_nothing(setup) -> None:
    assert await setup.reconciler.reconcile(("team", "unknown")) is None
    assert setup.api.requests == []


async def test_the_children_are_created_then_the_status_is_written_once(setup) -> None:
    assert await setup.reconcile() == 0.0
    verbs = [verb for verb, _ in setup.api.wrote()]
    assert verbs == ["POST"] * (len(verbs) - 1) + ["PATCH"]
    assert setup.status["state"] == "Starting"
    assert setup.status["attempts"][0]["job"] == "demo-1"
    assert JOB in setup.api.objects


async def test_what_has_been_done_is_not_done_again(setup) -> None:
    await setup.reconcile()
    wrote = setup.api.wrote()
    await setup.reconcile()
    settled = setup.api.wrote()
    assert all(verb == "PATCH" for verb, _ in settled[len(wrote) :])
    await setup.reconcile()
    assert setup.api.wrote() == settled


async def test_the_status_is_written_only_over_the_one_that_was_read(setup) -> None:
    await setup.reconcile()
    moved = {**setup.api.objects[PATH], "status": {}}
    setup.api.place(PATH, moved)
    setup.trainings.put({**moved, "metadata": {**moved["metadata"], "resourceVersion": "9999"}})
    with pytest.raises(Conflict):
        await setup.reconcile()
    assert setup.status == {}


async def test_only_what_changed_in_the_status_is_sent(setup) -> None:
    await setup.reconcile()
    await setup.reconcile()
    body = setup.api.objects[PATH]
    setup.api.place(PATH, {**body, "metadata": {**body["metadata"], "generation": 2}})
    setup.watched()
    await setup.reconcile()
    writes = zip(setup.api.requests, setup.api.bodies, strict=True)
    *_, last = [body for request, body in writes if request == ("PATCH", STATUS)]
    assert set(last["status"]) == {"observedGeneration", "conditions"}
    assert setup.status["observedGeneration"] == 2
    assert setup.status["attempts"][0]["job"] == "demo-1"


async def test_the_next_reconcile_sees_the_status_that_the_last_one_wrote(setup) -> None:
    await setup.reconcile()
    assert setup.trainings.get(KEY)["status"] == setup.status


async def test_a_refusal_is_reported_in_the_status_and_then_raised(setup) -> None:
    setup.api.refuse("POST", "rayjobs", Forbidden(403, "cannot create"))
    with pytest.raises(Refusal, match="may not create rayjobs"):
        await setup.reconcile()
    assert setup.status["state"] == "Pending"
    assert "attempts" not in setup.status or setup.status["attempts"] == []
    assert "may not create rayjobs" in setup.condition("Ready")["message"]
    await setup.reconcile()
    assert setup.status["state"] == "Starting"


@pytest.mark.parametrize("error", [Forbidden(403, "no"), Invalid(422, "a policy denied the request")])
async def test_a_training_that_has_ended_does_not_start_again_because_a_deletion_is_refused(error) -> None:
    setup = ReconcilerSetup(cleanupSecondsAfterFinished=0)
    await setup.reconcile()
    setup.watched()
    path = CONFIG_MAP.path("team", progress_name("demo"))
    report = ProgressReport(attempt=1, state="Succeeded", time=0.0)
    progress = setup.api.objects[path] | {"data": {PROGRESS_KEY: report.model_dump_json()}}
    setup.cluster.stores[CONFIG_MAP].put("demo", record(CONFIG_MAP, setup.api.place(path, progress)))
    await setup.reconcile()
    assert setup.status["state"] == "Succeeded"
    for _ in range(2):
        setup.watched()
        setup.api.refuse("DELETE", "rayjobs", error)
        with pytest.raises(Refusal):
            await setup.reconcile()
        assert setup.status["state"] == "Succeeded"
        assert setup.condition("Succeeded")["status"] == "True"
        assert setup.condition("Degraded")["status"] == "True"
        assert len(setup.status["attempts"]) == 1


DENIAL = 'admission webhook "freeze.example.com" denied the request: frozen'
UNWRITTEN = {
    "denied with 403": api_error(403, DENIAL),
    "denied with 404, although the training exists": api_error(404, DENIAL),
    "denied with 409": api_error(409, DENIAL),
    "no permission": api_error(403, "cannot patch resource"),
    "an older CRD": api_error(422, 'status.attempts[0].stop: Unsupported value: "x"'),
    "a webhook that cannot be called": api_error(500, 'failed calling webhook "freeze.example.com"'),
}


@pytest.mark.parametrize("error", UNWRITTEN.values(), ids=UNWRITTEN)
async def test_an_event_says_that_the_status_cannot_be_written(setup, error) -> None:
    setup.api.refuse("PATCH", "qwen35trainings", error, error)
    for _ in range(2):
        with pytest.raises(type(error)):
            await setup.reconcile()
    assert JOB in setup.api.objects
    (event,) = (item for item in setup.api.objects.values() if item.get("reason") == "StatusNotWritten")
    assert event["involvedObject"]["name"] == "demo"
    assert event["type"] == "Warning"
    assert error.message in event["message"]
    await setup.reconcile()
    assert setup.status["state"] == "Starting"


@pytest.mark.parametrize(
    ("sent", "stored", "lost"),
    [
        ({"a": 1, "b": None}, {"a": 1}, []),
        ({"a": 1}, {"a": 2}, []),
        ({"a": 1, "b": {"c": 1, "d": 2}}, {"b": {"c": 1}}, ["status.a", "status.b.d"]),
        ({"a": [{"b": 1, "c": 2}, {"b": 1, "c": 2}]}, {"a": [{"b": 1}, {"b": 1}]}, ["status.a[].c"]),
        ({"a": [{"b": 1}]}, {"a": []}, []),
        ({"a": {}, "b": []}, {"a": {}, "b": []}, []),
    ],
)
def test_fields_that_were_not_stored_are_found(sent, stored, lost) -> None:
    assert lost_fields(sent, stored, "status") == lost


@pytest.mark.parametrize(
    "error", [api_error(429, "too many requests"), api_error(503, "leader changed"), api_error(500, "etcd: timeout")]
)
async def test_no_event_says_that_the_api_server_is_busy(setup, error) -> None:
    setup.api.refuse("PATCH", "qwen35trainings", error)
    with pytest.raises(Unavailable):
        await setup.reconcile()
    assert not any(item.get("reason") == "StatusNotWritten" for item in setup.api.objects.values())


class OldDefinition(MemoryApi):
    """An API server that prunes fields of the status which its definition of a training lacks."""

    pruned = ("state", "startTime")  # of the status, and of each attempt

    async def patch(self, path, body, kind, query=None):
        if path.endswith("/status"):
            status = deepcopy({name: value for name, value in body["status"].items() if name != self.pruned[0]})
            for attempt in status.get("attempts") or ():
                attempt.pop(self.pruned[1], None)
            body = body | {"status": status}
        return await super().patch(path, body, kind, query)


async def test_a_definition_that_lacks_fields_of_the_status_pauses_the_training_and_is_named() -> None:
    """Without them the operator would decide the same again and again: it would retry a failed training for ever."""
    setup = ReconcilerSetup()
    setup.api.__class__ = OldDefinition
    await setup.reconcile()
    (event,) = (item for item in setup.api.objects.values() if item.get("reason") == "StatusNotStored")
    assert "does not store status.state, status.attempts[].startTime" in event["message"]
    requests = len(setup.api.requests)
    assert await setup.reconcile() == FIRST_PAUSE_SECONDS
    assert len(setup.api.requests) == requests
    setup.api.time += timedelta(seconds=FIRST_PAUSE_SECONDS)
    await setup.reconcile()
    assert await setup.reconcile() == 2 * FIRST_PAUSE_SECONDS
    setup.api.__class__ = MemoryApi  # the definition is upgraded
    setup.api.time += timedelta(seconds=2 * FIRST_PAUSE_SECONDS)
    await setup.reconcile()
    assert setup.status["state"] == "Starting"


def test_only_the_training_that_loses_fields_is_paused_and_longer_each_time() -> None:
    losses, now = StatusLosses(), START
    pauses = []
    for _ in range(6):
        assert losses.record(KEY, ["status.retry"], now) is not None
        pauses.append(losses.wait(KEY, now))
        assert losses.wait(("team", "other"), now) == 0
        now += timedelta(seconds=pauses[-1])
    assert pauses == [60, 120, 240, 480, 600, 600]
    assert losses.record(KEY, [], now) is None
    assert losses.record(KEY, ["status.retry"], now) is not None
    assert losses.wait(KEY, now) == FIRST_PAUSE_SECONDS
    now += timedelta(seconds=2 * MAX_PAUSE_SECONDS)
    losses.record(("team", "other"), ["status.retry"], now)
    assert len(losses._paused) == 1, "what is deleted is forgotten"


async def test_the_same_refusal_is_written_once(setup) -> None:
    setup.api.refuse("POST", "rayjobs", *[Forbidden(403, "cannot create")] * 3)
    for _ in range(3):
        with pytest.raises(Refusal):
            await setup.reconcile()
    assert setup.writes_of_status() == 1


async def test_a_name_that_is_taken_is_not_accepted(setup) -> None:
    path = CONFIG_MAP.path("team", "demo-config")
    setup.api.place(path, {"metadata": {"name": "demo-config", "namespace": "team"}, "data": {"theirs": "x"}})
    with pytest.raises(Refusal, match="demo-config exists"):
        await setup.reconcile()
    assert (setup.condition("Accepted")["status"], setup.condition("Accepted")["reason"]) == ("False", "NameTaken")
    assert setup.api.objects[path]["data"] == {"theirs": "x"}
    assert JOB not in setup.api.objects


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
async def test_a_foreign_object_of_any_kind_is_named_and_never_touched(setup, kind, name, labelled) -> None:
    path = WRITTEN[kind].path("team", name)
    labels = {object_names.TRAINING: "demo"} if labelled else {}
    there = setup.api.place(path, {"kind": kind, "metadata": {"name": name, "namespace": "team", "labels": labels}})
    with pytest.raises(Refusal, match=f"{kind} {name} exists and does not belong to this training"):
        await setup.reconcile()
    assert (setup.condition("Accepted")["status"], setup.condition("Accepted")["reason"]) == ("False", "NameTaken")
    assert setup.api.objects[path] == there
    assert kind == "RayJob" or JOB not in setup.api.objects
    # The Role grants rights on ConfigMaps by their names: nobody gets rights on those of others.
    assert kind != "ConfigMap" or ROLE.path("team", "demo-trainer") not in setup.api.objects
    del setup.api.objects[path]
    await setup.reconcile()
    assert setup.api.objects[path]["metadata"]["ownerReferences"][0]["uid"] == raw_objects.UID
    assert setup.condition("Accepted")["status"] == "True"


async def test_every_child_but_the_history_has_a_case(setup) -> None:
    """The history is large, and has a story of its own on the real API server."""
    await setup.reconcile()
    made = {(value.get("kind"), value["metadata"]["name"]) for value in setup.api.objects.values()}
    others = {(None, "demo"), ("RayJob", "demo-1"), ("ConfigMap", "demo-history")}
    assert {item for item in made - others if item[0] != "Event"} == set(CHILDREN)


@pytest.mark.parametrize(("kind", "name"), CHILDREN)
async def test_a_deleted_child_of_any_kind_is_created_again(setup, kind, name) -> None:
    await setup.reconcile()
    await setup.reconcile()
    path = WRITTEN[kind].path("team", name)
    gone = setup.api.objects.pop(path)
    metadata = gone["metadata"]
    setup.cluster.stores[WRITTEN[kind]].remove("team", name, metadata["uid"], "1000")
    wrote = len(setup.api.wrote())
    await setup.reconcile()
    assert setup.api.objects[path]["metadata"]["uid"] != metadata["uid"]
    assert setup.api.objects[path]["metadata"].get("annotations") == metadata.get("annotations")
    assert [verb for verb, _ in setup.api.wrote()[wrote:]][:1] == ["POST"]
    assert [item["outcome"] for item in setup.status["attempts"]] == ["Running"]


async def test_if_the_api_server_answers_nothing_the_error_is_raised_and_nothing_is_lost(setup) -> None:
    async def away(verb: str, path: str) -> None:
        raise Unavailable(0, "no answer")

    setup.api.before, answers = away, setup.api.before
    with pytest.raises(Unavailable):
        await setup.reconcile()
    setup.api.before = answers
    await setup.reconcile()
    assert len([path for path in setup.api.objects if path.startswith(RAY_JOB.path("team"))]) == 1


WEBHOOK = Unavailable(500, 'Internal error occurred: failed calling webhook "mrayjob.kb.io": connection refused')


async def test_a_webhook_that_does_not_answer_is_named_in_the_status_until_the_job_is_created(setup) -> None:
    setup.api.refuse("POST", "rayjobs", WEBHOOK)
    with pytest.raises(Refusal, match="the creation of RayJob demo-1 failed"):
        await setup.reconcile()
    ready = setup.condition("Ready")
    assert (setup.status["state"], ready["reason"]) == ("Pending", "WriteFailed")
    assert 'failed calling webhook "mrayjob.kb.io"' in ready["message"]
    assert setup.status.get("attempts", []) == []
    await setup.reconcile()
    assert setup.status["state"] == "Starting"
    assert [attempt["job"] for attempt in setup.status["attempts"]] == ["demo-1"]


async def test_a_child_that_cannot_be_created_again_is_named_while_the_attempt_runs(setup) -> None:
    await setup.reconcile()
    await setup.reconcile()
    path = setup.delete("NetworkPolicy", "demo")
    setup.api.refuse("POST", "networkpolicies", WEBHOOK)
    with pytest.raises(Refusal):
        await setup.reconcile()
    degraded = setup.condition("Degraded")
    assert (setup.status["state"], degraded["status"], degraded["reason"]) == ("Starting", "True", "WriteFailed")
    await setup.reconcile()
    assert path in setup.api.objects
    assert setup.condition("Degraded")["status"] == "False"


async def test_a_repair_that_fails_is_named_until_it_succeeds(setup) -> None:
    """Also between two tries, which are 10 s apart. An alert needs a condition that lasts."""
    await setup.reconcile()
    await setup.reconcile()
    path = WRITTEN["NetworkPolicy"].path("team", "demo")
    edited = setup.api.place(path, {**setup.api.objects[path], "spec": {}})
    setup.cluster.stores[WRITTEN["NetworkPolicy"]].put("demo", record(WRITTEN["NetworkPolicy"], edited))
    setup.api.time += timedelta(seconds=REPAIR_SECONDS)
    setup.api.refuse("PATCH", "networkpolicies", *[WEBHOOK] * 3)
    before, seen = setup.writes_of_status(), []
    for second in range(3 * int(REPAIR_SECONDS)):
        setup.report(state="Running", update=1)
        try:
            await setup.reconcile()
        except Refusal:
            seen.append(second)
        degraded = setup.condition("Degraded")
        assert (degraded["status"], degraded["reason"]) == ("True", "WriteFailed")
        setup.api.time += timedelta(seconds=1)
    assert seen == [0, 10, 20]
    assert setup.writes_of_status() - before <= 4
    await setup.reconcile()
    await setup.reconcile()
    assert setup.condition("Degraded")["status"] == "False"


async def test_numbers_are_not_copied_more_often_while_a_write_is_refused(setup) -> None:
    await setup.reconcile()
    await setup.reconcile()
    setup.delete("NetworkPolicy", "demo")
    setup.api.refuse("POST", "networkpolicies", *[WEBHOOK] * 100)
    before = setup.writes_of_status()
    for update in range(100):
        setup.report(state="Running", update=update)
        with suppress(Refusal):
            await setup.reconcile()
        setup.api.time += timedelta(seconds=1)
    assert setup.writes_of_status() - before <= 12


async def test_reports_in_a_loop_cause_a_burst_of_writes_and_then_few(setup) -> None:
    """A new checkpoint is shown immediately, and a process with the rights of the trainer can report new ones all the time."""
    await setup.reconcile()
    await setup.reconcile()
    before, seconds = setup.writes_of_status(), 600
    for number in range(4 * seconds + 1):
        setup.report_checkpoint(number)
        setup.api.time += timedelta(seconds=0.25)
        wait = await setup.reconcile()
    assert setup.writes_of_status() - before == pytest.approx(BURST + seconds / PERIOD_SECONDS, abs=2)
    assert 0 < wait <= PERIOD_SECONDS
    setup.api.time += timedelta(seconds=wait)
    await setup.reconcile()
    assert setup.status["lastCheckpoint"]["update"] == number


async def test_objects_changed_in_a_loop_cause_a_burst_of_writes_and_then_few(setup) -> None:
    """An object that is deleted is created again immediately; each time the status changes too."""
    await setup.reconcile()
    await setup.reconcile()
    before, seconds, policy = len(setup.api.wrote()), 100, WRITTEN["NetworkPolicy"].path("team", "demo")
    for number in range(4 * seconds):
        setup.report_checkpoint(number)
        if policy in setup.api.objects:
            setup.delete("NetworkPolicy", "demo")
        setup.api.time += timedelta(seconds=0.25)
        await setup.reconcile()
    assert len(setup.api.wrote()) - before == pytest.approx(2 * (BURST + seconds / PERIOD_SECONDS), abs=4)


async def test_an_order_to_stop_waits_for_one_period_at_most(setup) -> None:
    await setup.reconcile()
    for number in range(2 * BURST):
        setup.report_checkpoint(number)
        await setup.reconcile()
    setup.report(state="Succeeded")
    setup.api.time += timedelta(seconds=await setup.reconcile())
    await setup.reconcile()
    assert setup.status["attempts"][0]["outcome"] == "Succeeded"


async def test_a_creation_whose_answer_was_lost_is_found(setup) -> None:
    lost = iter([True])

    async def before(verb: str, path: str) -> None:
        if verb == "POST" and path.endswith("/rayjobs") and next(lost, False):
            setup.api.place(JOB, setup.api.bodies[-1])
            raise Unavailable(0, "reset by peer")

    setup.api.before = before
    with pytest.raises(Refusal):
        await setup.reconcile()
    assert "attempts" not in setup.status or setup.status["attempts"] == []
    uid = setup.api.objects[JOB]["metadata"]["uid"]
    await setup.reconcile()
    assert setup.api.objects[JOB]["metadata"]["uid"] == uid
    assert [attempt["job"] for attempt in setup.status["attempts"]] == ["demo-1"]


async def test_for_a_training_that_was_deleted_meanwhile_nothing_is_created(setup) -> None:
    del setup.api.objects[PATH]
    assert await setup.reconcile() is None
    assert setup.api.wrote() == []
    assert setup.trainings.get(KEY) is None


async def test_for_one_that_is_on_its_way_out_nothing_is_created(setup) -> None:
    metadata = {**setup.api.objects[PATH]["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}
    setup.api.place(PATH, {**setup.api.objects[PATH], "metadata": metadata})
    assert await setup.reconcile() is None
    assert setup.api.wrote() == []


async def test_for_another_of_its_name_nothing_is_created_in_the_name_of_the_first(setup) -> None:
    again = setup.api.objects[PATH]
    setup.api.place(PATH, {**again, "metadata": {**again["metadata"], "uid": "a later one"}})
    assert await setup.reconcile() is None
    assert setup.api.wrote() == []
    setup.watched()
    await setup.reconcile()
    assert setup.api.objects[JOB]["metadata"]["ownerReferences"][0]["uid"] == "a later one"


async def test_a_training_that_goes_before_its_status_is_written_is_forgotten(setup) -> None:
    async def before(verb: str, path: str) -> None:
        if path == STATUS:
            setup.api.objects.pop(PATH, None)

    setup.api.before = before
    await setup.reconcile()
    assert setup.trainings.get(KEY) is None
    assert PATH not in setup.api.objects


async def test_a_training_that_is_being_deleted_is_left_alone(setup) -> None:
    metadata = {**setup.api.objects[PATH]["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}
    setup.api.place(PATH, {**setup.api.objects[PATH], "metadata": metadata})
    setup.watched()
    assert await setup.reconcile() is None
    assert setup.api.requests == []


async def test_a_spec_that_cannot_be_run_is_reported_and_nothing_created() -> None:
    setup = ReconcilerSetup(train={"nodes": 0})
    assert await setup.reconcile() is None
    assert setup.api.wrote() == [("PATCH", "status")]
    assert setup.condition("Accepted")["status"] == "False"
    assert "spec.train" in setup.condition("Accepted")["message"]


@pytest.mark.parametrize("writes", range(10))
async def test_a_leader_that_is_replaced_after_any_write_writes_no_more(setup, writes) -> None:
    """Whatever it does: children, the RayJob, events, and the status."""
    permits = [True] * writes
    may_write = lambda: bool(permits and permits.pop())  # noqa: E731
    setup.reconciler = Reconciler(OperatorSettings(), setup.api, setup.cluster, setup.trainings, may_write=may_write)
    with pytest.raises(NotLeading):
        await setup.reconcile()
    assert len(setup.api.wrote()) == writes

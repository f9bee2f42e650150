"""Each write changes the object that it names and no other, and a refused write gives a message."""

from dataclasses import replace

import pytest

from qwen35_operator.api.v1alpha1 import KIND, TrainingStatus
from qwen35_operator.desired import object_names
from qwen35_operator.desired.objects import sealed
from qwen35_operator.kube.api_errors import ApiError, Conflict, Forbidden, Invalid, NotFound, Unavailable, api_error
from qwen35_operator.kube.kinds import (
    CONFIG_MAP,
    DISRUPTION_BUDGET,
    EVENT,
    HISTORY,
    RAY_CLUSTER,
    RAY_JOB,
    SERVICE_ACCOUNT,
    TRAINING,
)
from qwen35_operator.kube.object_cache import ObjectCache
from qwen35_operator.kube.object_parsing import record
from qwen35_operator.kube.object_records import OwnWrite
from qwen35_operator.reconcile.drift import REPAIR_SECONDS, drifted
from qwen35_operator.reconcile.observed import Observed
from qwen35_operator.reconcile.writer import EVENT_REPEAT_TIME, ClusterWriter, NotLeading
from qwen35_operator.reconcile.writes import Apply, Create, Delete, PostEvent, RemoveFinalizer, Scale
from tests.operator.kube import raw_objects
from tests.operator.kube.memory_api import START, MemoryApi

KEY = ("team", "demo")
PATH = CONFIG_MAP.path("team", "demo-config")
SEEN = Observed(
    training=None,
    name="demo",
    namespace="team",
    uid=raw_objects.UID,
    generation=1,
    version="1",
    created=START,
    deleting=False,
    status=TrainingStatus(),
)


def config(text: str = "x", **fields) -> dict:
    """As we write it: without what the API server adds."""
    owner = {"kind": KIND, "name": "demo", "uid": raw_objects.UID, "controller": True}
    labels = {object_names.TRAINING: "demo"}
    metadata = {"name": "demo-config", "namespace": "team", "labels": labels, "ownerReferences": [owner], **fields}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"training.yaml": text}}


def ray_job() -> dict:
    body = config()
    labels = {object_names.TRAINING: "demo", object_names.ATTEMPT: "1"}
    metadata = {**body["metadata"], "name": "demo-1", "labels": labels}
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": metadata, "spec": {}}


class WriterSetup:
    """A writer, the API server, and what the stores have."""

    def __init__(self) -> None:
        self.api = MemoryApi()
        self.progress: list = []
        self.cluster = ObjectCache((), lambda key: None, lambda kind: None)
        self.writer = ClusterWriter(self.api, self.cluster, "tests", self.progress.append)

    async def write(self, *writes):
        """The only refused write; None if none was refused."""
        refused = await self.writer.write(SEEN, writes)
        assert len(refused) <= 1
        return next(iter(refused), None)

    def stored(self, kind=CONFIG_MAP) -> dict:
        return {record.name: record for record in self.cluster.stores[kind].of(KEY)}


@pytest.fixture
def setup() -> WriterSetup:
    return WriterSetup()


async def test_what_is_created_is_in_the_store_immediately(setup) -> None:
    assert await setup.write(Create(config())) is None
    assert setup.api.objects[PATH]["data"] == {"training.yaml": "x"}
    assert setup.stored()["demo-config"].uid == setup.api.objects[PATH]["metadata"]["uid"]
    assert setup.progress == [KEY]


async def test_a_history_is_known_by_the_watch_of_its_own_and_by_that_alone(setup) -> None:
    labels = {object_names.TRAINING: "demo", object_names.COMPONENT: object_names.HISTORY}
    assert await setup.write(Create(config(name="demo-history", labels=labels))) is None
    assert setup.stored() == {}
    stored = setup.stored(HISTORY)["demo-history"]
    assert stored.kind == "ConfigMap"
    assert await setup.write(Delete("ConfigMap", "demo-history", stored.uid)) is None
    assert setup.stored(HISTORY) == {}


async def test_a_creation_is_checked_strictly(setup) -> None:
    await setup.write(Create(config()))
    assert setup.api.queries == [{"fieldManager": "qwen35-operator", "fieldValidation": "Strict"}]


async def test_to_create_what_we_have_created_before_is_fine(setup) -> None:
    there = setup.api.place(PATH, config("as it was"))
    assert await setup.write(Create(config())) is None
    assert setup.api.objects[PATH] == there
    assert setup.stored()["demo-config"].uid == there["metadata"]["uid"]


async def test_a_child_whose_label_was_changed_by_hand_gets_it_back(setup) -> None:
    there = setup.api.place(PATH, config("as it was", labels={object_names.TRAINING: "other", "mine": "too"}))
    assert await setup.write(Create(config())) is None
    now = setup.api.objects[PATH]["metadata"]
    assert now["uid"] == there["metadata"]["uid"]
    assert now["labels"] == {object_names.TRAINING: "demo", "mine": "too"}
    assert setup.stored()["demo-config"].version == now["resourceVersion"]


async def test_an_answer_that_bears_another_trainings_label_is_left_to_the_watch(setup) -> None:
    cluster = raw_objects.ray_cluster("demo-1-x", training="other", groups=[{"groupName": "rollout", "replicas": 2}])
    setup.api.place(CLUSTER, cluster)
    uid = cluster["metadata"]["uid"]
    assert (
        await setup.write(Scale("demo-1-x", uid, 0, "rollout", 2, replicas=3, min_replicas=1, max_replicas=4)) is None
    )
    store = setup.cluster.stores[RAY_CLUSTER]
    assert [*store.of(KEY), *store.of(("team", "other"))] == []


async def test_what_somebody_else_made_is_left_alone_and_named(setup) -> None:
    there = setup.api.place(PATH, config(ownerReferences=[]))
    refused = await setup.write(Create(config()), Create(ray_job()))
    assert refused.reason == "NameTaken"
    assert "ConfigMap demo-config exists and does not belong to this training" in refused.message
    assert setup.api.objects == {PATH: there}
    assert setup.stored() == {}
    assert setup.progress == []


OURS = {"kind": KIND, "name": "demo", "uid": raw_objects.UID, "controller": True}


@pytest.mark.parametrize(
    "metadata",
    [
        {"deletionTimestamp": "2026-01-01T00:00:00Z", "ownerReferences": [OURS]},
        {"ownerReferences": [{**OURS, "uid": "of an earlier demo"}]},
        {"deletionTimestamp": "2026-01-01T00:00:00Z", "ownerReferences": [{**OURS, "uid": "of an earlier demo"}]},
    ],
    ids=["terminating", "of an earlier training", "both"],
)
async def test_what_is_on_its_way_out_is_waited_for(setup, metadata) -> None:
    setup.api.place(PATH, config(**metadata))
    refused = await setup.write(Create(config()))
    assert refused.reason == "Cleaning"
    assert setup.stored() == {}


async def test_what_goes_between_two_looks_is_created_another_time(setup) -> None:
    setup.api.refuse("POST", "configmaps", Conflict(409, "exists"))
    assert (await setup.write(Create(config()))).reason == "Cleaning"


CAUSES = {"causes": [{"field": "spec.x", "message": "too long"}, {"field": "spec.y", "message": "is required"}]}
REFUSALS = {
    "no permission": (
        Forbidden(403, "cannot create"),
        "Forbidden",
        "the operator may not create rayjobs.ray.io in namespace team",
    ),
    "a webhook": (
        api_error(403, 'admission webhook "validation.gatekeeper.sh" denied the request: no cost-center label'),
        "Rejected",
        "denied the request: no cost-center label. Change spec, or the policy",
    ),
    **{
        f"a webhook that denies with {status}": (
            api_error(status, 'admission webhook "validate.kyverno.svc-fail" denied the request: no team label'),
            "Rejected",
            'RayJob demo-1: admission webhook "validate.kyverno.svc-fail" denied the request: no team label. Change spec',
        )
        for status in (400, 404, 409, 413, 422, 429, 500)
    },
    "a policy": (
        api_error(
            422,
            'rayjobs.ray.io "demo-1" is forbidden: '
            "ValidatingAdmissionPolicy 'images' with binding 'b' denied request: use our registry",
        ),
        "Rejected",
        "denied request: use our registry. Change spec, or the policy",
    ),
    "a token that is not accepted": (
        api_error(401, "Unauthorized"),
        "WriteFailed",
        "the API server does not accept the operator's token: Unauthorized. The operator tries again",
    ),
    "quota": (
        Forbidden(403, "exceeded quota: gpus"),
        "QuotaExceeded",
        "RayJob demo-1: exceeded quota: gpus. Raise the quota",
    ),
    "no KubeRay": (NotFound(404, "not found"), "KubeRayMissing", "Install KubeRay 1.5.1 or newer"),
    "old KubeRay": (Invalid(400, 'unknown field "spec.z"'), "KubeRayTooOld", 'unknown field "spec.z"'),
    "invalid": (Invalid(422, "is invalid", CAUSES), "Rejected", "spec.x: too long; spec.y: is required"),
    "invalid without causes": (Invalid(422, "a webhook says no"), "Rejected", "a webhook says no"),
}


@pytest.mark.parametrize(("error", "reason", "message"), REFUSALS.values(), ids=REFUSALS)
async def test_a_refused_creation_says_why_and_what_to_do(setup, error, reason, message) -> None:
    setup.api.refuse("POST", "rayjobs", error)
    refused = await setup.write(Create(ray_job()), PostEvent("Normal", "AttemptStarted", "never"))
    assert refused.reason == reason
    assert message in refused.message
    assert setup.api.wrote() == [("POST", "rayjobs")]


GOING = {
    "terminating": Forbidden(403, "being terminated", {"causes": [{"reason": "NamespaceTerminating"}]}),
    "gone": NotFound(404, 'namespaces "team" not found', {"kind": "namespaces", "name": "team"}),
}


@pytest.mark.parametrize("error", GOING.values(), ids=GOING)
async def test_in_a_namespace_that_goes_nothing_is_created_and_nobody_blamed(setup, error) -> None:
    setup.api.refuse("POST", "configmaps", error)
    assert await setup.write(Create(config())) is None
    assert setup.stored() == {}


@pytest.mark.parametrize("error", [Unavailable(429, "slow down"), Unavailable(503, "later", retry_after=2.0)])
async def test_an_api_server_that_requests_a_pause_gets_no_other_request(setup, error) -> None:
    setup.api.refuse("POST", "configmaps", error)
    with pytest.raises(Unavailable):
        await setup.write(Create(config()))


FAILURES = {
    "a webhook that refuses connections": Unavailable(500, 'failed calling webhook "mrayjob.kb.io"'),
    "a webhook that takes longer than the operator waits": Unavailable(0, "no answer within 15 s"),
    "a webhook that answers 503": Unavailable(503, "my backend is away"),
}


@pytest.mark.parametrize("error", FAILURES.values(), ids=FAILURES)
async def test_a_write_that_fails_is_named_with_its_reason(setup, error) -> None:
    setup.api.refuse("POST", "rayjobs", error)
    refused = await setup.write(Create(ray_job()), PostEvent("Normal", "AttemptStarted", "never"))
    assert refused.reason == "WriteFailed"
    assert refused.message == f"the creation of RayJob demo-1 failed: {error.message}. The operator tries again"
    assert setup.api.wrote() == [("POST", "rayjobs")]


async def test_actions_are_done_in_order_up_to_the_first_refused_one(setup) -> None:
    setup.api.refuse("POST", "rayjobs", Forbidden(403, "no"))
    account = {**config(), "kind": "ServiceAccount"}
    await setup.write(Create(config()), Create(ray_job()), Create(account))
    assert setup.api.wrote() == [("POST", "configmaps"), ("POST", "rayjobs")]
    assert setup.progress == [KEY]
    assert setup.stored(SERVICE_ACCOUNT) == {}


@pytest.mark.parametrize(
    ("error", "reason"),
    [(Forbidden(403, "no"), "Forbidden"), (Unavailable(500, "failed calling webhook"), "WriteFailed")],
)
async def test_a_repair_that_fails_stops_no_other_write(setup, error, reason) -> None:
    """An admission policy, or its webhook that does not answer, must not keep an order to stop from the trainer."""
    there = setup.api.place(PATH, config("changed by hand"))
    setup.api.refuse("PATCH", "configmaps", error)
    repair = Apply(config("new"), there["metadata"]["uid"], is_repair=True)
    refused = await setup.write(repair, Create({**config(), "kind": "ServiceAccount"}))
    assert refused.reason == reason
    assert error.message in refused.message
    assert list(setup.stored(SERVICE_ACCOUNT)) == ["demo-config"]


async def test_a_repair_that_fails_is_due_again_after_a_while(setup) -> None:
    there = setup.api.place(PATH, config("changed by hand"))
    setup.cluster.stores[CONFIG_MAP].put("demo", record(CONFIG_MAP, there))
    setup.api.refuse("PATCH", "configmaps", Forbidden(403, "no"))
    repair = Apply(sealed(config("new")), there["metadata"]["uid"], is_repair=True)
    refused = await setup.write(repair)
    (child,) = setup.stored().values()
    written = repair.manifest["metadata"]["annotations"][object_names.HASH]
    assert child.own_write == OwnWrite("", START, written, (refused.reason, refused.message))
    assert drifted([child], START) == (frozenset(), REPAIR_SECONDS)


def budget() -> dict:
    metadata = {**config()["metadata"], "name": "demo-disruptions"}
    return {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": metadata, "spec": {}}


async def test_a_refused_write_of_the_budget_is_remembered_until_one_succeeds(setup) -> None:
    async def refused_once(verb: str, write: Create | Delete) -> None:
        setup.api.refuse(verb, "poddisruptionbudgets", Forbidden(403, "no"))
        refused = await setup.write(write)
        assert setup.writer.budget_try(raw_objects.UID) == OwnWrite("", START, None, (refused.reason, refused.message))
        assert setup.writer.budget_try("another") is None
        assert await setup.write(write) is None
        assert setup.writer.budget_try(raw_objects.UID) is None

    await refused_once("POST", Create(budget(), is_repair=True))
    (created,) = setup.stored(DISRUPTION_BUDGET).values()
    await refused_once("DELETE", Delete(created.kind, created.name, created.uid, is_repair=True))
    assert setup.stored(DISRUPTION_BUDGET) == {}


async def test_refused_writes_of_a_bounded_number_of_budgets_are_remembered(setup, monkeypatch) -> None:
    monkeypatch.setattr("qwen35_operator.reconcile.writer.MAX_BUDGET_TRIES", 2)
    setup.api.refuse("POST", "poddisruptionbudgets", *[Forbidden(403, "no")] * 3)
    for uid in ("first", "second", "third"):
        await setup.writer.write(replace(SEEN, uid=uid), [Create(budget(), is_repair=True)])
    assert [setup.writer.budget_try(uid) is not None for uid in ("first", "second", "third")] == [False, True, True]


async def test_an_api_server_without_time_ends_the_reconcile_at_the_first_repair(setup) -> None:
    there = setup.api.place(PATH, config("changed by hand"))
    setup.api.refuse("PATCH", "configmaps", Unavailable(429, "slow down"))
    with pytest.raises(Unavailable):
        await setup.write(Apply(config("new"), there["metadata"]["uid"], is_repair=True))


async def test_a_repair_is_done_although_the_write_before_it_was_refused(setup) -> None:
    there = setup.api.place(PATH, config("changed by hand"))
    setup.api.refuse("POST", "rayjobs", Forbidden(403, "no"))
    await setup.write(Create(ray_job()), Apply(config("new"), there["metadata"]["uid"], is_repair=True))
    assert setup.api.objects[PATH]["data"] == {"training.yaml": "new"}


async def test_the_start_of_an_attempt_waits_for_an_apply_that_fails(setup) -> None:
    there = setup.api.place(PATH, config("changed by hand"))
    setup.api.refuse("PATCH", "configmaps", Unavailable(500, "failed calling webhook"))
    refused = await setup.write(Apply(config("new"), there["metadata"]["uid"]), Create(ray_job()))
    assert (refused.reason, refused.message) == (
        "WriteFailed",
        "the change of ConfigMap demo-config failed: failed calling webhook. The operator tries again",
    )
    assert setup.stored(RAY_JOB) == {}


async def test_an_apply_keeps_what_others_wrote(setup) -> None:
    there = setup.api.place(PATH, {**config("old"), "data": {"training.yaml": "old", "theirs": "kept"}})
    assert await setup.write(Apply(config("new"), there["metadata"]["uid"])) is None
    assert setup.api.queries == [None, {"fieldManager": "qwen35-operator", "force": "true"}]
    assert setup.api.objects[PATH]["data"] == {"training.yaml": "new", "theirs": "kept"}
    assert setup.stored()["demo-config"].version == setup.api.objects[PATH]["metadata"]["resourceVersion"]


async def test_an_apply_is_to_the_object_that_was_seen_and_no_later_one(setup) -> None:
    there = setup.api.place(PATH, config("somebody's"))
    refused = await setup.write(Apply(config("new"), "the uid of an earlier one"))
    assert refused.reason == "Cleaning"
    assert setup.api.objects[PATH] == there


@pytest.mark.parametrize(
    ("error", "reason", "message"),
    [
        (NotFound(404, "gone"), "Cleaning", "is gone"),
        (Forbidden(403, "no"), "Forbidden", "may not get or patch configmaps"),
        (Invalid(422, "too long"), "Rejected", "refuses ConfigMap demo-config: too long"),
    ],
)
async def test_a_refused_apply_says_why(setup, error, reason, message) -> None:
    setup.api.place(PATH, config(uid="u"))
    setup.api.refuse("PATCH", "configmaps", error)
    refused = await setup.write(Apply(config("new"), "u"))
    assert refused.reason == reason
    assert message in refused.message


ENTRY = {"manager": "qwen35-operator", "operation": "Update", "apiVersion": "v1", "fieldsV1": {"f:data": {}}}


async def test_fields_of_an_earlier_write_are_taken_over_before_the_apply(setup) -> None:
    there = setup.api.place(PATH, config(managedFields=[ENTRY]))
    assert await setup.write(Apply(config("new"), there["metadata"]["uid"])) is None
    assert setup.api.wrote() == [("PATCH", "demo-config")] * 2
    assert setup.api.objects[PATH]["metadata"]["managedFields"] == [{**ENTRY, "operation": "Apply"}]
    assert setup.api.objects[PATH]["data"] == {"training.yaml": "new"}


async def test_fields_of_an_object_that_changes_meanwhile_are_not_taken_over(setup) -> None:
    there = setup.api.place(PATH, config(managedFields=[ENTRY]))
    setup.api.refuse("PATCH", "configmaps", Conflict(409, "the object has been modified"))
    with pytest.raises(Conflict):
        await setup.write(Apply(config("new"), there["metadata"]["uid"]))
    assert setup.api.objects[PATH] == there


async def test_what_is_as_desired_is_not_written(setup) -> None:
    there = setup.api.place(PATH, {**config(), "data": {"training.yaml": "x", "theirs": "kept"}})
    assert await setup.write(Apply(config(), there["metadata"]["uid"])) is None
    assert setup.api.wrote() == []
    assert setup.stored()["demo-config"].own_write == OwnWrite(there["metadata"]["resourceVersion"], START, None)


async def test_what_is_gone_is_not_applied(setup) -> None:
    refused = await setup.write(Apply(config(), "u"))
    assert refused.reason == "Cleaning"
    assert setup.api.wrote() == []


async def test_a_config_map_that_somebody_made_immutable_is_created_again(setup) -> None:
    there = setup.api.place(PATH, config("old"))
    cause = {"field": "data", "message": "Forbidden: field is immutable when `immutable` is set"}
    setup.api.refuse("PATCH", "configmaps", Invalid(422, "invalid", {"causes": [cause]}))
    refused = await setup.write(Apply(config("new"), there["metadata"]["uid"]))
    assert refused.reason == "Cleaning"
    assert PATH not in setup.api.objects
    assert await setup.write(Create(config("new"))) is None


async def test_what_the_operator_wrote_is_known_by_its_version_until_somebody_else_writes(setup) -> None:
    await setup.write(Create(config()))
    version = setup.api.objects[PATH]["metadata"]["resourceVersion"]
    assert setup.stored()["demo-config"].own_write == OwnWrite(version, START)
    other = setup.api.place(PATH, {**setup.api.objects[PATH], "data": {"training.yaml": "somebody's"}})
    setup.cluster.stores[CONFIG_MAP].put("demo", record(CONFIG_MAP, other))
    seen = setup.stored()["demo-config"]
    assert (seen.version, seen.own_write.version) == (other["metadata"]["resourceVersion"], version)
    assert await setup.write(Apply(config(), seen.uid)) is None
    repaired = setup.stored()["demo-config"]
    assert repaired.own_write.version == repaired.version


async def test_what_is_only_found_is_not_taken_for_an_own_write(setup) -> None:
    setup.api.place(PATH, config("as somebody changed it"))
    assert await setup.write(Create(config())) is None
    assert setup.stored()["demo-config"].own_write is None


CLUSTER = RAY_CLUSTER.path("team", "demo-1-x")
GROUPS = [
    {"groupName": "rollout", "replicas": 2, "minReplicas": 1, "maxReplicas": 4, "template": {}},
    {"groupName": "train", "replicas": 2},
]


def scale(**changes) -> Scale:
    same = {"cluster": "demo-1-x", "uid": "c", "index": 0, "group": "rollout", "current_replicas": 2, "replicas": 1}
    return Scale(**{**same, "min_replicas": 1, "max_replicas": 3, **changes})


def groups(setup) -> list:
    return setup.api.objects[CLUSTER]["spec"]["workerGroupSpecs"]


async def test_a_group_is_scaled_and_its_victims_are_named(setup) -> None:
    setup.api.place(CLUSTER, raw_objects.ray_cluster(groups=GROUPS, uid="c"))
    assert await setup.write(scale(pods_to_delete=("pod-a",))) is None
    changed = {"replicas": 1, "minReplicas": 1, "maxReplicas": 3, "scaleStrategy": {"workersToDelete": ["pod-a"]}}
    assert groups(setup) == [{**GROUPS[0], **changed}, GROUPS[1]]
    assert setup.stored(RAY_CLUSTER)["demo-1-x"].groups[0].leaving == ("pod-a",)


async def test_a_finalizer_of_an_unchanged_training_is_removed_and_others_stay(setup) -> None:
    path = TRAINING.path(*KEY)
    metadata = {"name": "demo", "namespace": "team", "uid": raw_objects.UID, "finalizers": ["a/other", "a/mine"]}
    placed = setup.api.place(path, {"metadata": metadata})
    seen = replace(SEEN, finalizers=("a/other", "a/mine"), version=placed["metadata"]["resourceVersion"])
    assert await setup.writer.write(seen, [RemoveFinalizer("a/mine")]) == []
    assert setup.api.objects[path]["metadata"]["finalizers"] == ["a/other"]
    with pytest.raises(Conflict):
        await setup.writer.write(seen, [RemoveFinalizer("a/other")])
    del setup.api.objects[path]
    assert await setup.writer.write(seen, [RemoveFinalizer("a/mine")]) == []
    setup.api.refuse("PATCH", "qwen35trainings", Forbidden(403, "no"))
    (refused,) = await setup.writer.write(seen, [RemoveFinalizer("a/mine")])
    assert refused is not None
    assert (refused.reason, "patch qwen35trainings.rl.qwen35.io" in refused.message) == ("Forbidden", True)


async def test_without_victims_those_of_before_stay(setup) -> None:
    setup.api.place(CLUSTER, raw_objects.ray_cluster(groups=GROUPS, uid="c"))
    await setup.write(scale(pods_to_delete=("pod-a",)), scale(current_replicas=1, replicas=3))
    assert groups(setup)[0]["replicas"] == 3
    assert groups(setup)[0]["scaleStrategy"] == {"workersToDelete": ["pod-a"]}


@pytest.mark.parametrize(
    "changes",
    [{"uid": "another"}, {"group": "train"}, {"current_replicas": 3}, {"index": 5}],
    ids=["another cluster", "another group", "scaled meanwhile", "no such group"],
)
async def test_a_group_that_is_no_longer_as_seen_is_looked_at_again(setup, changes) -> None:
    there = setup.api.place(CLUSTER, raw_objects.ray_cluster(groups=GROUPS, uid="c"))
    with pytest.raises(Conflict):
        await setup.write(scale(**changes))
    assert setup.api.objects[CLUSTER] == there
    assert setup.progress == []


async def test_a_cluster_that_is_gone_is_looked_for_again(setup) -> None:
    with pytest.raises(Conflict):
        await setup.write(scale())


@pytest.mark.parametrize("status", [404, 422])
async def test_a_scaling_that_a_webhook_denies_says_so_in_place_of_a_conflict(setup, status) -> None:
    denial = 'admission webhook "vraycluster.kb.io" denied the request: not now'
    setup.api.place(CLUSTER, raw_objects.ray_cluster(groups=GROUPS, uid="c"))
    setup.api.refuse("PATCH", "rayclusters", api_error(status, denial))
    refused = await setup.write(scale())
    assert refused.reason == "Rejected"
    assert denial in refused.message


async def test_a_size_that_kuberays_definition_refuses_is_named_in_place_of_a_conflict(setup) -> None:
    cause = {"field": "spec.workerGroupSpecs[0].replicas", "message": "should be less than or equal to 8"}
    setup.api.place(CLUSTER, raw_objects.ray_cluster(groups=GROUPS, uid="c"))
    setup.api.refuse("PATCH", "rayclusters", Invalid(422, "is invalid", {"causes": [cause]}))
    refused = await setup.write(scale())
    assert refused.reason == "Rejected"
    assert "spec.workerGroupSpecs[0].replicas: should be less than or equal to 8" in refused.message


async def test_a_scaling_that_is_not_permitted_says_so(setup) -> None:
    setup.api.refuse("PATCH", "rayclusters", Forbidden(403, "no"))
    refused = await setup.write(scale())
    assert refused.reason == "Forbidden"
    assert "may not patch rayclusters.ray.io in namespace team" in refused.message


JOB = RAY_JOB.path("team", "demo-1")


async def test_what_is_deleted_is_out_of_the_store_immediately(setup) -> None:
    await setup.write(Create(ray_job()))
    uid = setup.stored(RAY_JOB)["demo-1"].uid
    assert await setup.write(Delete("RayJob", "demo-1", uid)) is None
    assert JOB not in setup.api.objects
    assert setup.stored(RAY_JOB) == {}
    assert setup.api.bodies[-1] == {"propagationPolicy": "Background", "preconditions": {"uid": uid}}


async def test_what_has_a_finalizer_is_kept_as_on_its_way_out(setup) -> None:
    body = ray_job()
    body["metadata"]["finalizers"] = ["ray.io/rayjob-finalizer"]
    await setup.write(Create(body))
    await setup.write(Delete("RayJob", "demo-1", setup.stored(RAY_JOB)["demo-1"].uid))
    assert setup.stored(RAY_JOB)["demo-1"].deleting == START


async def test_what_is_gone_already_needs_no_deletion(setup) -> None:
    assert await setup.write(Delete("RayJob", "demo-1", "u")) is None


async def test_a_later_object_of_the_name_is_not_deleted(setup) -> None:
    setup.api.place(JOB, ray_job())
    with pytest.raises(Conflict):
        await setup.write(Delete("RayJob", "demo-1", "an earlier uid"))
    assert JOB in setup.api.objects


async def test_an_unwatched_budget_that_somebody_else_has_replaced_is_forgotten(setup) -> None:
    """Each reconcile would otherwise end with a conflict, before it writes the status."""
    path = DISRUPTION_BUDGET.path("team", "demo-disruptions")
    seen = setup.api.place(path, budget())
    setup.cluster.stores[DISRUPTION_BUDGET].put("demo", record(DISRUPTION_BUDGET, seen))
    del setup.api.objects[path]
    setup.api.place(path, budget())
    delete = Delete("PodDisruptionBudget", "demo-disruptions", seen["metadata"]["uid"], is_repair=True)
    assert await setup.write(delete) is None
    assert path in setup.api.objects
    assert setup.stored(DISRUPTION_BUDGET) == {}


async def test_a_budget_whose_deletion_meets_another_write_is_not_forgotten(setup) -> None:
    """It still exists, so the next reconcile must delete it."""
    path = DISRUPTION_BUDGET.path("team", "demo-disruptions")
    seen = setup.api.place(path, budget())
    setup.cluster.stores[DISRUPTION_BUDGET].put("demo", record(DISRUPTION_BUDGET, seen))
    setup.api.refuse("DELETE", "poddisruptionbudgets", Conflict(409, "the object has been modified"))
    delete = Delete("PodDisruptionBudget", "demo-disruptions", seen["metadata"]["uid"], is_repair=True)
    with pytest.raises(Conflict):
        await setup.write(delete)
    assert setup.stored(DISRUPTION_BUDGET) != {}
    assert await setup.write(delete) is None
    assert path not in setup.api.objects


async def test_a_deletion_that_is_not_permitted_says_so(setup) -> None:
    setup.api.refuse("DELETE", "rayjobs", Forbidden(403, "no"))
    refused = await setup.write(Delete("RayJob", "demo-1", "u"))
    assert refused.reason == "Forbidden"
    assert "may not delete rayjobs.ray.io" in refused.message


async def test_a_deletion_that_a_policy_refuses_says_so(setup) -> None:
    denial = "ValidatingAdmissionPolicy 'keep' with binding 'all' denied request: kept"
    setup.api.refuse("DELETE", "rayjobs", api_error(422, f'rayjobs.ray.io "demo-1" is forbidden: {denial}'))
    refused = await setup.write(Delete("RayJob", "demo-1", "u"))
    assert refused.reason == "Rejected"
    assert refused.message.endswith(f"{denial}. Allow it, or delete it yourself")


async def test_after_a_refused_write_deletions_are_still_carried_out(setup) -> None:
    uid = setup.api.place(JOB, ray_job())["metadata"]["uid"]
    setup.api.refuse("DELETE", "configmaps", Forbidden(403, "no"))
    first, last = Delete("ConfigMap", "demo-config", "u"), Delete("RayJob", "demo-1", uid)
    refused = await setup.writer.write(SEEN, [first, Create(ray_job()), last])
    assert [refusal.write for refusal in refused] == [first]
    assert setup.api.wrote() == [("DELETE", "demo-config"), ("DELETE", "demo-1")]
    assert JOB not in setup.api.objects


def events(setup) -> list[dict]:
    return [body for path, body in setup.api.objects.items() if path.startswith(EVENT.path("team"))]


async def test_an_event_is_about_the_training(setup) -> None:
    assert await setup.write(PostEvent("Warning", "AttemptFailed", "x" * 2000)) is None
    (event,) = events(setup)
    assert event["involvedObject"] == {
        "apiVersion": "rl.qwen35.io/v1alpha1",
        "kind": KIND,
        "namespace": "team",
        "name": "demo",
        "uid": raw_objects.UID,
    }
    assert (event["type"], event["reason"], len(event["message"].encode())) == ("Warning", "AttemptFailed", 1024)
    assert event["firstTimestamp"] == event["lastTimestamp"] == "2026-01-01T00:00:00Z"
    assert event["source"] == {"component": "tests"}
    assert setup.progress == []


async def test_the_same_event_is_posted_again_only_after_a_while(setup) -> None:
    same, other = PostEvent("Normal", "Scaled", "to 3"), PostEvent("Normal", "Scaled", "to 4")
    await setup.write(same, same, other)
    assert len(events(setup)) == 2
    setup.api.time += EVENT_REPEAT_TIME / 2
    await setup.write(same)
    assert len(events(setup)) == 2
    setup.api.time += EVENT_REPEAT_TIME / 2
    await setup.write(same)
    assert len(events(setup)) == 3


@pytest.mark.parametrize("error", [Forbidden(403, "no"), Unavailable(503, "no"), ApiError(418, "no")])
async def test_nothing_depends_on_an_event(setup, error, caplog) -> None:
    setup.api.refuse("POST", "events", error)
    assert await setup.write(PostEvent("Normal", "Scaled", "to 3"), Create(config())) is None
    assert PATH in setup.api.objects
    assert "team/demo: event Scaled was not posted" in caplog.text


async def test_leadership_is_asked_for_right_before_every_write(setup) -> None:
    """A process that was paused between two writes leaves the second one to the next leader."""
    answers = [True, False]
    setup.writer = ClusterWriter(setup.api, setup.cluster, "tests", may_write=lambda: answers.pop(0))
    with pytest.raises(NotLeading):
        await setup.write(Create(config()), Create(ray_job()))
    assert setup.api.wrote() == [("POST", "configmaps")]
    assert answers == []

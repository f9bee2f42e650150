"""The API server, the garbage collector and KubeRay in memory answer as the real ones do.

Each exchange sends the same requests to both and compares the answers, except for what every cluster makes up: times,
uids, versions and random names.
"""

import itertools
import json
import re
import secrets
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import pytest

from qwen35_operator.api.training_resource import TrainingResource
from qwen35_operator.desired import ray_job
from qwen35_operator.operator_settings import OperatorSettings
from qwen35_trainer.manifest import parse_spec
from tests.controlplane.live_training import GROUP, SPEC, LiveTraining, Plane
from tests.testbed.api import Refused
from tests.testbed.control_plane import ControlPlane
from tests.virtual.operators import virtual_plane

JSON_PATCH = "application/json-patch+json"
MERGE = "application/merge-patch+json"
APPLY = "application/apply-patch+yaml"
HASH = "rl.qwen35.io/hash"
"""Of a RayJob, which contains its namespace."""
MADE_UP = frozenset({"uid", "resourceVersion", "creationTimestamp", "lastTransitionTime", "managedFields", HASH})
TIMES = frozenset({"deletionTimestamp", "time", "startTime", "startedAt", "endTime"})
NOBODYS_PORT = 9
UID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


@dataclass
class Exchange:
    """One conversation with one of the two, and what was answered."""

    plane: Plane
    namespace: str = field(default_factory=lambda: f"test-{secrets.token_hex(4)}")
    answers: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.plane.api.post("/api/v1/namespaces", {"metadata": {"name": self.namespace}})
        self.training = LiveTraining(self.plane, self.namespace)

    def path(self, plural: str, name: str | None = "") -> str:
        return self.training.path(plural, name)

    def ask(self, method: str, path: str, body: Any = None, *, content: str = "application/json") -> Any:
        """Send a request and note the answer. Returns it, {} for a refusal."""
        try:
            answer = self.plane.api.request(method, path, body, content=content)
        except Refused as refused:
            self.note(method, path, refused.status, refused.message)
            return {}
        self.note(method, path, answer)
        return answer

    def note_refusal(self, method: str, path: str, body: Any, *, content: str) -> None:
        """Send a request and note with which status it is refused; the message differs in what every cluster makes up."""
        try:
            self.plane.api.request(method, path, body, content=content)
        except Refused as refused:
            self.note(refused.status)

    def note(self, *values: Any) -> None:
        self.answers.append(self.plain(values))

    def plain(self, node: Any) -> Any:
        """Without what every cluster makes up."""
        if isinstance(node, dict):
            plain = {key: self.plain(value) for key, value in node.items() if key not in MADE_UP}
            return plain | dict.fromkeys(TIMES & node.keys(), "a time")
        if isinstance(node, (list, tuple)):
            return [self.plain(item) for item in node]
        return UID.sub("a uid", node.replace(self.namespace, "here")) if isinstance(node, str) else node


type Script = Callable[[Exchange], None]


def creating(talk: Exchange) -> None:
    maps = talk.path("configmaps", None)
    talk.ask("POST", maps, {"metadata": {"name": "a", "labels": {"x": "1"}}, "data": {"k": "v"}})
    talk.ask("POST", maps, {"metadata": {"name": "a"}})
    talk.ask("POST", "/api/v1/namespaces/nowhere/configmaps", {"metadata": {"name": "a"}})
    talk.ask("GET", talk.path("configmaps", "b"))
    talk.ask("GET", talk.path("rayjobs", "b"))
    named = talk.plane.api.post(maps, {"metadata": {"generateName": "made-"}})
    talk.note(named["metadata"]["name"].startswith("made-"))
    dry = talk.ask("POST", f"{maps}?dryRun=All", {"metadata": {"name": "dry"}})
    talk.note(bool(dry), talk.plane.api.exists(talk.path("configmaps", "dry")))


def changing(talk: Exchange) -> None:
    path = talk.path("configmaps", "a")
    first = talk.ask("POST", talk.path("configmaps", None), {"metadata": {"name": "a"}, "data": {"k": "1", "l": "1"}})
    talk.ask("PATCH", path, {"data": {"k": "2", "l": None}, "metadata": {"labels": {"x": "y"}}}, content=MERGE)
    talk.ask("PUT", path, first | {"data": {"k": "3"}})
    talk.ask("PATCH", path, {"metadata": {"resourceVersion": first["metadata"]["resourceVersion"]}}, content=MERGE)
    talk.ask("PATCH", path, {"metadata": {"uid": "00000000-0000-0000-0000-000000000000"}}, content=MERGE)
    talk.ask("PATCH", path, [{"op": "test", "path": "/data/k", "value": "7"}], content=JSON_PATCH)
    talk.ask("PATCH", path, [{"op": "replace", "path": "/none/k", "value": "7"}], content=JSON_PATCH)
    steps = [{"op": "test", "path": "/data/k", "value": "2"}, {"op": "add", "path": "/data/new", "value": "n"}]
    before = talk.ask("PATCH", path, steps, content=JSON_PATCH)
    same = talk.ask("PATCH", path, {"data": {"new": "n"}}, content=MERGE)
    talk.note(before["metadata"]["resourceVersion"] == same["metadata"]["resourceVersion"])
    talk.ask("PATCH", talk.path("configmaps", "b"), {"data": {}}, content=MERGE)


def writing_fields(talk: Exchange) -> None:
    """The managers of the fields of a ConfigMap."""
    path = talk.path("configmaps", "a")
    talk.plane.api.post(
        f"{talk.path('configmaps', None)}?fieldManager=one", {"metadata": {"name": "a"}, "data": {"k": "1"}}
    )
    for manager, data in (("two", {"k": "2", "l": "1"}), ("one", {"m": "1"}), ("two", {"l": None})):
        body = talk.plane.api.request("PATCH", f"{path}?fieldManager={manager}", {"data": data}, content=MERGE)
        entries = body["metadata"]["managedFields"]
        fields = {entry["manager"]: set(entry["fieldsV1"].get("f:data", ())) - {"."} for entry in entries}
        talk.note({manager: sorted(names) for manager, names in fields.items() if names})


def applying(talk: Exchange) -> None:
    """Server-side applies: of fields that others own, of fewer fields than before, and after taking over an earlier write."""
    path, api = talk.path("configmaps", "a"), talk.plane.api
    metadata = {"name": "a", "labels": {"x": "1"}}
    api.post(f"{talk.path('configmaps', None)}?fieldManager=one", {"metadata": metadata, "data": {"k": "1", "l": "1"}})

    def apply(where: str, manager: str, body: dict[str, Any], *, force: bool = True) -> dict[str, Any]:
        query = f"fieldManager={manager}" + ("&force=true" if force else "")
        intent = {"apiVersion": "v1", "kind": "ConfigMap"} | body
        try:
            answer = api.request("PATCH", f"{where}?{query}", intent, content=APPLY)
        except Refused as refused:
            talk.note(refused.status)
            return {}
        note_owners(talk, answer)
        return dict(answer)

    wanted: dict[str, Any] = {"metadata": {"name": "a", "labels": {"x": "2"}}, "data": {"k": "1", "m": "1"}}
    apply(path, "two", wanted, force=False)
    first = apply(path, "two", wanted)
    again = apply(path, "two", wanted)
    talk.note(first["metadata"]["resourceVersion"] == again["metadata"]["resourceVersion"])
    apply(path, "two", {"metadata": {"name": "a"}, "data": {"m": "2"}})
    metadata = api.get(path)["metadata"]
    entries = [
        entry | {"operation": "Apply"} if entry["manager"] == "one" else entry for entry in metadata["managedFields"]
    ]
    values = {"/metadata/resourceVersion": metadata["resourceVersion"], "/metadata/managedFields": entries}
    steps = [{"op": "replace", "path": place, "value": value} for place, value in values.items()]
    note_owners(talk, api.request("PATCH", path, steps, content=JSON_PATCH))
    talk.note_refusal("PATCH", path, steps, content=JSON_PATCH)
    apply(path, "one", {"metadata": {"name": "a"}, "data": {"k": "1"}})
    uid = "00000000-0000-0000-0000-000000000000"
    apply(path, "two", {"metadata": {"name": "a", "uid": uid}})
    apply(talk.path("configmaps", "b"), "two", {"metadata": {"name": "b", "uid": uid}})
    api.request("PATCH", path, {"immutable": True}, content=MERGE)
    apply(path, "two", {"metadata": {"name": "a"}, "data": {"m": "3"}})

    policy = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": "p"}}
    selector = {"podSelector": {"matchLabels": {"a": "1"}}, "policyTypes": ["Ingress"]}
    api.post(f"{talk.path('networkpolicies', None)}?fieldManager=two", policy | {"spec": selector})
    where = talk.path("networkpolicies", "p")
    api.request("PATCH", where, {"spec": {"podSelector": {"matchLabels": {"b": "1"}}, "ingress": [{}]}}, content=MERGE)
    apply(where, "two", policy | {"spec": selector})


def note_owners(talk: Exchange, body: dict[str, Any]) -> None:
    """What an object contains, and which manager owns which of its fields, the one that only tests have left out."""
    talk.note({name: value for name, value in body.items() if name != "metadata"}, body["metadata"].get("labels"))
    talk.note(body["metadata"].get("generation"))
    for entry in sorted(body["metadata"]["managedFields"], key=lambda entry: (entry["manager"], entry["operation"])):
        if entry["manager"] in ("one", "two"):
            talk.note(entry["manager"], entry["operation"], sorted(leaves(entry["fieldsV1"])))


def leaves(nested: dict[str, Any], way: str = "") -> Iterator[str]:
    for name, below in nested.items():
        if below:
            yield from leaves(below, f"{way}/{name}")
        elif name not in (".", "f:labels"):  # the real one also records who created a map
            yield f"{way}/{name}"


def training(**spec: Any) -> dict[str, Any]:
    header = {"apiVersion": GROUP.removeprefix("/apis/"), "kind": "Qwen35Training", "metadata": {"name": "demo"}}
    return header | {"spec": deepcopy(SPEC) | {"suspend": True} | spec}


def keeping_a_status(talk: Exchange) -> None:
    path, status = talk.path("qwen35trainings"), {"state": "Suspended", "rolloutNodes": 2}
    first = talk.ask("POST", talk.path("qwen35trainings", None), training() | {"status": status})
    talk.ask("PATCH", path, {"status": status}, content=MERGE)
    talk.ask("PATCH", f"{path}/status", {"status": status, "spec": {"suspend": False}}, content=MERGE)
    talk.ask("PATCH", path, {"metadata": {"labels": {"x": "y"}}}, content=MERGE)
    talk.ask("PATCH", path, {"spec": {"rollout": {"nodes": 3}}}, content=MERGE)
    talk.ask("GET", f"{path}/scale")
    talk.ask("PATCH", f"{path}/scale", {"spec": {"replicas": 1}}, content=MERGE)
    stale = [{"op": "replace", "path": "/metadata/resourceVersion", "value": first["metadata"]["resourceVersion"]}]
    talk.ask("PATCH", f"{path}/status", [*stale, {"op": "add", "path": "/status", "value": {}}], content=JSON_PATCH)
    versioned = {"metadata": {"resourceVersion": first["metadata"]["resourceVersion"]}}
    talk.ask("PATCH", f"{path}/status", {**versioned, "status": {"state": "Pending"}}, content=MERGE)
    now = {"metadata": {"resourceVersion": talk.plane.api.get(path)["metadata"]["resourceVersion"]}}
    talk.ask("PATCH", f"{path}/status", {**now, "status": {"state": "Pending", "rolloutNodes": None}}, content=MERGE)
    talk.ask("PUT", path, first)
    talk.ask("PUT", path, training())


def deleting(talk: Exchange) -> None:
    maps, path = talk.path("configmaps", None), talk.path("configmaps", "a")
    body = {"metadata": {"name": "a", "labels": {"x": "y"}}}
    talk.ask("POST", maps, body)
    talk.ask("DELETE", path, {"preconditions": {"uid": "00000000-0000-0000-0000-000000000000"}})
    talk.ask("DELETE", path, {"propagationPolicy": "Background"})
    talk.ask("DELETE", path)
    kept = {"metadata": {"name": "demo", "finalizers": ["test.qwen35.io/kept"]}}
    talk.ask("POST", maps, kept)
    demo = talk.path("configmaps", "demo")
    talk.ask("DELETE", demo)
    talk.ask("DELETE", demo)
    talk.ask("PATCH", demo, {"data": {"late": "1"}}, content=MERGE)
    talk.ask("PATCH", demo, {"metadata": {"finalizers": None}}, content=MERGE)
    talk.ask("GET", demo)
    held = training()
    held["metadata"] |= {"finalizers": ["test.qwen35.io/kept"]}
    talk.ask("POST", talk.path("qwen35trainings", None), held)
    talk.ask("DELETE", talk.path("qwen35trainings"))
    talk.ask("PATCH", talk.path("qwen35trainings"), {"metadata": {"finalizers": []}}, content=MERGE)
    talk.ask("GET", talk.path("qwen35trainings"))
    for name in ("b", "c"):
        talk.plane.api.post(maps, body | {"metadata": {"name": name, "labels": {"x": name}}})
    talk.plane.api.request("DELETE", f"{maps}?labelSelector=x")
    talk.note(talk.plane.api.exists(talk.path("configmaps", "b")))


def listing(talk: Exchange) -> None:
    maps = talk.path("configmaps", None)
    for name, labels in (("a", {"x": "1"}), ("b", {"x": "2", "y": "1"}), ("c", {"y": "1"}), ("d", {})):
        talk.plane.api.post(maps, {"metadata": {"name": name, "labels": labels}})
    for selector in ("x", "!x,y", "x=1", "x!=1,y", "x,y=1", "z"):
        items = talk.plane.api.get(f"{maps}?labelSelector={selector}")["items"]
        talk.note(selector, [item["metadata"]["name"] for item in items])
    for selector in ("metadata.name=b", "metadata.name=none", "metadata.name=a&labelSelector=y"):
        items = talk.plane.api.get(f"{maps}?fieldSelector={selector}")["items"]
        talk.note(selector, [item["metadata"]["name"] for item in items])
    names, token = [], ""
    while True:
        page = talk.plane.api.get(f"{maps}?labelSelector=y&limit=1{token}")
        names += [item["metadata"]["name"] for item in page["items"]]
        if not page["metadata"].get("continue"):
            break
        token = f"&continue={page['metadata']['continue']}"
    talk.note(names, page["kind"], page["apiVersion"])


def watching(talk: Exchange) -> None:
    """What happens to an object that a selector matches, does not match any more, and matches again."""
    maps, path = talk.path("configmaps", None), talk.path("configmaps", "a")
    start = talk.plane.api.get(maps)["metadata"]["resourceVersion"]
    talk.plane.api.post(maps, {"metadata": {"name": "a", "labels": {"x": "1"}}})
    talk.plane.api.post(maps, {"metadata": {"name": "other"}})
    for labels in ({"n": "1"}, {"x": None}, {"n": "2"}, {"x": "1"}):
        talk.plane.api.request("PATCH", path, {"metadata": {"labels": labels}}, content=MERGE)
    talk.plane.api.request("DELETE", path)
    events = talk.plane.api.events(maps, f"labelSelector=x&resourceVersion={start}")
    talk.note([(event["type"], event["object"]["metadata"].get("labels")) for event in events])
    versions = [int(event["object"]["metadata"]["resourceVersion"]) for event in events]
    talk.note(versions == sorted(set(versions)))
    later = talk.plane.api.events(maps, f"labelSelector=x&resourceVersion={versions[2]}")
    talk.note([event["type"] for event in later])
    named = talk.plane.api.events(maps, f"fieldSelector=metadata.name=other&resourceVersion={start}")
    talk.note([(event["type"], event["object"]["metadata"]["name"]) for event in named])


def collecting(talk: Exchange) -> None:
    """Owned objects go with the last of their owners."""
    maps = talk.path("configmaps", None)

    def owner(name: str) -> dict[str, Any]:
        body = talk.plane.api.post(maps, {"metadata": {"name": name}})
        return {"apiVersion": "v1", "kind": "ConfigMap", "name": name, "uid": body["metadata"]["uid"]}

    both = [owner("one"), owner("two")]
    talk.ask("POST", maps, {"metadata": {"name": "owned", "ownerReferences": both}})
    talk.plane.api.post(maps, {"metadata": {"name": "child", "ownerReferences": both[:1]}})
    child, owned = talk.path("configmaps", "child"), talk.path("configmaps", "owned")
    talk.plane.api.request("DELETE", talk.path("configmaps", "one"))
    talk.training.until(lambda: not talk.plane.api.exists(child), "the child goes")
    talk.note(talk.plane.api.exists(owned))
    talk.plane.api.request("DELETE", talk.path("configmaps", "two"))
    talk.training.until(lambda: not talk.plane.api.exists(owned), "the owned object goes with the last owner")


def limiting(talk: Exchange) -> None:
    quota = {"metadata": {"name": "none"}, "spec": {"hard": {"count/rayjobs.ray.io": "0"}}}
    talk.plane.api.post(talk.path("resourcequotas", None), quota)
    counted = talk.path("resourcequotas", "none")
    talk.training.until(lambda: "used" in talk.plane.api.get(counted).get("status", {}), "it counts")
    talk.note(talk.plane.api.get(counted)["status"])
    talk.ask("POST", talk.path("rayjobs", None), job_of(talk))


def ending_pods(talk: Exchange) -> None:
    """A pod that no node has goes immediately; one on a node gets its grace period, and its kubelet confirms the end."""
    pods = talk.path("pods", None)
    spec = {"containers": [{"name": "ray", "image": "ray"}], "terminationGracePeriodSeconds": 7}
    nowhere = spec | {"nodeSelector": {"is": "nowhere"}}
    talk.plane.api.post(pods, {"metadata": {"name": "nowhere"}, "spec": nowhere})
    talk.plane.api.request("DELETE", talk.path("pods", "nowhere"))
    talk.note(talk.plane.api.exists(talk.path("pods", "nowhere")))
    for name in ("a", "b"):
        talk.plane.api.post(pods, {"metadata": {"name": name}, "spec": spec})
    both = (talk.path("pods", "a"), talk.path("pods", "b"))
    talk.training.until(lambda: all(_runs(talk.plane.api.get(pod)) for pod in both), "they run")
    with talk.plane.kubelets_away():
        metadata = talk.plane.api.request("DELETE", both[0])["metadata"]
        talk.note(metadata["deletionGracePeriodSeconds"], "deletionTimestamp" in metadata)
        talk.ask("POST", f"{both[1]}/eviction", {"metadata": {"name": "b"}})
        evicted = talk.plane.api.get(both[1])
        talk.note([item["reason"] for item in evicted["status"]["conditions"] if item["type"] == "DisruptionTarget"])
        talk.note("deletionTimestamp" in evicted["metadata"])
    talk.training.until(lambda: not any(map(talk.plane.api.exists, both)), "their kubelet confirms their end")


def _runs(pod: dict[str, Any]) -> bool:
    return bool(pod["status"]["phase"] == "Running")


def job_of(talk: Exchange, **spec: Any) -> dict[str, Any]:
    """The RayJob of a training, as the operator writes it, without an owner, and with a head at which nobody answers."""
    parsed, problems = parse_spec(deepcopy(SPEC))
    assert parsed is not None
    assert not problems
    own = TrainingResource("demo", talk.namespace, "00000000-0000-0000-0000-000000000000", 1, parsed, {}, {})
    job = json.loads(json.dumps(ray_job.build(own, OperatorSettings(), attempt=1, rollout_nodes=2)))
    del job["metadata"]["ownerReferences"]
    (head,) = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"]
    head["ports"] = [{"name": "dashboard", "containerPort": NOBODYS_PORT}]  # the usual one may be that of `ray_head`
    # Its account does not exist here.
    for group in _groups(job["spec"]["rayClusterSpec"]):
        group["template"]["spec"].pop("serviceAccountName", None)
    return job | {"spec": job["spec"] | spec}


def _groups(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def running_a_job(talk: Exchange) -> None:
    """A RayJob gets a cluster and pods, loses them while it is suspended, and gets others afterwards."""
    story = talk.training
    talk.plane.api.post(talk.path("rayjobs", None), job_of(talk))
    for pool, count in (("head", 1), ("rollout", 2), ("train", 1)):
        story.until_pods(pool, count)
    story.until(lambda: story.job_state() == "Running", "its cluster is ready")
    note_cluster(talk)
    first = (story.cluster() or {})["metadata"]["uid"]
    story.hold_in_queue(suspended=True)
    story.until(lambda: story.job_state() == "Suspended", "it is suspended")
    talk.note(story.mine("rayclusters"), (story.job() or {})["status"].get("jobId"))
    story.until(lambda: not story.mine("pods"), "the pods are gone")
    story.hold_in_queue(suspended=False)
    story.until(lambda: story.job_state() == "Running", "it runs again")
    talk.note((story.cluster() or {})["metadata"]["uid"] != first)
    talk.plane.api.request("DELETE", talk.path("rayjobs", "demo-1"))
    kinds = ("rayjobs", "rayclusters", "pods")
    story.until(lambda: not any(story.mine(kind) for kind in kinds), "all is gone")


def resizing_a_cluster(talk: Exchange) -> None:
    """A group grows; it shrinks by the pods that are named; a pod that has ended is replaced."""
    story = talk.training
    talk.plane.api.post(talk.path("rayjobs", None), job_of(talk))
    story.until_pods("rollout", 2)
    resize(talk, replicas=3, maxReplicas=4)
    pods = story.until_pods("rollout", 3)
    resize(talk, replicas=2, scaleStrategy={"workersToDelete": [pods[1]]})
    talk.note(story.until_pods("rollout", 2) == [pods[0], pods[2]])
    note_cluster(talk)
    story.spoil(pods[0], "Error", exit_code=1)
    story.until(lambda: pods[0] not in story.pods("rollout"), "KubeRay deletes it")
    story.until_pods("rollout", 2)


def resize(talk: Exchange, **values: Any) -> None:
    talk.training.until(lambda: talk.training.cluster() is not None, "it has a cluster")
    cluster = talk.training.cluster()
    assert cluster is not None
    steps = [
        {"op": "add", "path": f"/spec/workerGroupSpecs/0/{name}", "value": value} for name, value in values.items()
    ]
    path = talk.path("rayclusters", cluster["metadata"]["name"])
    talk.plane.api.request("PATCH", path, steps, content=JSON_PATCH)


def note_cluster(talk: Exchange) -> None:
    """What the operator reads of a RayJob, its RayCluster and its pods."""
    story, job, cluster = talk.training, talk.training.job(), talk.training.cluster()
    assert job is not None
    assert cluster is not None
    name = cluster["metadata"]["name"]

    def plain(node: Any) -> Any:
        return json.loads(json.dumps(node).replace(name, "the-cluster"))

    # Not its jobStatus: here nobody answers for the head, and KubeRay takes the word of the proxy before it for that of Ray.
    status = job["status"]
    talk.note(job["metadata"]["finalizers"], status["jobId"], plain(status["rayClusterName"]))
    talk.note(plain(cluster["metadata"]["labels"]), cluster["metadata"]["annotations"])
    talk.note([(owner["kind"], owner["controller"]) for owner in cluster["metadata"]["ownerReferences"]])
    groups = cluster["spec"]["workerGroupSpecs"]
    talk.note([[group[field] for field in ("groupName", "replicas", "minReplicas")] for group in groups])
    story.until(lambda: (story.cluster() or {}).get("status", {}).get("state") == "ready", "it is ready")
    for pool in ("head", "rollout", "train"):
        for pod in story.mine("pods", f",rl.qwen35.io/pool={pool}"):
            labels = {key: value for key, value in pod["metadata"]["labels"].items() if key.startswith("rl.qwen35.io/")}
            ours = {key: plain(pod["metadata"]["labels"][f"ray.io/{key}"]) for key in ("cluster", "group", "node-type")}
            owner = pod["metadata"]["ownerReferences"][0]["kind"]
            containers = [(item["name"], sorted(item["state"])) for item in pod["status"]["containerStatuses"]]
            talk.note(pool, labels, ours, owner, pod["status"]["phase"], containers)


EXCHANGES: tuple[Script, ...] = (
    *(
        creating,
        changing,
        writing_fields,
        applying,
        keeping_a_status,
        deleting,
        listing,
        watching,
        collecting,
        limiting,
        ending_pods,
    ),
    *(running_a_job, resizing_a_cluster),
)


@pytest.fixture
def memory() -> Iterator[Plane]:
    with virtual_plane() as (plane, _):
        yield plane


@pytest.mark.parametrize("script", EXCHANGES, ids=lambda script: script.__name__)
def test_the_one_in_memory_answers_as_the_real_one(script: Script, memory: Plane, control_plane: ControlPlane):
    virtual, real = Exchange(memory), Exchange(control_plane)
    account = f"/api/v1/namespaces/{real.namespace}/serviceaccounts/default"
    real.training.until(lambda: control_plane.api.exists(account), "the namespace takes pods")
    for talk in (virtual, real):
        script(talk)
    for wanted, answer in itertools.zip_longest(real.answers, virtual.answers):
        assert answer == wanted

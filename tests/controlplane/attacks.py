"""What a hostile tenant tries on the operator, and the expected outcome of each attack.

    attack.act ─► the tenant creates or changes objects of its own namespace
    attack.outcome ─┬─ RefusedByServer   the API server refuses the request: its schema, or the chart's policy
                    ├─ Reported          the operator refuses the training, or reports the fault, in a condition
                    └─ Harmless          the attack has no effect, and the check holds

Attacks on a running training share one, which must continue after each attack. All others bring a training of their own.
`test_attacks.py` and `benchmarks/operator_attacks.py` read this table.
"""

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from tests.controlplane.live_training import GROUP, SPEC, LiveTraining

type Document = dict[str, Any]
type Act = Callable[[LiveTraining], object]

DOMAIN = "rl.qwen35.io"
NEIGHBOURS = ("neighbour-0", "neighbour-1")
"""Names of the trainings of another tenant, in another namespace."""
OTHER = NEIGHBOURS[0]
FAR_FUTURE = 1e300
"""Unix time."""
ESCAPES = "\x1b]0;owned\x07\x1b[2J\x1b]52;c;ZWNobw==\x07\x9b31m\u202egnp.exe"
"""Renames the window of a terminal, clears it, writes to the clipboard, colours text, and reverses text."""
WORST_PATTERN = r"(\w\w?){400}needle"
"""3,600 instructions, which RE2 has to follow side by side."""


@dataclass(frozen=True)
class RefusedByServer:
    """The API server refuses the request, with these words."""

    words: str


@dataclass(frozen=True)
class Reported:
    """The operator reports it in this condition, with these words in the message."""

    condition: str
    status: str
    reason: str
    words: str


@dataclass(frozen=True)
class Harmless:
    """The attack has no effect: this holds soon."""

    holds: Act
    what: str


type Outcome = RefusedByServer | Reported | Harmless


@dataclass(frozen=True)
class Attack:
    """One attack of a tenant."""

    name: str
    act: Act
    outcome: Outcome
    running: bool = False
    """Whether the attack is on a training that runs, which other attacks share. It must continue afterwards."""
    real_only: bool = False
    """Whether only the real API server can judge it: by its schemas, its policies, or limits of its parser."""
    policy: bool = False
    """Whether the chart's policy for spec.pods judges it."""
    pods: bool = False
    """Whether it waits for a train pod, so that KubeRay must run."""
    named: str = ""
    """Name of its training, if that is the attack."""

    @property
    def training(self) -> str:
        """Name of its training. By default letters, digits and dashes."""
        words = "".join(letter if letter.isalnum() else "-" for letter in self.name.lower())
        return self.named or f"x-{words[:36].strip('-')}"


# What a tenant sends.


def create(body: Document | None = None, *, metadata: Document | None = None, **sections: Any) -> Act:
    """Create a training. body: further fields of the manifest. sections: of the spec."""

    def act(own: LiveTraining) -> None:
        spec = deepcopy(SPEC)
        for section, value in sections.items():
            spec[section] = spec.get(section, {}) | value if isinstance(value, dict) else value
        manifest = {"apiVersion": GROUP.removeprefix("/apis/"), "kind": "Qwen35Training", "spec": spec}
        own_metadata = {"name": own.name} | (metadata or {})
        own.plane.api.post(own.path("qwen35trainings", None), manifest | (body or {}) | {"metadata": own_metadata})

    return act


def pods(change: Document, pool: str = "train") -> Act:
    return create(pods={pool: change})


def mounts(count: int) -> Document:
    """A container with mounts, and a volume with another name, which is as long as all of them."""
    paths = [{"mountPath": f"{number:x}"} for number in range(count)]
    volumes = [{"name": "v" * len(json.dumps(paths))}]
    return {"spec": {"volumes": volumes, "containers": [{"name": "s", "image": "i", "volumeMounts": paths}]}}


def ray(**fields: Any) -> Act:
    return pods({"spec": {"containers": [{"name": "ray", **fields}]}})


def rule(pattern: str, count: int = 1) -> Document:
    """A failure policy whose first rule has this pattern; the others have similar ones."""
    patterns = [pattern, *(f"{pattern}|{number}" for number in range(1, count))]
    rules = [{"name": f"r{number}", "action": "Fail"} for number in range(count)]
    pairs = zip(rules, patterns, strict=True)
    return {"failurePolicy": {"rules": [item | {"onMessagePattern": text} for item, text in pairs]}}


def post(plural: str, name: str, body: Document | None = None, **metadata: Any) -> Act:
    """Create an object. {own} in its name stands for the training's name."""

    def act(own: LiveTraining) -> None:
        header = {"name": name.replace("{own}", own.name), **metadata}
        own.plane.api.post(own.path(plural, None), {"metadata": header} | (body or {}))

    return act


def delete(plural: str, name: str, grace_seconds: int) -> Act:
    """Delete an object with this grace period. {own} in its name stands for the training's name."""
    options = {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": grace_seconds}

    def act(own: LiveTraining) -> None:
        own.plane.api.request("DELETE", own.path(plural, name.replace("{own}", own.name)), options)

    return act


def patch(plural: str, name: str, change: Document) -> Act:
    """Change an object by a merge patch. {own} in its name stands for the training's name."""

    def act(own: LiveTraining) -> None:
        own.patch(own.path(plural, name.replace("{own}", own.name)), change)

    return act


def write(text: str) -> Act:
    """Write a text as the trainer's report."""
    return lambda own: own.write(text)


def report(state: str = "Running", **fields: Any) -> Act:
    """Report these fields as the trainer."""
    return lambda own: own.report(state, **fields)


def after_another(*acts: Act) -> Act:
    def all_acts(own: LiveTraining) -> None:
        for act in acts:
            act(own)

    return all_acts


def copied_job(name: str, attempt: int | None = None) -> Act:
    """Copy the RayJob of attempt 1 with its labels and owner, under another name."""

    def act(own: LiveTraining) -> None:
        job = own.get("rayjobs", f"{own.name}-1")
        header = {part: job["metadata"][part] for part in ("labels", "annotations", "ownerReferences")}
        if attempt is not None:
            header["labels"][f"{DOMAIN}/attempt"] = str(attempt)
        body = FOREIGN_JOB | {"metadata": header | {"name": name.replace("{own}", own.name)}}
        own.plane.api.post(own.path("rayjobs", None), body)

    return act


def made_up_time(own: LiveTraining) -> None:
    """Report, and say in managedFields that this was in the year 0."""
    own.report(update=3, version=3)
    path = own.path("configmaps", f"{own.name}-progress")
    entries = own.plane.api.get(path)["metadata"]["managedFields"]
    entries = [entry | {"time": "0000-06-01T00:00:00Z"} for entry in entries]
    # The API server undoes a change of nothing but times. Another manager, which changes data too, gets the present time.
    change = {"metadata": {"managedFields": entries}, "data": {"more": "x"}}
    own.patch(f"{path}?fieldManager=somebody", change)


def fails_with(message: str) -> Act:
    """Report a failure with this message, in a training that the attack has created."""

    def act(own: LiveTraining) -> None:
        own.until_job()
        own.report("Failed", reason="UnexpectedError", message=message)

    return act


def network_deleted(own: LiveTraining) -> None:
    for _ in range(5):
        own.until(lambda: is_closed(own), "there is a NetworkPolicy")
        own.plane.api.request("DELETE", own.path("networkpolicies"))


def started(own: LiveTraining) -> None:
    """Wait until the training that the attack has created has a train pod."""
    own.until_pods("train", 1)


def stopped_by(reason: str, time: float) -> Act:
    """Write an order to stop for attempt 1, as the operator does."""
    order = {"id": f"1-{reason}", "reason": reason, "time": time}
    return patch("configmaps", "{own}-control", {"data": {"control.json": json.dumps({"attempt": 1, "stop": order})}})


def created_and_deleted(own: LiveTraining) -> None:
    for _ in range(5):
        own.apply()
        own.delete()
        own.until(lambda: own.find("qwen35trainings", own.name) is None, "it is gone")


def nested(levels: int) -> bytes:
    """A manifest with pods of this many levels, as text: Python cannot write it as JSON."""
    spec = json.dumps(SPEC)[:-1]
    text = '{"a":' * levels + "1" + "}" * levels
    manifest = (
        f'{{"apiVersion": "{GROUP.removeprefix("/apis/")}", "kind": "Qwen35Training", "metadata": {{"name": "NAME"}}, '
    )
    return f'{manifest} "spec": {spec}, "pods": {{"train": {{"spec": {{"dnsConfig": {text}}}}}}}}}}}'.encode()


def create_nested(levels: int) -> Act:
    def act(own: LiveTraining) -> None:
        body = nested(levels).replace(b"NAME", own.name.encode())
        own.plane.api.request("POST", own.path("qwen35trainings", None), body)

    return act


def levels(count: int) -> Document:
    document: Document = {}
    for _ in range(count):
        document = {"a": document}
    return document


# Expected outcomes.


def invalid(words: str) -> Reported:
    return Reported("Accepted", "False", "Invalid", words)


def unreadable(words: str = "progress.json") -> Reported:
    return Reported("Degraded", "True", "ProgressUnreadable", words)


def is_running(own: LiveTraining) -> bool:
    return own.condition("Ready") == ("True", "Running") and [a["outcome"] for a in own.attempts] == ["Running"]


def is_starting(own: LiveTraining) -> bool:
    return own.condition("Accepted")[0] == "True" and own.state == "Starting"


def has_failed(own: LiveTraining) -> bool:
    return own.first.get("outcome") == "Failed"


def is_closed(own: LiveTraining) -> bool:
    """Whether the NetworkPolicy is as the operator writes it."""
    policy = own.find("networkpolicies", own.name)
    return policy is not None and {} not in policy["spec"]["ingress"] and len(policy["spec"]["ingress"]) == 3


def has_least_rights(own: LiveTraining) -> bool:
    """Whether the trainer's Role names ConfigMaps of its own training and nothing else."""
    rules = own.get("roles", f"{own.name}-trainer")["rules"]
    names = {name for item in rules for name in item.get("resourceNames", ["*"])}
    kinds = {kind for item in rules for kind in item["resources"]}
    return kinds == {"configmaps"} and all(name.startswith(f"{own.name}-") for name in names)


def is_without_rights(own: LiveTraining) -> bool:
    is_refused = own.condition("Accepted") == ("False", "NameTaken")
    return is_refused and own.find("roles", f"{own.name}-trainer") is None


def is_stopping_from_now_on(own: LiveTraining) -> bool:
    return own.state == "Suspending" and own.order is not None and own.order["time"] < FAR_FUTURE


def is_starting_again(own: LiveTraining) -> bool:
    """Whether the second attempt starts after the first one was stopped."""
    outcomes = [attempt["outcome"] for attempt in own.attempts]
    return outcomes == ["Suspended", "Running"] and own.state == "Starting"


def is_nowhere_else(own: LiveTraining) -> bool:
    """Whether no other namespace has an object of this training's name, apart from the neighbour's own training."""
    everywhere = own.plane.api.get(f"/api/v1/configmaps?labelSelector={DOMAIN}/training={own.name}")["items"]
    owners = {owner["uid"] for item in everywhere for owner in item["metadata"].get("ownerReferences", ())}
    own_items = [item for item in everywhere if item["metadata"]["namespace"] == own.namespace]
    return len(own_items) >= 4 and len(owners) == 2


def keeps_queue_labels_only(own: LiveTraining) -> bool:
    job = own.job()
    return job is not None and "ray.io/cluster" not in job["metadata"]["labels"] and len(own.mine("rayjobs")) == 1


def is_gone(own: LiveTraining) -> bool:
    return own.find("qwen35trainings", own.name) is None and not own.mine("rayjobs")


def is_kept(own: LiveTraining) -> bool:
    """Whether the training waits for its finalizer and has nothing that runs. The finalizer is then removed."""
    body = own.find("qwen35trainings", own.name)
    if body is None or "deletionTimestamp" not in body["metadata"]:
        return False
    own.patch(own.path("qwen35trainings"), {"metadata": {"finalizers": None}})
    return True


OPEN: Document = {"spec": {"ingress": [{}], "egress": [{}], "podSelector": {}}}
ANYTHING = {"rules": [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}]}
LABELLED = {"labels": {f"{DOMAIN}/training": OTHER}}
POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "spec": {"containers": [{"name": "ray", "image": "mine"}], "nodeSelector": {"no": "node"}},
}
POD_ON_A_NODE = POD | {"spec": {"containers": [{"name": "ray", "image": "mine"}], "nodeName": "none"}}
"""A pod that has a grace period, because it names a node. The node does not exist, so no kubelet ends the pod."""
FOREIGN_JOB: Document = {
    "apiVersion": "ray.io/v1",
    "kind": "RayJob",
    "spec": {"entrypoint": "mine", "clusterSelector": {"ray.io/cluster": "none"}},
}
"""A RayJob that creates no cluster."""
SUCCESS = {
    "state": "Succeeded",
    "conditions": [
        {
            "type": "Succeeded",
            "status": "True",
            "reason": "Succeeded",
            "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }
    ],
}
DRIVER_MOUNT = {
    "name": "mine",
    "image": "mine",
    "volumeMounts": [{"name": "ascend-driver", "mountPath": "/usr/local/Ascend/driver"}],
}
"""A container that could write to the driver of its node, which the operator mounts for the profile Ascend."""
STARTS = Harmless(is_starting, "it starts as any other")
RUNS = Harmless(is_running, "it runs on, in its first attempt")
CLOSED = Harmless(is_closed, "the NetworkPolicy is repaired")
RECORDED = Harmless(has_failed, "the failure is recorded")
SUSPENDED = Harmless(lambda own: own.state == "Suspended", "it is suspended")
NAME_REFUSED = RefusedByServer("metadata.name must start with a letter and have at most 40 letters, digits and dashes")

SPECS = (
    Attack("pattern that is none", create(**rule("[")), invalid("rules[0].onMessagePattern")),
    Attack("pattern with look-around", create(**rule("(?=a)a")), invalid("rules[0].onMessagePattern")),
    Attack("pattern with back-reference", create(**rule(r"(a+)\1")), invalid("rules[0].onMessagePattern")),
    Attack("pattern of gigabytes", create(**rule(r"(\pL{1,1000}){1,1000}")), invalid("is not an RE2 expression")),
    Attack(
        "pattern that takes exponential time",
        after_another(create(**rule("(a|aa)+$")), fails_with("a" * 4000 + "!")),
        RECORDED,
    ),
    Attack(
        "32 largest patterns",
        after_another(create(**rule(WORST_PATTERN, 32)), fails_with("ab" * 2048)),
        RECORDED,
    ),
    Attack(
        "spec of 300 kilobytes",
        pods({"metadata": {"annotations": {"a": "x" * 300_000}}}),
        invalid("bytes as JSON"),
    ),
    Attack("a million letters", pods({"spec": {"hostAliases": "x" * 1_000_000}}), invalid("bytes as JSON")),
    Attack("mounts of volumes that are not there", pods(mounts(1_200)), invalid("is not a volume of the pod")),
    Attack("5,000 mounts", pods(mounts(5_000)), invalid("bytes as JSON")),
    Attack("items that are none", pods({"spec": {"hostAliases": [0] * 30_000}}), invalid("is not a mapping")),
    Attack("100,000 items", pods({"spec": {"hostAliases": [0] * 100_000}}), invalid("bytes as JSON")),
    Attack("nested 90 times", pods({"spec": {"dnsConfig": levels(90)}}), invalid("levels of objects")),
    Attack("nested 200 times", pods({"spec": {"dnsConfig": levels(200)}}), invalid("levels of objects")),
    Attack("nested 1,000 times", create_nested(1000), invalid("levels of objects"), real_only=True),
    Attack("network of the host", pods({"spec": {"hostNetwork": True}}), invalid("train.spec.hostNetwork")),
    Attack("account of others", pods({"spec": {"serviceAccountName": "admin"}}), invalid("spec.serviceAccountName")),
    Attack(
        "token in workers",
        pods({"spec": {"automountServiceAccountToken": True}}),
        invalid("spec.automountServiceAccountToken"),
    ),
    Attack("hostname", pods({"spec": {"hostname": OTHER}}), invalid("spec.hostname")),
    Attack("command of ray", ray(command=["sh"]), invalid("containers[0].command")),
    Attack("image of ray", ray(image="mine"), invalid("containers[0].image")),
    Attack(
        "label of a neighbour",
        pods({"metadata": {"labels": {f"{DOMAIN}/training": OTHER}}}),
        invalid("is reserved for the operator"),
    ),
    Attack(
        "label of a Ray head",
        pods({"metadata": {"labels": {"ray.io/node-type": "head"}}}),
        invalid("is reserved for the operator"),
    ),
    Attack(
        "command by annotation",
        pods({"metadata": {"annotations": {"ray.io/overwrite-container-cmd": "true"}}}),
        invalid("is reserved for the operator"),
    ),
    Attack(
        "label that no pod may have",
        pods({"metadata": {"labels": {"team": "a b\nc"}}}),
        invalid("not a valid label value"),
    ),
    Attack(
        "namespace by variable",
        ray(env=[{"name": "QWEN35_NAMESPACE", "value": "kube-system"}]),
        invalid("QWEN35_NAMESPACE is set"),
    ),
    Attack(
        "token of Ray by variable",
        create(pods={"env": [{"name": "RAY_AUTH_TOKEN", "value": "x"}]}),
        invalid("RAY_AUTH_TOKEN is set"),
    ),
    Attack(
        "mount over everything",
        pods(
            {
                "spec": {
                    "volumes": [{"name": "v", "emptyDir": {}}],
                    "containers": [{"name": "ray", "volumeMounts": [{"name": "v", "mountPath": "/"}]}],
                }
            }
        ),
        invalid("overlaps"),
    ),
    Attack(
        "mount with dots",
        pods(
            {
                "spec": {
                    "volumes": [{"name": "v", "emptyDir": {}}],
                    "containers": [{"name": "ray", "volumeMounts": [{"name": "v", "mountPath": "/x/../dev/shm"}]}],
                }
            }
        ),
        invalid("overlaps"),
    ),
    Attack(
        "volume of the operator",
        pods({"spec": {"volumes": [{"name": "shm", "emptyDir": {}}]}}),
        invalid("the operator has a volume shm too"),
    ),
    *(
        Attack(
            f"driver of the node in {kind}",
            create(accelerator={"profile": "Ascend"}, pods={"train": {"spec": {kind: [DRIVER_MOUNT]}}}),
            invalid(f"{kind}[0].volumeMounts[0].readOnly"),
        )
        for kind in ("containers", "initContainers")
    ),
    Attack(
        "init container called ray",
        pods({"spec": {"initContainers": [{"name": "ray", "image": "mine"}]}}),
        invalid("name of another container"),
    ),
    Attack(
        "ephemeral container",
        pods({"spec": {"ephemeralContainers": [{"name": "d", "image": "mine"}]}}),
        invalid("spec.ephemeralContainers"),
    ),
    Attack(
        "grace period of billions of years",
        after_another(pods({"spec": {"terminationGracePeriodSeconds": 10**18}}), started, LiveTraining.delete),
        Harmless(lambda own: is_gone(own) and not own.mine("pods"), "it is deleted with its pods"),
        pods=True,
    ),
    Attack("directive of a patch", pods({"spec": {"$patch": "replace"}}), invalid("directives")),
    Attack(
        "port of the dashboard",
        pods({"spec": {"containers": [{"name": "ray", "ports": [{"containerPort": 8265}]}]}}, "head"),
        invalid("head's Service"),
    ),
    Attack(
        "protocol that is a list",
        ray(ports=[{"containerPort": 1, "protocol": ["TCP"]}]),
        invalid("ports[0].protocol: a list is not a string"),
    ),
    Attack(
        "spec that is a list in a list",
        pods({"spec": {"hostAliases": [["ip"]]}}),
        invalid("is not a mapping"),
    ),
    Attack("long name", create(), NAME_REFUSED, named="x" + "y" * 60, real_only=True),
    Attack("name with dots", create(), NAME_REFUSED, named="x.y", real_only=True),
    Attack(
        "Secret of another namespace",
        ray(
            env=[
                {"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k", "namespace": "kube-system"}}},
            ]
        ),
        Reported("Accepted", "False", "KubeRayTooOld", "unknown field"),
        real_only=True,
    ),
    Attack("two megabytes", pods({"spec": {"a": "x" * 2_000_000}}), RefusedByServer("too large"), real_only=True),
    Attack("nodes as a text", create(train={"nodes": "many"}), RefusedByServer("nodes"), real_only=True),
    Attack("a billion nodes", create(train={"nodes": 10**9}), RefusedByServer("nodes"), real_only=True),
    Attack("33 rules", create(**rule("a", 33)), RefusedByServer("rules"), real_only=True),
    Attack("pattern of 513 letters", create(**rule("a" * 513)), RefusedByServer("Pattern"), real_only=True),
    Attack("a mode of its own", create(mode="Mine"), RefusedByServer("mode"), real_only=True),
)

METADATA = (
    Attack("status of a success", create({"status": SUCCESS}), STARTS),
    Attack(
        "generation and uid",
        create(metadata={"generation": 10**9, "uid": "00000000-0000-0000-0000-000000000000"}),
        Harmless(lambda own: is_starting(own) and own.status["observedGeneration"] == 1, "the server's count"),
    ),
    Attack(
        "label of a neighbour's object",
        create(metadata={"labels": {f"{DOMAIN}/training": OTHER, "ray.io/cluster": "other"}}),
        Harmless(keeps_queue_labels_only, "its RayJob has no such label"),
    ),
    Attack(
        "long annotations",
        create(
            metadata={"annotations": {f"{DOMAIN}/{name}": "x" * 60_000 for name in ("retry", "update", "force-start")}}
        ),
        STARTS,
    ),
    Attack(
        "name of a neighbour",
        create(),
        Harmless(is_nowhere_else, "only its own namespace"),
        named=NEIGHBOURS[1],
    ),
    Attack(
        "finalizer that nobody removes",
        after_another(create(metadata={"finalizers": ["example.com/forever"]}), LiveTraining.delete),
        Harmless(is_kept, "it waits without pods"),
    ),
    Attack(
        "name of 254 letters",
        create(metadata={"name": "x" * 254}),
        RefusedByServer("must be no more than"),
        real_only=True,
    ),
    Attack(
        "namespace of others",
        create(metadata={"namespace": "kube-system"}),
        RefusedByServer("does not match the namespace"),
        real_only=True,
    ),
)

VALID: Document = {"attempt": 1, "state": "Running", "time": 1.8e9, "update": 1, "version": 1}
REPORTS = tuple(
    replace(attack, running=True)
    for attack in (
        Attack("report of a megabyte", write("x" * 1_000_000), unreadable("bytes")),
        Attack("report of emojis", write("\U0001f600" * 200_000), unreadable("bytes")),
        Attack("report nested 100,000 times", write("[" * 100_000), unreadable()),
        Attack("report of NULs", write("\x00" * 1000), unreadable()),
        Attack("number of 5,000 digits", write('{"attempt": 1' + "0" * 5000 + "}"), unreadable()),
        Attack("time after the year 9999", report(time=1e300), unreadable("time")),
        Attack(
            "version after the year 9999",
            report(versionTime=1e20, versionSeconds=1.0),
            unreadable("versionTime"),
        ),
        Attack("half of a letter", write(json.dumps(VALID | {"phase": "\ud800"})), unreadable()),
        Attack("1,025 replicas", report(replicas=[{"pods": [], "idle": 0.5}] * 1025), unreadable("replicas")),
        Attack("infinitely slow", report(versionTime=1.0e9, versionSeconds=1e308), RUNS),
        Attack("numbers without bounds", report(reward=-1e308, tokensPerSecond=1e308, prompts=2**63 - 1), RUNS),
        Attack("escape sequences", report(phase=ESCAPES), RUNS),
        Attack(
            "folder of a checkpoint",
            report(checkpoint={"uri": "../" * 300 + ESCAPES, "update": 1, "time": 1.8e9}),
            RUNS,
        ),
        Attack("success of another attempt", report("Succeeded", attempt=2), unreadable("attempt: 2 does not exist")),
        Attack("pods of a neighbour", report(replicas=[{"pods": [f"{OTHER}-1-rollout"], "idle": 1.0}]), RUNS),
        Attack("report from the year 0", made_up_time, RUNS),
    )
)

CHILDREN = tuple(
    replace(attack, running=True)
    for attack in (
        Attack("open network", patch("networkpolicies", "{own}", OPEN), CLOSED),
        Attack(
            "open network without a label",
            patch("networkpolicies", "{own}", OPEN | {"metadata": {"labels": {f"{DOMAIN}/training": None}}}),
            CLOSED,
        ),
        Attack(
            "open network with a long hash",
            patch("networkpolicies", "{own}", OPEN | {"metadata": {"annotations": {f"{DOMAIN}/hash": "x" * 200_000}}}),
            CLOSED,
        ),
        Attack(
            "more rights",
            patch("roles", "{own}-trainer", ANYTHING),
            Harmless(has_least_rights, "the Role is repaired"),
        ),
        Attack("copy of a job", copied_job("{own}-copy"), RUNS),
        Attack("job of attempt 10**30", copied_job(f"{{own}}-{10**30}", 10**30), RUNS),
        Attack("two jobs of one attempt", after_another(copied_job("{own}-a", 2), copied_job("{own}-b", 2)), RUNS),
        Attack(
            "job with long annotations",
            patch(
                "rayjobs",
                "{own}-1",
                {
                    "metadata": {
                        "annotations": {f"{DOMAIN}/{part}": "x" * 80_000 for part in ("update", "image", "hash")}
                    }
                },
            ),
            RUNS,
        ),
    )
)


def foreign(name: str, *acts: Act) -> Attack:
    """An attack by objects that belong to no training. Afterwards the operator must serve a new training."""
    return Attack(name, after_another(*acts, create(suspend=True)), SUSPENDED)


FOREIGN = (
    Attack(
        "child that exists",
        after_another(post("configmaps", "{own}-config", {"data": {"mine": "x"}}), create()),
        Reported("Accepted", "False", "NameTaken", "does not belong to this training"),
    ),
    Attack(
        "rights on what others have",
        after_another(post("configmaps", "{own}-history", {"data": {"mine": "x"}}), create()),
        Harmless(is_without_rights, "it is refused, and no account has rights on that ConfigMap"),
    ),
    Attack(
        "order from the far future",
        after_another(create(), started, stopped_by("Suspend", FAR_FUTURE)),
        Harmless(
            is_stopping_from_now_on, "the attempt is stopping, and its grace period began when the order was seen"
        ),
        pods=True,
    ),
    Attack(
        "order that its deadline is over",
        after_another(create(), started, stopped_by("DeadlineExceeded", 0.0)),
        Harmless(is_starting_again, "the attempt is stopped, and the next one starts"),
        pods=True,
    ),
    foreign(
        "report for a neighbour",
        post(
            "configmaps",
            f"{OTHER}-progress",
            {"data": {"progress.json": json.dumps(VALID | {"state": "Failed"})}},
            **LABELLED,
        ),
    ),
    foreign(
        "pod of a neighbour",
        post("pods", f"{OTHER}-1-head", POD, labels={f"{DOMAIN}/training": OTHER, f"{DOMAIN}/attempt": "1"}),
    ),
    foreign(
        "pod without sense",
        post("pods", "{own}-pod", POD, labels={f"{DOMAIN}/training": OTHER, f"{DOMAIN}/attempt": "first"}),
        post("pods", "{own}-pod-2", POD, labels={f"{DOMAIN}/training": OTHER, f"{DOMAIN}/pool": "none"}),
    ),
    foreign(
        "pod that takes 3,000 years to end",
        post("pods", "{own}-pod", POD_ON_A_NODE, labels={f"{DOMAIN}/training": OTHER, f"{DOMAIN}/attempt": "1"}),
        delete("pods", "{own}-pod", grace_seconds=10**11),
        delete("pods", "{own}-pod", grace_seconds=0),
    ),
    foreign(
        "job of a neighbour",
        post("rayjobs", f"{OTHER}-1", FOREIGN_JOB, labels={f"{DOMAIN}/training": OTHER, f"{DOMAIN}/attempt": "1"}),
    ),
    foreign(
        "flood of reports",
        *(
            post("configmaps", f"none-{number}-progress", {"data": {"progress.json": "x" * 300_000}}, **LABELLED)
            for number in range(10)
        ),
    ),
)

LOOPS = (
    Attack(
        "labels in a loop",
        after_another(
            create(suspend=True),
            *(patch("qwen35trainings", "{own}", {"metadata": {"labels": {"n": str(n)}}}) for n in range(30)),
        ),
        SUSPENDED,
    ),
    Attack(
        "patterns in a loop",
        after_another(
            create(suspend=True),
            *(patch("qwen35trainings", "{own}", {"spec": rule(f"{WORST_PATTERN}{n}", 32)}) for n in range(10)),
        ),
        SUSPENDED,
    ),
    Attack("created and deleted in a loop", created_and_deleted, Harmless(is_gone, "nothing is left")),
    Attack(
        "network deleted in a loop",
        network_deleted,
        CLOSED,
        running=True,
    ),
    Attack(
        "retry in a loop",
        after_another(
            *(
                patch("qwen35trainings", "{own}", {"metadata": {"annotations": {f"{DOMAIN}/retry": str(n) * 50_000}}})
                for n in range(9)
            )
        ),
        RUNS,
        running=True,
    ),
    Attack("phases in a loop", after_another(*(report(phase=f"phase {n}") for n in range(60))), RUNS, running=True),
    Attack(
        "scale to two billions",
        lambda own: own.scale(2**31 - 1),
        RefusedByServer("less than or equal"),
        running=True,
        real_only=True,
    ),
)

POLICIES = tuple(
    Attack(name, pods({"spec": spec}), RefusedByServer(words), real_only=True, policy=True)
    for name, spec, words in (
        ("folder of the node", {"volumes": [{"name": "root", "hostPath": {"path": "/"}}]}, "HostPath"),
        ("processes of the node", {"hostPID": True}, "Host Namespaces"),
        ("privileged", {"containers": [{"name": "ray", "securityContext": {"privileged": True}}]}, "Privileged"),
        (
            "capability",
            {"containers": [{"name": "ray", "securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}}}]},
            "Capabilities",
        ),
    )
)

ATTACKS: Sequence[Attack] = (*SPECS, *METADATA, *REPORTS, *CHILDREN, *FOREIGN, *LOOPS, *POLICIES)

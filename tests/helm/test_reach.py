"""The connections that the policies of the chart and of the trainings allow together: the tables of docs/network.md."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from qwen35_operator.api.training_resource import TrainingResource
from qwen35_operator.desired import network_policy, object_names, pod_templates
from qwen35_operator.operator_settings import KUBERAY_NAMESPACE, OperatorSettings
from qwen35_trainer.manifest import load_manifest
from tests.helm.conftest import NAMESPACE, Render
from tests.profiles import examples
from tests.reach import NAME, End, Outside, Pod, Policy, may_reach

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "network.md"
TEAM = "team"

RAY = {"Ray GCS 6379": 6379, "Ray client 10001": 10001, "any other port": 29500}
OF_CHART = {"app.kubernetes.io/name": "kuberay-operator"}
OF_MANIFESTS = {"app.kubernetes.io/name": "kuberay", "app.kubernetes.io/component": "kuberay-operator"}
SYSTEM: dict[str, End] = {
    "KubeRay's operator (its chart)": Pod(KUBERAY_NAMESPACE, OF_CHART),
    "KubeRay's operator (its manifests)": Pod(KUBERAY_NAMESPACE, OF_MANIFESTS),
    "a pod with KubeRay's labels, elsewhere": Pod("elsewhere", OF_CHART | OF_MANIFESTS),
    "another pod of KubeRay's namespace": Pod(KUBERAY_NAMESPACE, {"app": "notebook"}),
    "Prometheus": Pod("monitoring", {"app.kubernetes.io/name": "prometheus"}),
    "another Ray head, same namespace": Pod(TEAM, {"app.kubernetes.io/name": "kuberay", "ray.io/node-type": "head"}),
    "any other pod, same namespace": Pod(TEAM, {"app": "notebook"}),
    "any other pod, elsewhere": Pod("elsewhere", {"app": "notebook"}),
    "outside the cluster": Outside(),
}


def training(name: str, namespace: str) -> TrainingResource:
    spec = load_manifest(ROOT / "examples" / "tiny-grpo.yaml").spec
    return TrainingResource(name, namespace, "00000000-0000-0000-0000-000000000000", 1, spec)


def pod_of(owner: TrainingResource, pool: Any) -> Pod:
    """As KubeRay makes it: with labels of its own."""
    labels = pod_templates.template(owner, "trainer:1", pool, 1)["metadata"]["labels"]
    return Pod(owner.namespace, labels | {"ray.io/node-type": "head" if pool == "head" else "worker"})


@pytest.fixture(scope="module")
def demo() -> TrainingResource:
    return training("demo", TEAM)


@pytest.fixture(scope="module")
def operator(render: Render) -> Pod:
    """The pod of the chart's Deployment."""
    (deployment,) = (manifest for manifest in render() if manifest["kind"] == "Deployment")
    template = deployment["spec"]["template"]
    ports = {port["name"]: port["containerPort"] for port in template["spec"]["containers"][0]["ports"]}
    return Pod(NAMESPACE, template["metadata"]["labels"], ports=ports)


@pytest.fixture(scope="module")
def policies(render: Render, demo: TrainingResource) -> list[Policy]:
    """Every policy that we put into a cluster: the chart's, and those of three trainings."""
    trainings = [demo, training("other", TEAM), training("demo", "elsewhere")]
    charts = [manifest for manifest in render() if manifest["kind"] == "NetworkPolicy"]
    return [*charts, *(network_policy.build(item, OperatorSettings()) for item in trainings)]


@pytest.fixture(scope="module")
def parties(demo: TrainingResource, operator: Pod) -> dict[str, End]:
    """Everybody who may want something of a training."""
    return {
        "head of the training": pod_of(demo, "head"),
        "rollout pod of the training": pod_of(demo, "rollout"),
        "train pod of the training": pod_of(demo, "train"),
        "this operator": operator,
        "another training, same namespace": pod_of(training("other", TEAM), "rollout"),
        "a training of its name, elsewhere": pod_of(training("demo", "elsewhere"), "train"),
        **SYSTEM,
    }


def table(corner: str, rows: Iterable[str], columns: Iterable[str], holds: Callable[[str, str], bool]) -> str:
    columns = list(columns)
    lines = [f"| {corner} | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    lines += [f"| {row} | {' | '.join('✓' if holds(row, column) else '·' for column in columns)} |" for row in rows]
    return "\n".join(lines)


def test_who_may_reach_a_training(policies, parties, demo):
    ports = {"dashboard 8265": 8265, "metrics 8080": 8080, **RAY}
    targets = [pod_of(demo, pool) for pool in ("head", "rollout", "train")]

    def reached(who: str, port: str) -> bool:
        (answer,) = {may_reach(policies, parties[who], target, ports[port]) for target in targets}
        return answer

    drawn = table("from", parties, ports, reached)
    assert drawn in DOCS.read_text(), drawn
    own_pods = [who for who in parties if who.endswith("of the training")]
    assert all(reached(who, port) for who in own_pods for port in ports)
    assert {who for who in parties if reached(who, "Ray GCS 6379")} == set(own_pods)
    assert {who for who in parties if reached(who, "dashboard 8265")} == {
        *own_pods,
        "KubeRay's operator (its chart)",
        "KubeRay's operator (its manifests)",
    }


def test_whom_a_training_may_reach(policies, parties, demo, operator):
    dns = Pod("kube-system", {"k8s-app": "kube-dns"})
    store = Pod("storage", {"app": "minio"})
    other = pod_of(training("other", TEAM), "head")
    connections: dict[str, tuple[End, int, str]] = {
        "DNS of the cluster, UDP 53": (dns, 53, "UDP"),
        "DNS of the cluster, TCP 53": (dns, 53, "TCP"),
        "the API server, 443 and behind it 6443": (Outside("192.0.2.1"), 6443, "TCP"),
        "anywhere outside, 443": (Outside(), 443, "TCP"),
        "anywhere outside, 80": (Outside(), 80, "TCP"),
        "anywhere outside, 22": (Outside(), 22, "TCP"),
        "a service of the cluster, 443": (store, 443, "TCP"),
        "a service of the cluster, 9000": (store, 9000, "TCP"),
        "the head of another training, 6379": (other, 6379, "TCP"),
        "this operator, metrics": (operator, operator.ports["metrics"], "TCP"),
    }
    sources = {pool: pod_of(demo, pool) for pool in ("head", "rollout", "train")}
    drawn = table("to", connections, sources, lambda what, pool: may_reach(policies, sources[pool], *connections[what]))
    assert drawn in DOCS.read_text(), drawn


def test_who_may_reach_the_operator(policies, parties, operator):
    ports = {**operator.ports, "any other port": 9999}
    drawn = table("from", parties, ports, lambda who, port: may_reach(policies, parties[who], operator, ports[port]))
    assert drawn in DOCS.read_text(), drawn


def test_without_our_policies_everybody_reaches_everything(parties, demo):
    head = pod_of(demo, "head")
    assert all(may_reach([], value, head, port) for value in parties.values() for port in RAY.values())


def test_the_policy_of_one_training_opens_nothing_of_another(policies, demo):
    """Policies add up: one that selects too much would let others in."""
    other = training("other", TEAM)
    alone = [network_policy.build(demo, OperatorSettings())]
    for pool in ("head", "rollout", "train"):
        assert may_reach(alone, pod_of(demo, "head"), pod_of(demo, pool), 6379)
        assert not may_reach(policies, pod_of(other, pool), pod_of(demo, "head"), 6379)
        assert not may_reach(policies, pod_of(demo, "head"), pod_of(other, pool), 6379)


def test_a_pod_that_calls_itself_a_trainings_gets_in(policies, demo):
    """Labels are all that a policy sees: a user who may create pods in the namespace may reach the training. The documentation states this."""
    impostor = Pod(TEAM, {object_names.TRAINING: "demo"})
    assert may_reach(policies, impostor, pod_of(demo, "head"), 6379)
    assert not may_reach(policies, Pod("elsewhere", {object_names.TRAINING: "demo"}), pod_of(demo, "head"), 6379)


WORD = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,8}[a-z0-9])?", fullmatch=True)


def labels_near(vocabulary: Mapping[str, str]) -> st.SearchStrategy[dict[str, str]]:
    """Labels of which many have keys or values of the vocabulary, in any combination."""
    keys, values = st.sampled_from(sorted(vocabulary)), st.sampled_from(sorted({*vocabulary.values(), "demo"}))
    return st.dictionaries(keys | WORD, values | WORD, max_size=6)


@settings(max_examples=examples(100), deadline=None)
@given(data=st.data())
def test_no_labels_admit_a_pod_from_outside_kuberays_namespace(policies, parties, data):
    """Only the metrics are open to all. The one exception is that of the test before: a pod of the training's namespace with its label."""
    own = [end for who, end in parties.items() if who.endswith("of the training")]
    vocabulary = {**own[0].labels, **OF_CHART, **OF_MANIFESTS}
    copied = data.draw(st.sampled_from([{}, own[0].labels, OF_CHART, OF_MANIFESTS, vocabulary]))
    labels = {**copied, **data.draw(labels_near(vocabulary))}
    namespaces = st.sampled_from([TEAM, "elsewhere", NAMESPACE, "kube-system", f"{KUBERAY_NAMESPACE}-2"])
    namespace = data.draw(namespaces | WORD)
    assume(namespace != KUBERAY_NAMESPACE)
    pod = Pod(namespace, labels, data.draw(labels_near({NAME: KUBERAY_NAMESPACE, "team": TEAM})))
    ports = st.sampled_from([8265, *RAY.values()]) | st.integers(1, 65535).filter(lambda number: number != 8080)
    port = data.draw(ports)
    belongs = namespace == TEAM and labels.get(object_names.TRAINING) == "demo"
    assert {may_reach(policies, pod, target, port) for target in own} == {belongs}


# The function itself, on policies whose meaning the documentation of Kubernetes gives.

A, B = Pod("x", {"app": "a"}), Pod("y", {"app": "b"}, {"team": "blue"}, {"web": 8080})


def policy(namespace: str = "y", **spec: Any) -> Policy:
    return {"metadata": {"namespace": namespace}, "spec": {"podSelector": {}} | spec}


@pytest.mark.parametrize(
    ("spec", "reached"),
    [
        ({}, False),
        ({"ingress": []}, False),
        ({"ingress": [{}]}, True),
        ({"podSelector": {"matchLabels": {"app": "else"}}}, True),
        ({"policyTypes": ["Egress"]}, True),
        ({"ingress": [{"from": [{"podSelector": {}}]}]}, False),
        ({"ingress": [{"from": [{"namespaceSelector": {}}]}]}, True),
        ({"ingress": [{"from": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "x"}}}]}]}, True),
        ({"ingress": [{"from": [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "b"}}}]}]}, False),
        ({"ingress": [{"from": [{"namespaceSelector": {}}, {"podSelector": {"matchLabels": {"app": "b"}}}]}]}, True),
        ({"ingress": [{"from": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}]}, True),
        ({"ingress": [{"from": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.244.0.0/16"]}}]}]}, False),
        ({"ingress": [{"ports": [{"port": 8080}]}]}, True),
        ({"ingress": [{"ports": [{"port": "web"}]}]}, True),
        ({"ingress": [{"ports": [{"port": "metrics"}]}]}, False),
        ({"ingress": [{"ports": [{"protocol": "UDP", "port": 8080}]}]}, False),
        ({"ingress": [{"ports": [{"port": 8000, "endPort": 8100}]}]}, True),
        ({"ingress": [{"ports": [{"protocol": "TCP"}]}]}, True),
    ],
)
def test_a_selected_pod_is_closed_but_for_what_a_rule_allows(spec, reached):
    assert may_reach([policy(**spec)], A, B, 8080) == reached


def test_rules_of_all_policies_add_up_and_both_ends_count():
    closed, opened = policy(), policy(ingress=[{"ports": [{"port": 8080}]}])
    assert may_reach([closed, opened], A, B, 8080)
    silent = policy("x", policyTypes=["Egress"])
    assert not may_reach([closed, opened, silent], A, B, 8080)
    assert may_reach([opened, silent, policy("x", egress=[{"to": [{"namespaceSelector": {}}]}])], A, B, 8080)


@pytest.mark.parametrize(
    ("operator", "values", "chosen"),
    [("In", ["a"], "a"), ("NotIn", ["a"], "b"), ("Exists", [], "ab"), ("DoesNotExist", [], "")],
)
def test_selectors_choose_by_expression(operator, values, chosen):
    selector = {"matchExpressions": [{"key": "app", "operator": operator, "values": values}]}
    closed = policy("x", podSelector=selector)
    for label in "ab":
        assert may_reach([closed], B, Pod("x", {"app": label}), 80) == (label not in chosen)

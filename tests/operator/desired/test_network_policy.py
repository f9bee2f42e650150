"""Who may reach whom, computed from the object as a network plugin does."""

import pytest

from qwen35_operator.desired import network_policy, pods
from qwen35_operator.settings import Settings

CHART = {"app.kubernetes.io/name": "kuberay-operator"}
KUSTOMIZE = {"app.kubernetes.io/name": "kuberay", "app.kubernetes.io/component": "kuberay-operator"}
OWN_OPERATOR = {"app.kubernetes.io/name": "qwen35-operator"}
OTHER_TRAINING = {"rl.qwen35.io/training": "other", "app.kubernetes.io/name": "qwen35"}
OTHER_RAY = {"app.kubernetes.io/name": "kuberay", "ray.io/node-type": "head"}
PROMETHEUS = {"app.kubernetes.io/name": "prometheus"}

INGRESS = [
    # who, in the same namespace, port, reaches
    (CHART, False, 8265, True),
    (KUSTOMIZE, False, 8265, True),
    (OWN_OPERATOR, False, 8265, True),
    (CHART, False, 6379, False),
    (OTHER_TRAINING, True, 8265, False),
    (OTHER_TRAINING, True, 6379, False),
    (OTHER_TRAINING, True, 10001, False),
    (OTHER_RAY, True, 8265, False),
    (PROMETHEUS, False, 8080, True),
    (PROMETHEUS, False, 8265, False),
]


def matches(selector: dict, labels: dict[str, str]) -> bool:
    for wanted in selector.get("matchExpressions", ()):
        assert wanted["operator"] == "In"
        if labels.get(wanted["key"]) not in wanted["values"]:
            return False
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())


def peered(peers: list[dict] | None, labels: dict[str, str], *, same_namespace: bool) -> bool:
    if peers is None:
        return True
    return any(
        (same_namespace or "namespaceSelector" in peer) and matches(peer.get("podSelector", {}), labels)
        for peer in peers
    )


def reaches(policy: dict, way: str, labels: dict[str, str], port: int, *, same_namespace: bool) -> bool:
    side = {"ingress": "from", "egress": "to"}[way]
    return any(
        peered(rule.get(side), labels, same_namespace=same_namespace)
        and ("ports" not in rule or port in [entry["port"] for entry in rule["ports"]])
        for rule in policy["spec"][way]
    )


@pytest.fixture
def policy(make_training):
    return network_policy.build(make_training())


@pytest.fixture
def labels(make_training):
    """Labels of a pool's pod."""
    return lambda pool: pods.template(make_training(), Settings(), pool, 1)["metadata"]["labels"]


@pytest.mark.parametrize("pool", ["head", "rollout", "train"])
def test_every_pod_of_the_training_is_selected(pool, policy, labels):
    assert matches(policy["spec"]["podSelector"], labels(pool))
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]


@pytest.mark.parametrize("port", [6379, 8265, 10001, 29500, 61000])
@pytest.mark.parametrize("way", ["ingress", "egress"])
def test_pods_of_the_training_talk_to_each_other(way, port, policy, labels):
    assert reaches(policy, way, labels("train"), port, same_namespace=True)


def test_a_training_of_the_same_name_elsewhere_is_another(policy, labels):
    assert not reaches(policy, "ingress", labels("train"), 6379, same_namespace=False)


@pytest.mark.parametrize(("who", "same_namespace", "port", "reached"), INGRESS)
def test_from_outside_only_what_is_listed_gets_in(who, same_namespace, port, reached, policy):
    assert reaches(policy, "ingress", who, port, same_namespace=same_namespace) == reached


@pytest.mark.parametrize(
    ("port", "reached"),
    [(53, True), (5353, True), (443, True), (6443, True), (80, False), (22, False), (5432, False), (8265, False)],
)
def test_to_the_outside_only_names_and_https(port, reached, policy):
    assert reaches(policy, "egress", {}, port, same_namespace=False) == reached


def test_other_selectors_do_not_match_pods_of_a_training(labels):
    for pool in ("head", "rollout", "train"):
        assert labels(pool)["app.kubernetes.io/component"] == pool, "kuberay-operator would open the dashboard to it"

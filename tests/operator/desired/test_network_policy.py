"""The connections that the policy allows, computed from the object as a network plugin does."""

import pytest

from qwen35_operator.desired import network_policy, pod_templates
from qwen35_operator.operator_settings import KUBERAY_NAMESPACE, OperatorSettings
from tests.reach import Outside, Pod, matches, may_reach

CHART = {"app.kubernetes.io/name": "kuberay-operator"}
KUSTOMIZE = {"app.kubernetes.io/name": "kuberay", "app.kubernetes.io/component": "kuberay-operator"}
OWN_OPERATOR = {"app.kubernetes.io/name": "qwen35-operator"}
OTHER_TRAINING = {"rl.qwen35.io/training": "other", "app.kubernetes.io/name": "qwen35"}
OTHER_RAY = {"app.kubernetes.io/name": "kuberay", "ray.io/node-type": "head"}
PROMETHEUS = {"app.kubernetes.io/name": "prometheus"}

OWN, ELSEWHERE = None, "elsewhere"

INGRESS = [
    # labels, namespace, port, reached
    (CHART, KUBERAY_NAMESPACE, 8265, True),
    (KUSTOMIZE, KUBERAY_NAMESPACE, 8265, True),
    (CHART, KUBERAY_NAMESPACE, 6379, False),
    ({"app": "notebook"}, KUBERAY_NAMESPACE, 8265, False),
    (CHART | KUSTOMIZE, ELSEWHERE, 8265, False),
    (CHART | KUSTOMIZE, OWN, 8265, False),
    (OWN_OPERATOR, ELSEWHERE, 8265, False),
    (OTHER_TRAINING, OWN, 8265, False),
    (OTHER_TRAINING, OWN, 6379, False),
    (OTHER_TRAINING, OWN, 10001, False),
    (OTHER_RAY, OWN, 8265, False),
    (PROMETHEUS, ELSEWHERE, 8080, True),
    (PROMETHEUS, ELSEWHERE, 8265, False),
]


@pytest.fixture
def policy(make_training):
    return network_policy.build(make_training(), OperatorSettings())


@pytest.fixture
def labels(make_training):
    """Labels of a pool's pod."""
    return lambda pool: pod_templates.template(make_training(), "trainer:1", pool, 1)["metadata"]["labels"]


@pytest.mark.parametrize("pool", ["head", "rollout", "train"])
def test_every_pod_of_the_training_is_selected(pool, policy, labels):
    assert matches(policy["spec"]["podSelector"], labels(pool))
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]


@pytest.fixture
def member(policy, labels):
    """A pod of the training."""
    return Pod(policy["metadata"]["namespace"], labels("train"))


@pytest.mark.parametrize("port", [6379, 8265, 10001, 29500, 61000])
def test_pods_of_the_training_talk_to_each_other(port, policy, member):
    assert may_reach([policy], member, member, port)


def test_a_training_of_the_same_name_elsewhere_is_another(policy, member):
    assert not may_reach([policy], Pod("elsewhere", member.labels), member, 6379)


@pytest.mark.parametrize(("who", "namespace", "port", "reached"), INGRESS)
def test_from_outside_only_what_is_listed_gets_in(who, namespace, port, reached, policy, member):
    source = Pod(namespace or member.namespace, who)
    assert may_reach([policy], source, member, port) == reached


def test_kuberay_gets_in_from_the_namespaces_of_the_settings_only(make_training, member):
    policy = network_policy.build(make_training(), OperatorSettings(kuberay_namespaces=("ray", "default")))
    for namespace, reached in {"ray": True, "default": True, KUBERAY_NAMESPACE: False, member.namespace: False}.items():
        for labels in (CHART, KUSTOMIZE):
            assert may_reach([policy], Pod(namespace, labels), member, 8265) == reached


@pytest.mark.parametrize(
    ("port", "protocol", "reached"),
    [
        (53, "UDP", True),
        (53, "TCP", True),
        (5353, "UDP", True),
        (443, "TCP", True),
        (443, "UDP", False),
        (6443, "TCP", True),
        (80, "TCP", False),
        (22, "TCP", False),
        (5432, "TCP", False),
        (8265, "TCP", False),
    ],
)
@pytest.mark.parametrize("target", [Pod("elsewhere"), Outside()], ids=["pod", "outside"])
def test_to_the_outside_only_names_and_https(target, port, protocol, reached, policy, member):
    assert may_reach([policy], member, target, port, protocol) == reached


def test_other_selectors_do_not_match_pods_of_a_training(labels):
    for pool in ("head", "rollout", "train"):
        assert labels(pool)["app.kubernetes.io/component"] == pool, "kuberay-operator would open the dashboard to it"

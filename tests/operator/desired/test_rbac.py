"""What the trainer's account may do, asked as the API server would."""

import pytest

from qwen35_operator.desired import pods, rbac
from qwen35_operator.settings import Settings

ALLOWED = {
    "demo-progress": {"get", "patch", "update"},
    "demo-history": {"patch"},
    "demo-control": {"get", "list", "watch"},
    "demo-config": {"get"},
}
VERBS = ("get", "list", "watch", "create", "update", "patch", "delete", "deletecollection")


@pytest.mark.parametrize("resource", ["configmaps", "secrets", "pods"])
@pytest.mark.parametrize("name", [*ALLOWED, "demo", "other-progress", ""])
@pytest.mark.parametrize("verb", VERBS)
def test_only_these_may_be_touched(verb, name, resource, make_training):
    _, role, _ = rbac.build(make_training())
    may = any(
        verb in rule["verbs"] and resource in rule["resources"] and name in rule["resourceNames"]
        for rule in role["rules"]
    )
    assert may == (resource == "configmaps" and verb in ALLOWED.get(name, ()))


def test_the_account_of_the_binding_is_that_of_the_head(make_training):
    training = make_training()
    account, role, binding = rbac.build(training)
    head = pods.template(training, Settings(), "head", 1)["spec"]
    assert head["serviceAccountName"] == account["metadata"]["name"] == binding["subjects"][0]["name"]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"][0]["namespace"] == "rl"


@pytest.mark.parametrize("pool", ["rollout", "train"])
def test_a_worker_has_no_token(pool, make_training):
    spec = pods.template(make_training(), Settings(), pool, 1)["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert "serviceAccountName" not in spec

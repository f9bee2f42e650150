"""What the trainer's account may do: all of it, as a table. That the API server reads it so: tests/controlplane."""

import itertools

import pytest

from qwen35_operator.desired import pod_templates, rbac

ALLOWED = {
    "demo-progress": {"patch"},
    "demo-history": {"patch"},
    "demo-control": {"list", "watch"},
}


def test_only_these_may_be_touched(make_training):
    """The rules as a whole, whatever their order: no wildcard, no other group, and no rule without names."""
    _, role, _ = rbac.build(make_training())
    assert role["kind"] == "Role"
    granted = []
    for rule in role["rules"]:
        assert rule.keys() == {"apiGroups", "resources", "resourceNames", "verbs"}
        granted += itertools.product(rule["apiGroups"], rule["resources"], rule["resourceNames"], rule["verbs"])
    expected = {("", "configmaps", name, verb) for name, verbs in ALLOWED.items() for verb in verbs}
    assert set(granted) == expected


def test_the_account_of_the_binding_is_that_of_the_head(make_training):
    training = make_training()
    account, role, binding = rbac.build(training)
    head = pod_templates.template(training, "trainer:1", "head", 1)["spec"]
    assert head["serviceAccountName"] == account["metadata"]["name"] == binding["subjects"][0]["name"]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"][0]["namespace"] == "rl"


@pytest.mark.parametrize("pool", ["rollout", "train"])
def test_a_worker_has_no_token(pool, make_training):
    spec = pod_templates.template(make_training(), "trainer:1", pool, 1)["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert "serviceAccountName" not in spec

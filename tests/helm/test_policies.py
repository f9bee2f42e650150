"""The admission policies of the chart as rendered. tests/controlplane runs them in an API server: nothing else evaluates CEL."""

from typing import Any

import pytest
import yaml

from tests.controlplane.pod_security_cases import CONTROLS
from tests.helm.conftest import CHART, NAMESPACE, Objects, Refused, Render

NAME = "demo-qwen35-operator"
CHECKS = {
    "Baseline": {
        *("appArmorProfile", "capabilities_baseline", "hostNamespaces", "hostPathVolumes", "hostPorts"),
        *("hostProbesAndHostLifecycle", "privileged", "procMount", "seccompProfile_baseline", "seLinuxOptions"),
        *("sysctls", "windowsHostProcess"),
    },
    "Restricted": {
        *("allowPrivilegeEscalation", "capabilities_restricted", "restrictedVolumes", "runAsNonRoot", "runAsUser"),
        "seccompProfile_restricted",
    },
}
"""The checks of k8s.io/pod-security-admission v0.35, by level, but for procMount_restricted: it refuses what our procMount refuses."""
UNCONFINED = {
    ("", "events"): "an event changes nothing",
    ("rl.qwen35.io", "qwen35trainings/status"): "only the operator writes a status",
    ("rl.qwen35.io", "qwen35trainings/finalizers"): "never requested",
}
"""What the operator's account may write and its policy does not check, and why."""


def policies(objects: Objects) -> dict[str, dict[str, Any]]:
    return {item["metadata"]["name"]: item for item in objects if item["kind"] == "ValidatingAdmissionPolicy"}


def bindings(objects: Objects) -> dict[str, dict[str, Any]]:
    return {item["metadata"]["name"]: item for item in objects if item["kind"] == "ValidatingAdmissionPolicyBinding"}


def variable(policy: dict[str, Any], name: str) -> str:
    (expression,) = (item["expression"] for item in policy["spec"]["variables"] if item["name"] == name)
    return str(expression)


def test_both_policies_deny_unless_values_disable_them(render: Render):
    objects = render()
    assert set(policies(objects)) == set(bindings(objects)) == {f"{NAME}-pod-security", f"{NAME}-account"}
    assert all(policy["spec"]["failurePolicy"] == "Fail" for policy in policies(objects).values())
    for name, binding in bindings(objects).items():
        assert binding["spec"] == {"policyName": name, "validationActions": ["Deny"]}
    assert set(policies(render("podSecurity.enabled=false"))) == {f"{NAME}-account"}
    assert set(policies(render("accountPolicy.enabled=false"))) == {f"{NAME}-pod-security"}
    neither = render("podSecurity.enabled=false", "accountPolicy.enabled=false")
    assert policies(neither) == bindings(neither) == {}


@pytest.mark.parametrize("level", ["Restricted", "Baseline", "Privileged"])
def test_the_level_of_the_values_holds_in_namespaces_without_a_label(render: Render, level: str):
    policy = policies(render(f'podSecurity.level="{level}"'))[f"{NAME}-pod-security"]
    expression = variable(policy, "level")
    assert f"orValue('{level.lower()}')" in expression
    assert "labels[?'rl.qwen35.io/pod-security']" in expression


def test_the_default_level_is_baseline_and_others_are_refused(render: Render):
    assert policies(render()) == policies(render('podSecurity.level="Baseline"'))
    with pytest.raises(Refused, match="podSecurity/level"):
        render('podSecurity.level="Any"')


def test_a_release_for_some_namespaces_checks_trainings_of_these_only(render: Render):
    bound = bindings(render('watchNamespaces=["a","b"]'))[f"{NAME}-pod-security"]["spec"]["matchResources"]
    (expression,) = bound["namespaceSelector"]["matchExpressions"]
    assert expression == {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["a", "b"]}


def test_every_control_of_the_standards_has_an_expression_and_cases(render: Render):
    controls = yaml.safe_load((CHART / "files" / "pod-security.yaml").read_text())
    for level, names in CHECKS.items():
        assert {control["id"] for control in controls if control["level"] == level} == names
        assert {control.id for control in CONTROLS if control.level == level} == names
    policy = policies(render())[f"{NAME}-pod-security"]["spec"]
    assert len(policy["validations"]) == len(controls) == len(CONTROLS)
    skipped = {"Baseline": "== 'privileged'", "Restricted": "in ['privileged', 'baseline']"}
    for control, validation in zip(controls, policy["validations"], strict=True):
        skips = skipped[control["level"]]
        assert validation["expression"] == f"variables.level {skips} || variables.{control['id']}.size() == 0"
        assert variable({"spec": policy}, control["id"]) == control["violations"]
        # The texts are in single quotes in the expression of the message.
        assert "'" not in control["control"] + control["fix"]
        assert control["fix"] in validation["message"]
        assert control["fix"] in validation["messageExpression"]


def test_every_pool_of_spec_pods_is_checked(render: Render):
    policy = policies(render())[f"{NAME}-pod-security"]
    for pool in ("head", "rollout", "train"):
        assert variable(policy, pool) == f"object.spec.?pods.?{pool}.?spec.orValue({{}})"
        assert f"variables.{pool}" in variable(policy, "specs")
        for name, part in (("containers", "containers"), ("containers", "initContainers"), ("volumes", "volumes")):
            assert f"variables.{pool}.?{part}.orValue([])" in variable(policy, name)
        assert f"?object.spec.?pods.?{pool}.?metadata.?annotations" in variable(policy, "annotations")


@pytest.mark.parametrize(
    "changes", [[], ['serviceAccount={"create":true,"name":"mine"}'], ["serviceAccount.create=false"]]
)
def test_the_account_that_is_confined_is_the_one_that_the_pod_runs_as(render: Render, changes: list[str]):
    objects = render(*changes)
    (deployment,) = (item for item in objects if item["kind"] == "Deployment")
    account = deployment["spec"]["template"]["spec"]["serviceAccountName"]
    (condition,) = policies(objects)[f"{NAME}-account"]["spec"]["matchConditions"]
    assert condition["expression"] == f"request.userInfo.username == 'system:serviceaccount:{NAMESPACE}:{account}'"


def test_everything_that_the_account_may_write_is_confined(render: Render):
    operations = {"create": "CREATE", "update": "UPDATE", "patch": "UPDATE", "delete": "DELETE"}
    granted = {
        (group, resource, operations[verb])
        for rule in yaml.safe_load((CHART / "files" / "rules.yaml").read_text())
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
        if verb in operations
    }
    confined = {
        (group, resource, operation)
        for rule in policies(render())[f"{NAME}-account"]["spec"]["matchConstraints"]["resourceRules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for operation in rule["operations"]
    }
    assert {(group, resource) for group, resource, _ in granted - confined} == set(UNCONFINED)

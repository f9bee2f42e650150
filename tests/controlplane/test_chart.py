"""The chart on a real API server: Helm installs it, admission lets its pod pass, and its account can do the work and nothing else."""

import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from qwen35_operator.desired.object_names import LAST_CHECKPOINT
from tests.controlplane import chart_release, operator_process
from tests.controlplane.chart_release import Release
from tests.controlplane.live_training import MERGE, LiveTraining
from tests.controlplane.operator_process import RBAC, OperatorProcess
from tests.helm.conftest import CHART
from tests.patience import PATIENCE
from tests.testbed.api import Api, Refused
from tests.testbed.control_plane import ControlPlane

SCRAPER = "prometheus"


@pytest.fixture(scope="module")
def release(control_plane: ControlPlane) -> Iterator[Release]:
    with chart_release.installed(control_plane, "replicas=2") as installed:
        yield installed


@pytest.fixture(scope="module")
def account(release: Release) -> Api:
    """The API server as the operator's account sees it, once the chart's policy confines the account."""
    api = release.api_of(release.operator)
    until(
        lambda: "with the operator's labels" in (refusal(api, "POST", config_maps(release), STRAY) or ""),
        "the policy acts",
    )
    return api


@pytest.fixture(scope="module")
def operator(release: Release, account: Api) -> Iterator[OperatorProcess]:
    """An operator with the token of the chart's account: what the chart does not grant, it has not."""
    allow_to_scrape(release)
    with operator_process.running(
        release.plane,
        release.kubeconfig_of(release.operator),
        f"--lease-namespace={release.namespace}",
        f"--lease-name={release.operator}",
        "--metrics-authentication",
        name="chart-operator",
    ) as running:
        yield replace(running, metrics_token=release.token(SCRAPER))


def allow_to_scrape(release: Release) -> None:
    """Bind an account to the ClusterRole for readers of the metrics, as the documentation says."""
    accounts = f"/api/v1/namespaces/{release.namespace}/serviceaccounts"
    release.plane.api.post(accounts, {"metadata": {"name": SCRAPER}})
    subject = {"kind": "ServiceAccount", "name": SCRAPER, "namespace": release.namespace}
    role = {"apiGroup": RBAC, "kind": "ClusterRole", "name": f"{release.operator}-metrics-reader"}
    binding = {"metadata": {"name": release.namespace}, "roleRef": role, "subjects": [subject]}
    release.plane.api.post(f"/apis/{RBAC}/v1/clusterrolebindings", binding)


def until(holds: Callable[[], object], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.1)


def refusal(api: Api, method: str, path: str, body: Any, *, content: str = "application/json") -> str | None:
    """Why the API server refuses a request, which it does not carry out; None if it would."""
    try:
        api.request(method, f"{path}?dryRun=All", body, content=content)
    except Refused as refused:
        if refused.status != 403:
            raise
        return refused.message
    return None


STRAY = {"metadata": {"name": "stray"}}


def config_maps(release: Release) -> str:
    return f"/api/v1/namespaces/{release.namespace}/configmaps"


def test_its_pods_are_admitted_where_the_restricted_standard_is_enforced(release: Release):
    until = time.monotonic() + PATIENCE
    pods = f"/api/v1/namespaces/{release.namespace}/pods"
    while len(release.plane.api.get(pods)["items"]) < 2:
        assert time.monotonic() < until, release.plane.kubectl("-n", release.namespace, "get", "events")
        time.sleep(0.2)
    warnings = release.plane.kubectl("-n", release.namespace, "get", "events", "--field-selector=type=Warning")
    assert "PodSecurity" not in warnings


def test_helm_says_what_to_do_next(release: Release):
    assert "kubectl apply -f examples/tiny-grpo.yaml" in release.helm("get", "notes", release.name)


def test_an_upgrade_with_the_same_values_changes_nothing(release: Release):
    before = release.helm("get", "manifest", release.name)
    release.helm("upgrade", release.name, str(CHART), "--reuse-values")
    assert release.helm("get", "manifest", release.name) == before


def test_the_account_of_the_chart_can_do_all_that_a_training_needs(
    release: Release, operator: OperatorProcess, namespace: str
):
    """Create, scale, repair, suspend, resume and delete, while the chart's policy confines the account."""
    before = operator.refused_requests()
    live_training = LiveTraining(release.plane, namespace)
    live_training.apply(checkpoint={"graceSeconds": 2}, disruptionBudget="HeadAndTrain")
    live_training.patch(live_training.path("qwen35trainings"), {"metadata": {"finalizers": [LAST_CHECKPOINT]}})
    live_training.until_condition("Accepted", "True", "Accepted")
    live_training.until_pods("rollout", 2)
    live_training.report()
    live_training.until_condition("Ready", "True", "Running")
    live_training.scale(3)
    live_training.until_pods("rollout", 3)
    strip = {"metadata": {"labels": {"rl.qwen35.io/training": None}}, "spec": {"ingress": [{}]}}
    live_training.patch(live_training.path("networkpolicies"), strip)
    live_training.until(lambda: live_training.mine("networkpolicies"), "the policy has its label again")
    live_training.until(lambda: live_training.mine("poddisruptionbudgets"), "there is a budget")
    live_training.edit(suspend=True)
    live_training.until_state("Suspended")
    live_training.until(lambda: not live_training.mine("poddisruptionbudgets"), "the budget is gone")
    live_training.edit(suspend=False)
    live_training.until_job(2)
    live_training.delete()
    live_training.until(lambda: live_training.find("qwen35trainings", "demo") is None, "it is gone")
    assert operator.readiness() == (200, "ok")
    assert operator.refused_requests() == before
    assert "denied request" not in operator.log


def test_the_account_of_the_chart_can_write_nothing_else(
    release: Release, account: Api, operator: OperatorProcess, namespace: str
):
    """What RBAC cannot tell apart: objects of others, other fields of RayClusters, and specs."""
    live_training = LiveTraining(release.plane, namespace).apply(disruptionBudget="HeadAndTrain")
    live_training.until_pods("train", 1)
    live_training.until(lambda: live_training.mine("poddisruptionbudgets"), "there is a budget")
    budgets = live_training.path("poddisruptionbudgets", None)
    budget = copy_of(live_training.mine("poddisruptionbudgets")[0], "demo-other")
    assert refusal(account, "POST", budgets, budget) is None
    everything = {"minAvailable": 1000, "selector": {}}
    assert "select pods of their training" in (refusal(account, "POST", budgets, budget | {"spec": everything}) or "")
    cluster = live_training.cluster()
    assert cluster is not None
    path = live_training.path("rayclusters", cluster["metadata"]["name"])
    groups = cluster["spec"]["workerGroupSpecs"]
    (index,) = (place for place, group in enumerate(groups) if group["groupName"] == "rollout")
    resize, image = (
        [{"op": "replace", "path": f"/spec/workerGroupSpecs/{index}/{field}", "value": value}]
        for field, value in (("replicas", 3), ("template/spec/containers/0/image", "mine"))
    )
    steps = "application/json-patch+json"
    assert refusal(account, "PATCH", path, resize, content=steps) is None
    assert "only the sizes of worker groups" in (refusal(account, "PATCH", path, image, content=steps) or "")
    release.plane.api.post(live_training.path("configmaps", None), STRAY)
    stray = live_training.path("configmaps", "stray")
    change, only = {"data": {"key": "value"}}, "whose owner is a Qwen35Training"
    assert refusal(account, "PATCH", live_training.path("configmaps", "demo-config"), change, content=MERGE) is None
    assert only in (refusal(account, "PATCH", stray, change, content=MERGE) or "")
    assert only in (refusal(account, "DELETE", stray, None) or "")
    cluster_wide = "/api/v1/namespaces/kube-system/configmaps/extension-apiserver-authentication"
    assert only in (refusal(account, "PATCH", cluster_wide, change, content=MERGE) or "")
    default = live_training.path("serviceaccounts", "default")
    role = {"metadata": {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/mine"}}}
    assert only in (refusal(account, "PATCH", default, role, content=MERGE) or "")
    own = live_training.path("qwen35trainings")
    assert "only finalizers" in (refusal(account, "PATCH", own, {"spec": {"suspend": True}}, content=MERGE) or "")
    assert refusal(release.plane.api, "PATCH", stray, change, content=MERGE) is None


def test_the_account_of_the_chart_gives_its_rights_to_no_other_account(
    release: Release, account: Api, operator: OperatorProcess, namespace: str
):
    """Roles, RoleBindings and pods of RayJobs would be a way around the policy, which is about one account only."""
    live_training = LiveTraining(release.plane, namespace).apply()
    live_training.until_job(1)
    job = live_training.find("rayjobs", "demo-1")
    role, binding = (
        copy_of(live_training.find(plural, "demo-trainer"), "demo-other") for plural in ("roles", "rolebindings")
    )
    roles, bindings, jobs = (live_training.path(plural, None) for plural in ("roles", "rolebindings", "rayjobs"))
    assert refusal(account, "POST", roles, role) is None
    rule = {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["list", "watch"]}
    assert "on ConfigMaps by name" in (refusal(account, "POST", roles, role | {"rules": [rule]}) or "")
    assert refusal(account, "POST", bindings, binding) is None
    thief = [{"kind": "ServiceAccount", "name": "thief", "namespace": namespace}]
    assert "of the same training" in (refusal(account, "POST", bindings, binding | {"subjects": thief}) or "")
    elsewhere = [binding["subjects"][0] | {"namespace": "kube-system"}]
    assert "of the same training" in (refusal(account, "POST", bindings, binding | {"subjects": elsewhere}) or "")

    def changed(**pod: object) -> dict[str, Any]:
        body = copy_of(job, "demo-other")
        body["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"] |= pod
        return body

    assert refusal(account, "POST", jobs, changed()) is None
    for pod in ({"serviceAccountName": "thief"}, {"hostNetwork": True}, {"hostPID": True}):
        assert "no namespace of the node" in (refusal(account, "POST", jobs, changed(**pod)) or "")
    submitter = changed()
    submitter["spec"] |= {"submissionMode": "K8sJobMode", "submitterPodTemplate": {"spec": {"containers": []}}}
    assert "no namespace of the node" in (refusal(account, "POST", jobs, submitter) or "")


def copy_of(body: dict[str, Any] | None, name: str) -> dict[str, Any]:
    """The object under another name, as a client would create it. The operator does not know it."""
    assert body is not None
    kept = {
        key: body["metadata"][key] for key in ("labels", "ownerReferences", "annotations") if key in body["metadata"]
    }
    fields = {key: value for key, value in body.items() if key != "status"}
    return deepcopy({**fields, "metadata": {"name": name, **kept}})


def test_metrics_need_a_token_whose_account_may_read_them(release: Release, operator: OperatorProcess):
    assert operator.scrape(None)[0] == operator.scrape("invented")[0] == 401
    status, message = operator.scrape(release.token("default"))
    assert status == 403
    assert f"system:serviceaccount:{release.namespace}:default may not get /metrics" in message
    status, text = operator.scrape(release.token(SCRAPER))
    assert status == 200
    assert 'qwen35_api_requests_total{code="201",resource="tokenreviews",verb="POST"}' in text
    assert operator.readiness()[0] in (200, 503)

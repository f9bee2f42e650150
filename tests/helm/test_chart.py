"""The chart: what it installs, for which values, and what it refuses."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from images.definition import definition
from qwen35_trainer import __version__
from tests.helm.conftest import CHART, NAMESPACE, Objects, Refused, Render

CRD = Path(__file__).parents[2] / "crds" / "rl.qwen35.io_qwen35trainings.yaml"


def of(objects: Objects, kind: str) -> Objects:
    return [manifest for manifest in objects if manifest["kind"] == kind]


def arguments(objects: Objects) -> list[str]:
    (deployment,) = of(objects, "Deployment")
    return deployment["spec"]["template"]["spec"]["containers"][0]["args"]


def test_the_definition_is_the_one_in_crds(render: Render):
    (rendered,) = of(render(), "CustomResourceDefinition")
    original = yaml.safe_load(CRD.read_text())
    assert rendered["spec"] == original["spec"]
    assert rendered["metadata"]["name"] == original["metadata"]["name"]
    assert (CHART / "files" / "crd.yaml").read_text() == CRD.read_text()


def test_the_definition_outlives_the_release_unless_values_say_otherwise(render: Render):
    (kept,) = of(render(), "CustomResourceDefinition")
    (gone,) = of(render("crds.keep=false"), "CustomResourceDefinition")
    assert kept["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert "annotations" not in gone["metadata"]
    assert of(render("crds.enabled=false"), "CustomResourceDefinition") == []


def test_everything_is_named_after_the_release_and_labelled_alike(render: Render):
    objects = [manifest for manifest in render() if manifest["kind"] != "CustomResourceDefinition"]
    assert all(manifest["metadata"]["name"].startswith("demo-qwen35-operator") for manifest in objects)
    labels = {manifest["metadata"]["labels"]["app.kubernetes.io/instance"] for manifest in render()}
    assert labels == {"demo"}
    named = [item["metadata"]["name"] for item in of(render(release="qwen35-operator"), "Deployment")]
    assert named == ["qwen35-operator"]


@pytest.mark.parametrize(
    ("version", "label"),
    [
        ("0.1.0+abc", "qwen35-operator-0.1.0_abc"),
        ("0.1.0+" + "a" * 40 + "-b", "qwen35-operator-0.1.0_" + "a" * 40),
        ("0.1.0+" + "a" * 40 + ".b", "qwen35-operator-0.1.0_" + "a" * 40),
    ],
)
def test_the_label_of_the_chart_is_valid_although_its_version_has_build_metadata(
    render: Render, tmp_path, version, label
):
    copy = shutil.copytree(CHART, tmp_path / "chart")
    text = (copy / "Chart.yaml").read_text()
    (copy / "Chart.yaml").write_text(re.sub(r"^version: .*$", f"version: {version}", text, flags=re.MULTILINE))
    objects = render(chart=copy)
    labels = [manifest["metadata"]["labels"] for manifest in objects]
    labels += [manifest["spec"]["template"]["metadata"]["labels"] for manifest in of(objects, "Deployment")]
    assert {each["helm.sh/chart"] for each in labels} == {label}


def test_without_namespaces_there_is_one_cluster_role_and_with_them_a_role_in_each(render: Render):
    rules, cluster_rules = (
        yaml.safe_load((CHART / "files" / name).read_text()) for name in ("rules.yaml", "cluster-rules.yaml")
    )
    everywhere = render("rbac.aggregate=false", "metrics.authentication=false")
    assert [role["rules"] for role in of(everywhere, "ClusterRole")] == [[*rules, *cluster_rules]]
    assert len(of(everywhere, "ClusterRoleBinding")) == 1
    named = render('watchNamespaces=["a","b"]', "rbac.aggregate=false", "metrics.authentication=false")
    assert of(named, "ClusterRole") == of(named, "ClusterRoleBinding") == []
    elsewhere = [role for role in of(named, "Role") if role["metadata"]["namespace"] != NAMESPACE]
    assert {role["metadata"]["namespace"]: role["rules"] for role in elsewhere} == {"a": rules, "b": rules}
    assert [argument for argument in arguments(named) if "--namespace" in argument] == [
        "--namespace=a",
        "--namespace=b",
    ]


def test_bindings_name_the_account_that_the_pod_runs_as(render: Render):
    for changes in ([], ['serviceAccount={"create":true,"name":"mine"}'], ["serviceAccount.create=false"]):
        objects = render(*changes)
        (deployment,) = of(objects, "Deployment")
        account = deployment["spec"]["template"]["spec"]["serviceAccountName"]
        bindings = of(objects, "ClusterRoleBinding") + of(objects, "RoleBinding")
        assert {(subject["name"], subject["namespace"]) for binding in bindings for subject in binding["subjects"]} == {
            (account, NAMESPACE)
        }
        assert [service_account["metadata"]["name"] for service_account in of(objects, "ServiceAccount")] in (
            [account],
            [],
        )


def test_the_lease_is_in_the_operators_namespace_and_no_other_may_be_changed(render: Render):
    objects = render()
    assert {"--lease-namespace=qwen35-system", "--lease-name=demo-qwen35-operator"} <= set(arguments(objects))
    (role,) = of(objects, "Role")
    assert role["rules"][1] == {
        "apiGroups": ["coordination.k8s.io"],
        "resources": ["leases"],
        "resourceNames": ["demo-qwen35-operator"],
        "verbs": ["get", "update"],
    }


def test_kuberay_is_admitted_from_the_namespaces_of_the_values(render: Render):
    assert "--kuberay-namespace=kuberay-system" in arguments(render())
    chosen = [each for each in arguments(render('kuberay={"namespaces":["ray","default"]}')) if "kuberay" in each]
    assert chosen == ["--kuberay-namespace=ray", "--kuberay-namespace=default"]


def test_the_lease_itself_is_the_operators_alone(render: Render):
    """If the chart contained the Lease, applying the chart again would take it from the leader, and two would lead."""
    assert not of(render(), "Lease")


def test_the_pod_keeps_to_the_restricted_standard(render: Render):
    (deployment,) = of(render(), "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    assert pod["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "runAsGroup": 65532,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert pod["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_the_platform_may_choose_the_pods_user(render: Render):
    """As OpenShift does: its SecurityContextConstraints refuse a pod that names another user than those of its namespace."""
    (deployment,) = of(render("podSecurityContext.runAsUser=null", "podSecurityContext.runAsGroup=null"), "Deployment")
    assert deployment["spec"]["template"]["spec"]["securityContext"] == {
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def test_reused_values_of_a_release_without_the_pods_security_context_keep_its_user(render: Render):
    """What `helm upgrade --reuse-values` gives."""
    (reused,), (fresh,) = (of(render(*changes), "Deployment") for changes in (["podSecurityContext=null"], []))
    assert (
        reused["spec"]["template"]["spec"]["securityContext"]
        == fresh["spec"]["template"]["spec"]["securityContext"]
        != {}
    )


def test_the_pod_runs_on_nodes_for_which_there_is_an_image_unless_values_say_otherwise(render: Render):
    def selector(*changes: str) -> object:
        (deployment,) = of(render(*changes), "Deployment")
        return deployment["spec"]["template"]["spec"].get("nodeSelector")

    (architecture,) = definition("operator").architectures
    assert selector() == {"kubernetes.io/arch": architecture}
    assert selector('nodeSelector={"pool":"system"}') == {"kubernetes.io/arch": architecture, "pool": "system"}
    assert selector('nodeSelector={"kubernetes.io/arch":null}') is None


def test_the_image_is_of_this_version_unless_a_tag_is_given(render: Render):
    (deployment,) = of(render(), "Deployment")
    (other,) = of(render('image={"repository":"mirror/operator","tag":"x"}'), "Deployment")
    images = [item["spec"]["template"]["spec"]["containers"][0]["image"] for item in (deployment, other)]
    assert images == [f"ghcr.io/qwen35/operator:{__version__}", "mirror/operator:x"]


def test_the_image_is_pinned_by_a_digest_if_one_is_given(render: Render):
    digest = "sha256:" + "a" * 64
    (deployment,) = of(render(f'image.digest="{digest}"'), "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["image"] == f"ghcr.io/qwen35/operator:{__version__}@{digest}"


def test_trainer_images_in_the_values_reach_the_operator(render: Render):
    images = [
        argument for argument in arguments(render('trainerImages.CPU="mine:1"')) if argument.startswith("--image")
    ]
    assert images == ["--image=CPU=mine:1"]


def test_several_replicas_are_spread_and_disrupted_one_at_a_time(render: Render):
    assert of(render(), "PodDisruptionBudget") == []
    objects = render("replicas=2")
    budget = of(objects, "PodDisruptionBudget")[0]["spec"]
    assert budget["maxUnavailable"] == 1
    assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow", "a pod that is not ready must not hold up a drain"
    (deployment,) = of(objects, "Deployment")
    assert deployment["spec"]["template"]["spec"]["topologySpreadConstraints"][0]["maxSkew"] == 1


def test_a_service_monitor_comes_only_when_it_is_asked_for(render: Render):
    assert of(render(), "ServiceMonitor") == []
    (monitor,) = of(render("metrics.serviceMonitor.enabled=true"), "ServiceMonitor")
    token = "/var/run/secrets/kubernetes.io/serviceaccount/token"
    assert monitor["spec"]["endpoints"] == [{"port": "metrics", "interval": "30s", "bearerTokenFile": token}]
    (open_monitor,) = of(
        render("metrics.serviceMonitor.enabled=true", "metrics.authentication=false"), "ServiceMonitor"
    )
    assert open_monitor["spec"]["endpoints"] == [{"port": "metrics", "interval": "30s"}]


def test_metrics_need_a_token_unless_values_say_otherwise_and_only_then_may_the_operator_review_tokens(render: Render):
    def described(*changes: str) -> tuple[bool, dict[str, object]]:
        objects = render(*changes)
        names = {item["metadata"]["name"]: item.get("rules") for item in of(objects, "ClusterRole")}
        bound = {item["roleRef"]["name"] for item in of(objects, "ClusterRoleBinding")}
        roles = {name: rules for name, rules in names.items() if "metrics" in name}
        assert {name for name in bound if "metrics" in name} == {name for name in roles if name.endswith("-auth")}
        return "--metrics-authentication" in arguments(objects), roles

    reviews = yaml.safe_load((CHART / "files" / "metrics-rules.yaml").read_text())
    roles = {
        "demo-qwen35-operator-metrics-auth": reviews,
        "demo-qwen35-operator-metrics-reader": [{"nonResourceURLs": ["/metrics"], "verbs": ["get"]}],
    }
    assert described() == (True, roles)
    assert described('watchNamespaces=["a"]') == (True, roles)
    assert described("metrics.authentication=false") == (False, {})
    assert described("rbac.create=false") == (True, {})
    other_rules = [role["rules"] for role in of(render(), "ClusterRole") if "metrics" not in role["metadata"]["name"]]
    assert not any(rule["apiGroups"] == ["authentication.k8s.io"] for rules in other_rules for rule in rules)


def test_values_name_who_may_connect_to_the_metrics_and_probes_stay_open(render: Render):
    def ingress(*changes: str) -> list[dict[str, Any]]:
        (policy,) = of(render(*changes), "NetworkPolicy")
        return policy["spec"]["ingress"]

    metrics, health = [{"port": "metrics"}], [{"port": "health"}]
    assert ingress() == [{"ports": metrics}, {"ports": health}]
    peer = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    named = ingress(f"networkPolicy.metricsFrom=[{json.dumps(peer)}]")
    assert named == [{"ports": metrics, "from": [peer]}, {"ports": health}]


def test_metrics_are_served_over_https_with_the_certificate_of_a_secret(render: Render):
    changes = ('metrics={"tls":{"secretName":"operator-tls"}}', "metrics.serviceMonitor.enabled=true")
    objects = render(*changes)
    (deployment,) = of(objects, "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    (mount,), (volume,) = pod["containers"][0]["volumeMounts"], pod["volumes"]
    assert f"--metrics-certificate={mount['mountPath']}" in arguments(objects)
    assert (mount["name"], mount["readOnly"]) == (volume["name"], True)
    assert volume["secret"] == {"secretName": "operator-tls"}
    (endpoint,) = of(objects, "ServiceMonitor")[0]["spec"]["endpoints"]
    (service,) = of(objects, "Service")
    assert endpoint["scheme"] == "https"
    assert endpoint["tlsConfig"] == {
        "serverName": f"{service['metadata']['name']}.{NAMESPACE}.svc",
        "ca": {"secret": {"name": "operator-tls", "key": "ca.crt"}},
    }
    assert not any("certificate" in argument for argument in arguments(render()))


def test_view_and_edit_cover_trainings(render: Render):
    roles = {role["metadata"]["name"].rsplit("-", 1)[1]: role for role in of(render(), "ClusterRole")}
    assert roles["view"]["rules"][0]["verbs"] == ["get", "list", "watch"]
    assert roles["edit"]["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-admin"] == "true"


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ("replica=2", "replica"),
        ("replicas=0", "replicas"),
        ('watchNamespaces=["Not_One"]', "watchNamespaces"),
        ('kuberay={"namespaces":[]}', "kuberay/namespaces"),
        ('logFormat="xml"', "logFormat"),
        ("metrics.port=80", "metrics/port"),
        ('metrics.authentication="yes"', "metrics/authentication"),
        ('image={"repo":"x"}', "image"),
        ('podSecurityContext="none"', "podSecurityContext"),
    ],
)
def test_a_value_that_is_wrong_or_unknown_is_refused_by_name(render: Render, wrong, named):
    with pytest.raises(Refused, match=named):
        render(wrong)

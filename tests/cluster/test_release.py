"""Our chart on a real node: the operator's pod works where the restricted standard is enforced."""

import json

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.release import Release

pytestmark = pytest.mark.timeout(1800)


def test_the_operator_is_ready_under_the_restricted_standard(cluster: Cluster, release: Release):
    deployment = cluster.api.get(f"/apis/apps/v1/namespaces/{release.namespace}/deployments/{release.operator}")
    assert deployment["status"]["readyReplicas"] == deployment["spec"]["replicas"] == 1
    pods = cluster.api.get(f"/api/v1/namespaces/{release.namespace}/pods")["items"]
    assert {container["restartCount"] for pod in pods for container in pod["status"]["containerStatuses"]} == {0}


def test_its_image_is_not_the_root_users(cluster: Cluster, release: Release):
    user_id = cluster.kubectl("--namespace", release.namespace, "exec", f"deploy/{release.operator}", "--", "id", "-u")
    assert user_id.strip() == "65532"


def test_the_definition_of_the_chart_is_served(cluster: Cluster):
    served = json.loads(cluster.kubectl("get", "--raw", "/apis/rl.qwen35.io/v1alpha1"))
    assert "qwen35trainings" in {resource["name"] for resource in served["resources"]}

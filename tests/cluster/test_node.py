"""The node is a real one: pods run, find each other by name, and are counted."""

from collections.abc import Callable

import pytest

from tests.cluster import workload
from tests.cluster.cluster import Cluster
from tests.testbed.api import is_true

pytestmark = pytest.mark.timeout(1800)
Eventually = Callable[..., None]
LOOK_UP = "import socket, sys; print(socket.gethostbyname(sys.argv[1]))"
# A server listens a little after its pod runs, and a Service leads to it a little after that.
FETCH = """
import sys, time, urllib.request
while True:
    try:
        print(urllib.request.urlopen(sys.argv[1], timeout=30).status)
        break
    except OSError as problem:
        print(problem, file=sys.stderr)
        time.sleep(0.5)
"""
SERVE = "import http.server, socketserver; socketserver.TCPServer(('', 80), http.server.SimpleHTTPRequestHandler).serve_forever()"
ASK_API_SERVER = """
import json, ssl, urllib.request
account = "/var/run/secrets/kubernetes.io/serviceaccount/"
context = ssl.create_default_context(cafile=account + "ca.crt")
token = {"Authorization": "Bearer " + open(account + "token").read()}
asked = urllib.request.Request("https://kubernetes.default.svc/version", headers=token)
print(json.load(urllib.request.urlopen(asked, context=context, timeout=30))["gitVersion"])
"""
DEVICES = {"nvidia.com/gpu": 8, "huawei.com/Ascend910": 8}


def test_the_node_is_ready_and_runs_the_pinned_version(cluster: Cluster):
    node = cluster.api.get(f"/api/v1/nodes/{cluster.node.name}")
    assert is_true(node["status"], "Ready")
    assert node["status"]["nodeInfo"]["kubeletVersion"] == "v1.35.4"


def test_a_pod_finds_services_by_their_names(cluster: Cluster, namespace: str):
    answer = workload.output(cluster, namespace, workload.pod("look-up", LOOK_UP, "kube-dns.kube-system"))
    assert answer.strip() == "10.96.0.10"


def test_a_pod_reaches_the_api_server_and_trusts_its_certificate(cluster: Cluster, namespace: str):
    assert workload.output(cluster, namespace, workload.pod("ask", ASK_API_SERVER)).strip() == "v1.35.4"


def test_a_pod_reaches_another_through_its_service(cluster: Cluster, namespace: str):
    workload.create(cluster, namespace, workload.pod("server", SERVE, securityContext={"runAsUser": 0}))
    service = {"metadata": {"name": "server"}, "spec": {"selector": {"app": "server"}, "ports": [{"port": 80}]}}
    cluster.api.post(f"/api/v1/namespaces/{namespace}/services", service)
    fetched = workload.output(cluster, namespace, workload.pod("client", FETCH, "http://server/"))
    assert fetched.split()[-1] == "200"


def test_a_pod_that_is_refused_by_the_standard_is_not_made(cluster: Cluster, namespace: str):
    with pytest.raises(Exception, match=r"violates PodSecurity .*privileged"):
        workload.create(cluster, namespace, workload.pod("root", LOOK_UP, securityContext={"privileged": True}))


@pytest.mark.parametrize("device", DEVICES)
def test_simulated_devices_are_allocated_until_none_is_free(
    cluster: Cluster, namespace: str, device: str, eventually: Eventually
):
    cluster.node.offer(DEVICES)

    def ask(name: str, count: int) -> None:
        resources = {"limits": {device: str(count)}}
        workload.create(cluster, namespace, workload.pod(name, "import time; time.sleep(1000)", resources=resources))

    ask("most", 6)
    eventually(lambda: workload.phase(cluster, namespace, "most") == "Running", "six of eight are allocated")
    ask("too-many", 4)
    eventually(lambda: f"Insufficient {device}" in _why_pending(cluster, namespace), "four more are refused")
    cluster.kubectl("--namespace", namespace, "delete", "pod", "most")
    eventually(lambda: workload.phase(cluster, namespace, "too-many") == "Running", "four come free")


def test_pods_run_on_when_kubelet_restarts(cluster: Cluster, namespace: str, eventually: Eventually):
    workload.create(cluster, namespace, workload.pod("steady", "import time; print('began'); time.sleep(1000)"))
    eventually(lambda: workload.phase(cluster, namespace, "steady") == "Running", "the pod runs")
    cluster.node.kubelet.stop()
    cluster.node.kubelet.start()
    eventually(lambda: _logs(cluster, namespace, "steady") == "began\n", "kubelet answers for its container")
    status = cluster.api.get(f"/api/v1/namespaces/{namespace}/pods/steady")["status"]
    assert status["containerStatuses"][0]["restartCount"] == 0


def _why_pending(cluster: Cluster, namespace: str) -> str:
    conditions = cluster.api.get(f"/api/v1/namespaces/{namespace}/pods/too-many")["status"].get("conditions", [])
    return " ".join(condition.get("message", "") for condition in conditions)


def _logs(cluster: Cluster, namespace: str, name: str) -> str:
    try:
        return cluster.kubectl("--namespace", namespace, "logs", name)
    except RuntimeError:
        return ""

"""Builds the NetworkPolicy: which connections to and from the pods of a training are allowed.

    pods of the training ◄──► each other                   all ports: Ray, NCCL, HCCL and Gloo choose theirs
    KubeRay in its namespace ──► 8265                      the dashboard: KubeRay submits and follows the job
    any pod of the cluster ──► 8080                        Ray's metrics
    pods of the training ──► 53, 5353, 443, 6443           anywhere: DNS; metric services and object stores; the API server

Ray executes any code that reaches its ports together with the token of its cluster, which KubeRay generates
(`ray_job.py`). This policy keeps other pods from the ports. KubeRay's labels admit a pod only in KubeRay's namespaces.
Every network plugin admits connections from the kubelets. Policies add up: to allow more (a tracking server on another
port, an API server that proxies to the dashboard), add a policy that selects the training's label.
"""

from typing import Any, Final

from qwen35_operator.api.training_resource import TrainingResource
from qwen35_operator.desired import object_names
from qwen35_operator.desired.objects import KubeObject, metadata, sealed
from qwen35_operator.operator_settings import OperatorSettings

DASHBOARD_PORT: Final = 8265
METRICS_PORT: Final = 8080
DNS_PORTS: Final = (53, 5353)
"""Ports of DNS servers: 53, and 5353 for OpenShift's servers, which are behind a Service with port 53."""
HTTPS_PORT: Final = 443
API_SERVER_PORT: Final = 6443
"""Port on which API servers listen behind the Service `kubernetes`. The port of the Service is 443. The policy allows
both."""


KUBERAY_LABELS: Final = ("app.kubernetes.io/name", "app.kubernetes.io/component")
"""Labels of the pod of KubeRay's operator. Its chart sets the first to KUBERAY, its manifests the second."""
KUBERAY: Final = "kuberay-operator"


def build(training: TrainingResource, settings: OperatorSettings) -> KubeObject:
    """Return the NetworkPolicy that limits the connections to and from a training's pods."""
    own = {"podSelector": {"matchLabels": {object_names.TRAINING: training.name}}}
    namespaces = [{"key": "kubernetes.io/metadata.name", "operator": "In", "values": list(settings.kuberay_namespaces)}]
    kuberay = [
        {"namespaceSelector": {"matchExpressions": namespaces}, "podSelector": {"matchLabels": {label: KUBERAY}}}
        for label in KUBERAY_LABELS
    ]
    anywhere: dict[str, Any] = {"namespaceSelector": {}}
    return sealed(
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": metadata(training, training.name, "network"),
            "spec": own
            | {
                "policyTypes": ["Ingress", "Egress"],
                "ingress": [
                    {"from": [own]},
                    {"from": kuberay, "ports": [_port(DASHBOARD_PORT)]},
                    {"from": [anywhere], "ports": [_port(METRICS_PORT)]},
                ],
                "egress": [
                    {"to": [own]},
                    {"ports": [_port(port, protocol) for port in DNS_PORTS for protocol in ("UDP", "TCP")]},
                    {"ports": [_port(HTTPS_PORT), _port(API_SERVER_PORT)]},
                ],
            },
        }
    )


def _port(port: int, protocol: str = "TCP") -> dict[str, Any]:
    return {"protocol": protocol, "port": port}

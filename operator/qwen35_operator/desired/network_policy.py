"""Who may talk to the pods of a training, and whom they may talk to.

    pods of the training ◄──► each other                   everything: Ray, NCCL, HCCL and Gloo pick their ports
    KubeRay, this operator ──► 8265                        the dashboard: submits and follows the job
    any pod of the cluster ──► 8080                        metrics
    pods of the training ──► 53, 5353, 443, 6443           anywhere: DNS; metric services and object stores; the API server

Ray runs whatever reaches its ports, so this is what keeps other pods from running code here. The nodes' kubelets are let
in by every network plugin. Policies add up: what else is needed (a tracking server on another port, an API server that
proxies to the dashboard) is another policy that selects the training's label.
"""

from typing import Any, Final

from qwen35_operator.api.training import Training
from qwen35_operator.desired import names
from qwen35_operator.desired.objects import Manifest, metadata, sealed

DASHBOARD: Final = 8265
METRICS: Final = 8080
DNS: Final = (53, 5353)
"""OpenShift's resolver listens on the second, behind a Service on the first."""
HTTPS: Final = 443
API_SERVER: Final = 6443
"""Beside 443: a policy sees the port behind the Service `kubernetes`."""


def build(training: Training) -> Manifest:
    """The NetworkPolicy."""
    own = {"podSelector": {"matchLabels": {names.TRAINING: training.name}}}
    operators: dict[str, Any] = {
        "matchExpressions": [
            {"key": "app.kubernetes.io/name", "operator": "In", "values": ["kuberay-operator", "qwen35-operator"]}
        ]
    }
    # The name that KubeRay's manifests give it; its chart may be told another.
    component = {"matchLabels": {"app.kubernetes.io/component": "kuberay-operator"}}
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
                    {
                        "from": [anywhere | {"podSelector": operators}, anywhere | {"podSelector": component}],
                        "ports": [_port(DASHBOARD)],
                    },
                    {"from": [anywhere], "ports": [_port(METRICS)]},
                ],
                "egress": [
                    {"to": [own]},
                    {"ports": [_port(port, protocol) for port in DNS for protocol in ("UDP", "TCP")]},
                    {"ports": [_port(HTTPS), _port(API_SERVER)]},
                ],
            },
        }
    )


def _port(port: int, protocol: str = "TCP") -> dict[str, Any]:
    return {"protocol": protocol, "port": port}

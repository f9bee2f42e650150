"""KubeRay in the cluster, by the manifests that it is released with."""

from tests.testbed.core import Core

NAME = "kuberay-operator"
NAMESPACE = "default"


def install(core: Core) -> None:
    """Returns before its pod is ready, see `ready`."""
    # Client-side apply would not fit the definitions.
    core.kubectl("apply", "--server-side", f"--filename={core.binaries.kuberay_installation}")


def ready(core: Core) -> bool:
    path = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/{NAME}"
    return core.api.exists(path) and bool(core.api.get(path).get("status", {}).get("availableReplicas"))

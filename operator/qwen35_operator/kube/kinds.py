"""The kinds that the operator reads and writes, and their paths."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from qwen35_operator.api import v1alpha1
from qwen35_operator.desired import names


@dataclass(frozen=True)
class Kind:
    """One kind of object."""

    name: str
    group: str
    version: str
    plural: str
    selector: str = names.TRAINING
    """Labels of those that are watched."""

    @property
    def resource(self) -> str:
        """As kubectl and RBAC name it: rayjobs.ray.io."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def path(self, namespace: str | None = None, name: str | None = None, part: str | None = None) -> str:
        """Of all objects, those of a namespace, one of them, or a part such as its status."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        where = f"/namespaces/{quote(namespace)}" if namespace else ""
        return "/".join([f"{root}{where}/{self.plural}", *(quote(piece) for piece in (name, part) if piece)])


TRAINING: Final = Kind(v1alpha1.KIND, v1alpha1.GROUP, v1alpha1.VERSION, v1alpha1.PLURAL)
RAY_JOB: Final = Kind("RayJob", "ray.io", "v1", "rayjobs")
RAY_CLUSTER: Final = Kind("RayCluster", "ray.io", "v1", "rayclusters")
POD: Final = Kind("Pod", "", "v1", "pods")
CONFIG_MAP: Final = Kind("ConfigMap", "", "v1", "configmaps", f"{names.TRAINING},{names.COMPONENT}!={names.HISTORY}")
HISTORY: Final = Kind("ConfigMap", "", "v1", "configmaps", f"{names.TRAINING},{names.COMPONENT}={names.HISTORY}")
"""Watched apart: hundreds of kilobytes each, of which only their being there matters."""
SERVICE_ACCOUNT: Final = Kind("ServiceAccount", "", "v1", "serviceaccounts")
ROLE: Final = Kind("Role", "rbac.authorization.k8s.io", "v1", "roles")
ROLE_BINDING: Final = Kind("RoleBinding", "rbac.authorization.k8s.io", "v1", "rolebindings")
NETWORK_POLICY: Final = Kind("NetworkPolicy", "networking.k8s.io", "v1", "networkpolicies")
EVENT: Final = Kind("Event", "", "v1", "events")
LEASE: Final = Kind("Lease", "coordination.k8s.io", "v1", "leases")

WRITTEN: Final = {
    kind.name: kind for kind in (RAY_JOB, CONFIG_MAP, SERVICE_ACCOUNT, ROLE, ROLE_BINDING, NETWORK_POLICY)
}
"""Kinds of which the operator creates objects."""
WATCHED: Final = (*WRITTEN.values(), HISTORY, RAY_CLUSTER, POD)
METADATA_ONLY: Final = (SERVICE_ACCOUNT, ROLE, ROLE_BINDING, NETWORK_POLICY, HISTORY)
"""Kinds of which only whose they are and what we last wrote matters."""


def watched_as(kind: Kind, raw: Mapping[str, Any]) -> Kind:
    """Whose watch sees this object of a kind that is written."""
    component = raw["metadata"].get("labels", {}).get(names.COMPONENT)
    return HISTORY if kind == CONFIG_MAP and component == names.HISTORY else kind

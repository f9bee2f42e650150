"""The kinds of objects that the API server in memory serves, and what a URL path names."""

from dataclasses import dataclass
from functools import cached_property
from urllib.parse import unquote


@dataclass(frozen=True)
class Resource:
    """One kind of object."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    status: bool = False
    """Whether the status is written only through the subresource `status`."""
    scale: bool = False
    """Whether there is a subresource `scale`."""
    counted: bool = False
    """Whether metadata.generation counts the changes of the object's content."""

    @cached_property
    def qualified(self) -> str:
        """The name of the kind in messages of the API server: rayjobs.ray.io."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @cached_property
    def qualified_kind(self) -> str:
        """The kind in messages of the API server: RayJob.ray.io."""
        return f"{self.kind}.{self.group}" if self.group else self.kind

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def custom(self) -> bool:
        """Whether a CustomResourceDefinition defines it."""
        return self.group.endswith(("ray.io", "qwen35.io", "x-k8s.io"))


RBAC = "rbac.authorization.k8s.io"
RESOURCES = (
    Resource("", "v1", "namespaces", "Namespace", namespaced=False, status=True),
    Resource("", "v1", "nodes", "Node", namespaced=False),
    Resource("", "v1", "pods", "Pod", status=True, counted=True),
    Resource("", "v1", "configmaps", "ConfigMap"),
    Resource("", "v1", "serviceaccounts", "ServiceAccount"),
    Resource("", "v1", "events", "Event"),
    Resource("", "v1", "resourcequotas", "ResourceQuota", status=True),
    Resource(RBAC, "v1", "roles", "Role"),
    Resource(RBAC, "v1", "rolebindings", "RoleBinding"),
    Resource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy", counted=True),
    Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget", status=True, counted=True),
    Resource("coordination.k8s.io", "v1", "leases", "Lease"),
    Resource("ray.io", "v1", "rayjobs", "RayJob", status=True, counted=True),
    Resource("ray.io", "v1", "rayclusters", "RayCluster", status=True, counted=True),
    Resource("kueue.x-k8s.io", "v1beta1", "workloads", "Workload", status=True, counted=True),
    Resource("rl.qwen35.io", "v1alpha1", "qwen35trainings", "Qwen35Training", status=True, scale=True, counted=True),
)


@dataclass(frozen=True)
class Place:
    """What a URL path names: the objects of a kind, one of them, or a part of one."""

    group: str
    version: str
    plural: str
    namespace: str | None = None
    name: str | None = None
    part: str | None = None
    """A subresource, such as "status"."""


def place(path: str) -> Place | None:
    """Return what a path names; None for a path that names no objects, such as that of an API group."""
    root, *rest = [unquote(piece) for piece in path.strip("/").split("/")]
    group, version, *rest = ["", *rest] if root == "api" else rest
    namespace = None
    if rest[:1] == ["namespaces"] and len(rest) > 2:
        _, namespace, *rest = rest
    if not rest:
        return None
    plural, name, part = (*rest, None, None)[:3]
    return Place(group, version, plural, namespace, name, part)

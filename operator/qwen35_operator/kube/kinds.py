"""The kinds of objects that the operator reads and writes, and the URL paths of their objects."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from qwen35_operator.api import v1alpha1
from qwen35_operator.desired import object_names


@dataclass(frozen=True)
class ObjectKind:
    """A kind of Kubernetes object: its name, API group, version and plural."""

    name: str
    group: str
    version: str
    plural: str
    selector: str = object_names.TRAINING
    """Label selector of the objects that the operator watches."""

    @property
    def resource(self) -> str:
        """The name of the kind for kubectl and RBAC, such as rayjobs.ray.io."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def path(self, namespace: str | None = None, name: str | None = None, part: str | None = None) -> str:
        """Return the URL path of one object or of all objects of this kind.

        namespace: None for objects in all namespaces. name: name of the object; None for all objects. part: a
        subresource of the object, such as "status"; None for the object itself.
        """
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        where = f"/namespaces/{quote(namespace)}" if namespace else ""
        return "/".join([f"{root}{where}/{self.plural}", *(quote(piece) for piece in (name, part) if piece)])


TRAINING: Final = ObjectKind(v1alpha1.KIND, v1alpha1.GROUP, v1alpha1.VERSION, v1alpha1.PLURAL)
RAY_JOB: Final = ObjectKind("RayJob", "ray.io", "v1", "rayjobs")
RAY_CLUSTER: Final = ObjectKind("RayCluster", "ray.io", "v1", "rayclusters")
POD: Final = ObjectKind("Pod", "", "v1", "pods")
CONFIG_MAP: Final = ObjectKind(
    "ConfigMap",
    "",
    "v1",
    "configmaps",
    f"{object_names.TRAINING},{object_names.COMPONENT}!={object_names.HISTORY}",
)
HISTORY: Final = ObjectKind(
    "ConfigMap",
    "",
    "v1",
    "configmaps",
    f"{object_names.TRAINING},{object_names.COMPONENT}={object_names.HISTORY}",
)
"""The ConfigMaps `-history`. Only their metadata is watched, separately from other ConfigMaps: a history takes hundreds of
kilobytes, and the operator needs to know only that it exists."""
SERVICE_ACCOUNT: Final = ObjectKind("ServiceAccount", "", "v1", "serviceaccounts")
ROLE: Final = ObjectKind("Role", "rbac.authorization.k8s.io", "v1", "roles")
ROLE_BINDING: Final = ObjectKind("RoleBinding", "rbac.authorization.k8s.io", "v1", "rolebindings")
NETWORK_POLICY: Final = ObjectKind("NetworkPolicy", "networking.k8s.io", "v1", "networkpolicies")
DISRUPTION_BUDGET: Final = ObjectKind("PodDisruptionBudget", "policy", "v1", "poddisruptionbudgets")
EVENT: Final = ObjectKind("Event", "", "v1", "events")
NODE: Final = ObjectKind("Node", "", "v1", "nodes")
"""Nodes are read one at a time, when a pod on one may hold up the next attempt."""
TOKEN_REVIEW: Final = ObjectKind("TokenReview", "authentication.k8s.io", "v1", "tokenreviews")
SUBJECT_ACCESS_REVIEW: Final = ObjectKind("SubjectAccessReview", "authorization.k8s.io", "v1", "subjectaccessreviews")
"""Reviews are posted, and the answer has the result. The API server does not store them."""
LEASE: Final = ObjectKind("Lease", "coordination.k8s.io", "v1", "leases")

WRITTEN: Final = {
    kind.name: kind
    for kind in (RAY_JOB, CONFIG_MAP, SERVICE_ACCOUNT, ROLE, ROLE_BINDING, NETWORK_POLICY, DISRUPTION_BUDGET)
}
"""Kinds of the child objects that the operator creates, by name."""
WATCHED: Final = (*WRITTEN.values(), HISTORY, RAY_CLUSTER, POD)
METADATA_ONLY: Final = (SERVICE_ACCOUNT, ROLE, ROLE_BINDING, NETWORK_POLICY, DISRUPTION_BUDGET, HISTORY)
"""Kinds of which the operator watches only the metadata: it needs only the owner and the hash that it wrote last."""
OPTIONAL: Final = (DISRUPTION_BUDGET,)
"""Kinds that only some trainings need. An operator without the permission to watch one serves all others, because an administrator
who grants its permissions by hand upgrades the operator first. A training that needs the kind reports what is missing."""


def watched_as(kind: ObjectKind, raw: Mapping[str, Any]) -> ObjectKind:
    """Return the entry of WATCHED whose watch reports the object `raw`.

    kind: the kind of `raw`. The result is HISTORY for a ConfigMap `-history`, and `kind` for any other object.
    """
    component = raw["metadata"].get("labels", {}).get(object_names.COMPONENT)
    return HISTORY if kind == CONFIG_MAP and component == object_names.HISTORY else kind

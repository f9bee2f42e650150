"""What a user may do: rules of Roles and ClusterRoles."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.virtual.failures import Failure
from tests.virtual.resources import Place, Resource
from tests.virtual.selectors import selected_name


@dataclass
class Rights:
    """The rules of one user, in some namespaces or, if there are none, in all."""

    user: str
    rules: Sequence[Mapping[str, Any]]
    namespaces: tuple[str, ...] = ()
    always: Sequence[Mapping[str, Any]] = ()
    """Rules that hold everywhere, such as those for the Lease."""
    used: set[tuple[str, str, str]] = field(default_factory=set)
    """Group, resource and verb of every permitted request."""

    def check(self, verb: str, resource: Resource, where: Place, query: Mapping[str, str]) -> None:
        """Raise Failure if the user may not do it. A list or watch that selects one name is a request for that object.

        So does the API server: k8s.io/apiserver/pkg/endpoints/request/requestinfo.go.
        """
        object_name = selected_name(query) if verb in ("list", "watch") else where.name
        name = f"{resource.plural}/{where.part}" if where.part else resource.plural
        own = self.rules if not self.namespaces or where.namespace in self.namespaces else ()
        if any(_grants(rule, verb, resource.group, name, object_name) for rule in (*own, *self.always)):
            self.used.add((resource.group, name, verb))
            return
        scope = f'in the namespace "{where.namespace}"' if where.namespace else "at the cluster scope"
        message = f'{resource.qualified} is forbidden: User "{self.user}" cannot {verb} resource "{name}" in API group "{resource.group}" {scope}'
        raise Failure(403, message, group=resource.group, kind=resource.plural)


def _grants(rule: Mapping[str, Any], verb: str, group: str, resource: str, name: str | None) -> bool:
    named = "resourceNames" not in rule or name in rule["resourceNames"]
    return named and group in rule["apiGroups"] and resource in rule["resources"] and verb in rule["verbs"]

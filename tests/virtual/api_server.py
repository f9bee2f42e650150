"""An API server in memory: its answers to requests, by the rules of the real one (k8s.io/apiserver 0.35, registry/rest).

    request ─► kind served? ─► permitted? ─► verb ─► admission: webhooks, defaults, quotas ─► stored, with a new version ─► watches

Not served: validation by schemas and CEL, tables, `in` selectors, creation by apply. Stories that need them run on the real one.
"""

import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from tests.virtual import quotas
from tests.virtual.defaults import defaulted
from tests.virtual.failures import Failure
from tests.virtual.managed_fields import APPLIED_RESOURCES, applied, managed
from tests.virtual.patches import APPLY_PATCH, patched
from tests.virtual.resources import RESOURCES, Place, Resource, place
from tests.virtual.rights import Rights
from tests.virtual.selectors import selected
from tests.virtual.stored_objects import Objects, Stored

SERVER_SET = ("uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "generation")
"""Metadata that a client cannot change."""
VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


@dataclass(frozen=True)
class Request:
    """One request."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    body: Any = None
    content: str = "application/json"
    accept: str = "application/json"
    user: str = "test"
    rights: Rights | None = None
    """What the user may do; None for an administrator."""

    @property
    def verb(self) -> str:
        """As roles name it. Whether a GET lists is not known here: see `ApiServer.answer`."""
        return VERBS.get(self.method, "get")

    @property
    def manager(self) -> str:
        """The name that managedFields record."""
        return self.query.get("fieldManager", self.user)

    @property
    def dry(self) -> bool:
        return self.query.get("dryRun") == "All"


@dataclass
class ApiServer:
    """The objects, and the requests that change them. clock: returns the server's time in seconds since 1970."""

    clock: Callable[[], float]
    objects: Objects = field(default_factory=Objects)
    undefined: set[str] = field(default_factory=set)
    """Kinds that are not served, such as rayjobs.ray.io: their definitions have been deleted."""
    admission: list[Callable[[Resource, dict[str, Any]], None]] = field(default_factory=list)
    """Mutating webhooks for new objects."""
    _uids: int = 0

    # Requests.

    def answer(self, request: Request) -> dict[str, Any]:
        """Carry out a request other than a watch. Returns the answer's body. Raises Failure."""
        where = place(request.path)
        if where is None or (where.group, where.plural) == ("", ""):
            return self._discovery(request.path)
        resource = self.resource(where)
        listing = request.method == "GET" and where.name is None
        verb = "list" if listing else "deletecollection" if self._all(request, where) else request.verb
        if request.rights is not None:
            request.rights.check(verb, resource, where, request.query)
        if listing:
            return self._list(resource, where, request)
        if verb == "deletecollection":
            return self._delete_all(resource, where, request)
        match request.method:
            case "GET":
                return self._get(resource, where, request)
            case "POST" if where.part == "eviction":
                return self._evict(resource, where)
            case "POST":
                return self.create(resource, where.namespace, request.body, manager=request.manager, dry=request.dry)
            case "PUT" | "PATCH" if where.part == "scale":
                return self._scale(resource, where, request)
            case "PUT" | "PATCH":
                return self._change(resource, where, request)
            case "DELETE":
                return self._delete(resource, where, request.body or {})
        raise Failure(405, f"{request.method} is not served in memory", reason="MethodNotAllowed")

    def resource(self, where: Place) -> Resource:
        """Return the kind that a path names. Raises Failure if it is not served."""
        for resource in RESOURCES:
            named = (resource.group, resource.version, resource.plural) == (where.group, where.version, where.plural)
            if named and resource.qualified not in self.undefined:
                return resource
        raise Failure(404, "the server could not find the requested resource")

    def undefine(self, name: str) -> None:
        """Stop serving a kind, such as rayjobs.ray.io, and remove its objects."""
        (kind,) = (item for item in RESOURCES if item.qualified == name)
        for item in tuple(self.objects.of(kind)):
            self._remove(item)
        self.undefined.add(name)

    @property
    def now(self) -> str:
        """The time as metadata contains it: whole seconds."""
        return datetime.fromtimestamp(int(self.clock()), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def _all(self, request: Request, where: Place) -> bool:
        return request.method == "DELETE" and where.name is None

    def _discovery(self, path: str) -> dict[str, Any]:
        group, version = (
            ["", *path.strip("/").split("/")[1:]] if path.startswith("/api/") else path.strip("/").split("/")[1:]
        )[:2]
        served = [
            r for r in RESOURCES if (r.group, r.version) == (group, version) and r.qualified not in self.undefined
        ]
        if not served:
            raise Failure(404, "the server could not find the requested resource")
        kinds = [{"name": r.plural, "kind": r.kind, "namespaced": r.namespaced} for r in served]
        return {"kind": "APIResourceList", "groupVersion": served[0].api_version, "resources": kinds}

    # Reading.

    def _get(self, resource: Resource, where: Place, request: Request) -> dict[str, Any]:
        stored = self.stored(resource, where.namespace, where.name or "")
        if "PartialObjectMetadata" in request.accept:
            return partial(stored)
        return _scale_of(stored.copy()) if where.part == "scale" else stored.copy()

    def stored(self, resource: Resource, namespace: str | None, name: str) -> Stored:
        """Return an object. Raises Failure if it does not exist."""
        stored = self.objects.find(resource, namespace, name)
        if stored is None:
            details = {"name": name, "group": resource.group, "kind": resource.plural}
            raise Failure(404, f'{resource.qualified} "{name}" not found', **details)
        return stored

    def _list(self, resource: Resource, where: Place, request: Request) -> dict[str, Any]:
        matches = selected(request.query)
        stored = [item for item in self.objects.of(resource, where.namespace) if matches(item.body)]
        start, limit = int(request.query.get("continue", "0")), int(request.query.get("limit", "0")) or len(stored)
        metadata = {"resourceVersion": str(self.objects.version)}
        if start + limit < len(stored):
            metadata |= {"continue": str(start + limit), "remainingItemCount": str(len(stored) - start - limit)}
        only_metadata = "PartialObjectMetadata" in request.accept
        items = [partial(item) if only_metadata else item.copy() for item in stored[start : start + limit]]
        return {
            "kind": f"{resource.kind}List",
            "apiVersion": resource.api_version,
            "metadata": metadata,
            "items": items,
        }

    # Creating.

    def create(
        self, resource: Resource, namespace: str | None, wanted: Mapping[str, Any], *, manager: str, dry: bool = False
    ) -> dict[str, Any]:
        """Create an object. Returns it as it is stored. Raises Failure."""
        self._admit_namespace(resource, namespace)
        body = json.loads(json.dumps(wanted))
        metadata = body.setdefault("metadata", {})
        name = metadata.get("name") or f"{metadata.get('generateName', '')}{secrets.token_hex(3)[:5]}"
        if self.objects.find(resource, namespace, name) is not None:
            details = {"name": name, "group": resource.group, "kind": resource.plural}
            raise Failure(409, f'{resource.qualified} "{name}" already exists', reason="AlreadyExists", **details)
        for field_name in (*SERVER_SET, "managedFields", "resourceVersion"):
            metadata.pop(field_name, None)
        metadata |= {"name": name, "uid": self._uid(), "creationTimestamp": self.now}
        metadata |= {"namespace": namespace} if resource.namespaced else {}
        metadata |= {"generation": 1} if resource.counted else {}
        body = {"apiVersion": resource.api_version, "kind": resource.kind, **body}
        if resource.status:
            body.pop("status", None)
        if resource.plural == "pods":
            body["status"] = {"phase": "Pending"}
        for mutate in self.admission:
            mutate(resource, body)
        body = defaulted(resource, body)
        quotas.admit(self.objects, resource, namespace, body)
        if not dry:
            body = self._store(resource, None, body, manager)
        return dict(json.loads(json.dumps(body)))

    def _admit_namespace(self, resource: Resource, namespace: str | None) -> None:
        if not resource.namespaced:
            return
        spaces = next(item for item in RESOURCES if item.plural == "namespaces")
        stored = self.objects.find(spaces, None, namespace or "")
        if stored is None:
            raise Failure(404, f'namespaces "{namespace}" not found', name=namespace, kind="namespaces")
        if "deletionTimestamp" in stored.metadata:
            cause = {"reason": "NamespaceTerminating", "message": f"namespace {namespace} is being terminated"}
            message = f"{resource.qualified} is forbidden: unable to create new content in namespace {namespace} because it is being terminated"
            raise Failure(403, message, causes=[cause])

    def _uid(self) -> str:
        self._uids += 1
        return f"{self._uids:08x}-0000-4000-8000-{self._uids:012x}"

    # Changing.

    def _change(self, resource: Resource, where: Place, request: Request) -> dict[str, Any]:
        if request.content == APPLY_PATCH:
            return self._apply(resource, where, request)
        old = self.stored(resource, where.namespace, where.name or "")
        if request.method == "PATCH":
            new = patched(old.copy(), request.body, request.content)
        else:
            new = json.loads(json.dumps(request.body))
        return self.replace(old, new, part=where.part, manager=request.manager)

    def replace(self, old: Stored, new: dict[str, Any], *, part: str | None = None, manager: str) -> dict[str, Any]:
        """Replace an object, or its status if `part` is "status". Returns the stored object. Raises Failure."""
        resource, metadata = old.resource, new.setdefault("metadata", {})
        wanted = metadata.get("resourceVersion")
        if wanted is None and resource.custom:
            text = "metadata.resourceVersion: Invalid value: 0: must be specified for an update"
            raise Failure(422, f'{resource.qualified} "{old.metadata["name"]}" is invalid: {text}')
        if wanted is not None and str(wanted) != old.metadata["resourceVersion"]:
            message = f'Operation cannot be fulfilled on {resource.qualified} "{old.metadata["name"]}": the object has been modified; please apply your changes to the latest version and try again'
            raise Failure(409, message, name=old.metadata["name"], group=resource.group, kind=resource.plural)
        _refuse_other_identity(old, metadata)
        body = _with_status(old, new) if part == "status" else _without_status(old, new)
        body = defaulted(resource, body)
        if not body["metadata"].get("managedFields"):
            body["metadata"].pop("managedFields", None)
        for name in (
            *SERVER_SET,
            "resourceVersion",
            *(() if "managedFields" in body["metadata"] else ("managedFields",)),
        ):
            body["metadata"].pop(name, None)
            if name in old.metadata:
                body["metadata"][name] = old.metadata[name]
        if body == old.body:
            return old.copy()
        if resource.counted and _content(body) != _content(old.body):
            body["metadata"]["generation"] += 1
        if "deletionTimestamp" in old.metadata and not body["metadata"].get("finalizers") and not _ends_gracefully(old):
            body["metadata"] = _without_empty(body["metadata"])
            self._remove(Stored(resource, body))
            return dict(json.loads(json.dumps(body)))
        return self._store(resource, old, body, manager)

    def _apply(self, resource: Resource, where: Place, request: Request) -> dict[str, Any]:
        """Carry out a server-side apply of an existing object."""
        old = self.objects.find(resource, where.namespace, where.name or "")
        uid = request.body["metadata"].get("uid")
        if old is None and uid is not None:
            text = f"uid mismatch: the provided object specified uid {uid}, and no existing object was found"
            message = f'Operation cannot be fulfilled on {resource.qualified} "{where.name}": {text}'
            raise Failure(409, message, name=where.name, group=resource.group, kind=resource.plural)
        if old is None or resource.plural not in APPLIED_RESOURCES:
            raise Failure(405, "this apply is not served in memory", reason="MethodNotAllowed")
        if not request.query.get("fieldManager"):
            raise Failure(
                400, "PatchOptions.meta.k8s.io is invalid: fieldManager: Required value: is required for apply patch"
            )
        _refuse_other_identity(old, request.body["metadata"])
        force = request.query.get("force") == "true"
        new = applied(old.copy(), request.body, request.manager, self.now, force=force)
        new["metadata"] = _without_empty(new["metadata"])
        if _without_managers(new) == _without_managers(old.body) and _owned(new) == _owned(old.body):
            return old.copy()
        if old.body.get("immutable") and _content(new) != _content(old.body):
            raise _immutable(old)
        if resource.counted and _content(new) != _content(old.body):
            new["metadata"]["generation"] += 1
        return self._put(resource, new)

    def _scale(self, resource: Resource, where: Place, request: Request) -> dict[str, Any]:
        old = self.stored(resource, where.namespace, where.name or "")
        if not resource.scale:
            raise Failure(404, "the server could not find the requested resource")
        scale = _scale_of(old.copy())
        scale = patched(scale, request.body, request.content) if request.method == "PATCH" else request.body
        body = old.copy()
        body["spec"]["rollout"]["nodes"] = scale["spec"]["replicas"]
        return _scale_of(self.replace(old, body, manager=request.manager))

    def _store(self, resource: Resource, old: Stored | None, body: dict[str, Any], manager: str) -> dict[str, Any]:
        body["metadata"] = _without_empty(body["metadata"])
        if resource.plural in APPLIED_RESOURCES:
            entries = body["metadata"].get("managedFields", [])
            entries = managed(None if old is None else old.body, entries, body, manager, self.now)
            body["metadata"]["managedFields"] = entries
        if resource.plural == "resourcequotas":
            body = quotas.counted(self.objects, body)
        return self._put(resource, body)

    def _put(self, resource: Resource, body: dict[str, Any]) -> dict[str, Any]:
        body["metadata"]["resourceVersion"] = self.objects.next_version()
        stored = Stored(resource, body)
        self.objects.put(stored)
        return stored.copy()

    # Deleting.

    def _delete(self, resource: Resource, where: Place, options: Mapping[str, Any]) -> dict[str, Any]:
        return self.delete(self.stored(resource, where.namespace, where.name or ""), options)

    def delete(self, old: Stored, options: Mapping[str, Any]) -> dict[str, Any]:
        """Delete an object, or begin to: it stays while it has finalizers, and a pod on a node until its kubelet confirms.

        Returns the object if it stays, otherwise a Status. Raises Failure.
        """
        resource, name = old.resource, old.metadata["name"]
        uid = options.get("preconditions", {}).get("uid")
        if uid is not None and uid != old.metadata["uid"]:
            message = f'Operation cannot be fulfilled on {resource.qualified_kind} "{name}": the UID in the precondition ({uid}) does not match the UID in record ({old.metadata["uid"]}). The object might have been deleted and then recreated'
            raise Failure(409, message, name=name, group=resource.group, kind=resource.kind)
        grace = _grace_seconds(old, options)
        if grace or old.metadata.get("finalizers"):
            if "deletionTimestamp" in old.metadata and not (grace == 0 and _ends_gracefully(old)):
                return old.copy()
            return self._begin_deletion(old, grace)
        self._remove(Stored(resource, old.copy()))
        details = {"name": name, "kind": resource.plural, "uid": old.metadata["uid"]}
        details |= {"group": resource.group} if resource.group else {}
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}

    def _begin_deletion(self, old: Stored, grace: int) -> dict[str, Any]:
        body = old.copy()
        # The API server counts in nanoseconds of 64 bits, which wrap (registry/rest/delete.go).
        wrapped = ((grace * 10**9 + 2**63) % 2**64 - 2**63) // 10**9
        end = datetime.fromtimestamp(int(self.clock()) + wrapped, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        body["metadata"] |= {"deletionTimestamp": end, "deletionGracePeriodSeconds": grace}
        if "generation" in body["metadata"]:
            body["metadata"]["generation"] += 1
        return self._store(old.resource, old, body, "")

    def _delete_all(self, resource: Resource, where: Place, request: Request) -> dict[str, Any]:
        matches = selected(request.query)
        stored = [item for item in self.objects.of(resource, where.namespace) if matches(item.body)]
        for item in stored:
            self.delete(item, request.body or {})
        return {"kind": f"{resource.kind}List", "metadata": {}, "items": [item.copy() for item in stored]}

    def _evict(self, resource: Resource, where: Place) -> dict[str, Any]:
        old = self.stored(resource, where.namespace, where.name or "")
        disrupt(self, old, "EvictionByEvictionAPI", "Eviction API: evicting")
        self.delete(self.stored(resource, where.namespace, where.name or ""), {})
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}

    def _remove(self, last: Stored) -> None:
        body = last.copy()
        body["metadata"]["resourceVersion"] = self.objects.next_version()
        self.objects.remove(Stored(last.resource, body))


def disrupt(server: ApiServer, pod: Stored, reason: str, message: str) -> None:
    """Write into a pod's status that the cluster takes it away."""
    body = pod.copy()
    condition = {"type": "DisruptionTarget", "status": "True", "lastTransitionTime": server.now}
    conditions = [item for item in body["status"].get("conditions", []) if item["type"] != "DisruptionTarget"]
    body["status"]["conditions"] = [*conditions, condition | {"reason": reason, "message": message}]
    server.replace(pod, body, part="status", manager="kube")


def partial(stored: Stored) -> dict[str, Any]:
    """The object as PartialObjectMetadata."""
    metadata = dict(json.loads(json.dumps(stored.metadata)))
    return {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": metadata}


def _without_empty(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata as it is stored: without empty lists and maps."""
    return {name: value for name, value in metadata.items() if value not in ([], {}, None)}


def _without_managers(body: Mapping[str, Any]) -> dict[str, Any]:
    metadata = {name: value for name, value in body["metadata"].items() if name != "managedFields"}
    return {**body, "metadata": metadata}


def _owned(body: Mapping[str, Any]) -> dict[tuple[str, str], Any]:
    """The fields of each manager: other times alone do not change the object."""
    entries = body["metadata"].get("managedFields", [])
    return {(entry["manager"], entry["operation"]): entry["fieldsV1"] for entry in entries}


def _immutable(old: Stored) -> Failure:
    message = "Forbidden: field is immutable when `immutable` is set"
    cause = {"reason": "FieldValueForbidden", "message": message, "field": "data"}
    name = old.metadata["name"]
    details = {"name": name, "group": old.resource.group, "kind": old.resource.kind, "causes": [cause]}
    return Failure(422, f'{old.resource.qualified_kind} "{name}" is invalid: data: {message}', **details)


def _content(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in ("metadata", "status")}


def _with_status(old: Stored, new: Mapping[str, Any]) -> dict[str, Any]:
    """The old object with the new status: a write of the status changes nothing else."""
    body = old.copy()
    body.pop("status", None)
    return body | ({"status": new["status"]} if "status" in new else {})


def _without_status(old: Stored, new: Mapping[str, Any]) -> dict[str, Any]:
    """The new object with the old status, if the status is written only through its subresource."""
    if not old.resource.status:
        return dict(new)
    body = {name: value for name, value in new.items() if name != "status"}
    return body | ({"status": old.copy()["status"]} if "status" in old.body else {})


def _refuse_other_identity(old: Stored, metadata: Mapping[str, Any]) -> None:
    uid = metadata.get("uid")
    if uid is not None and uid != old.metadata["uid"]:
        message = f'Invalid value: "{uid}": field is immutable'
        cause = {"reason": "FieldValueInvalid", "message": message, "field": "metadata.uid"}
        name = old.metadata["name"]
        details = {"name": name, "group": old.resource.group, "kind": old.resource.kind, "causes": [cause]}
        raise Failure(422, f'{old.resource.qualified_kind} "{name}" is invalid: metadata.uid: {message}', **details)


def _ends_gracefully(stored: Stored) -> bool:
    """Whether a kubelet has to confirm the object's end."""
    return bool(stored.metadata.get("deletionGracePeriodSeconds"))


def _grace_seconds(old: Stored, options: Mapping[str, Any]) -> int:
    """The grace period of a deletion: 0 for all but pods on a node that have not ended (registry/core/pod/strategy.go)."""
    if old.resource.plural != "pods" or not old.body["spec"].get("nodeName"):
        return 0
    if old.body.get("status", {}).get("phase") in ("Succeeded", "Failed"):
        return 0
    wanted = options.get("gracePeriodSeconds")
    if wanted is not None:
        return int(wanted)
    return int(old.body["spec"].get("terminationGracePeriodSeconds", 30))


def _scale_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """The subresource `scale` of a training."""
    names = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": {name: body["metadata"][name] for name in names},
        "spec": {"replicas": body["spec"]["rollout"]["nodes"]},
        "status": {"replicas": body.get("status", {}).get("rolloutNodes", 0)},
    }

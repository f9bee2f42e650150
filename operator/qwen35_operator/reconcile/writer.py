"""Carries out the writes of a decision, in order. After one that the API server refuses, only deletions and repairs are carried out.

The API server checks a condition of every write: a new object needs a free name, and every other write names the uid of
its object or tests the object's fields. Writes are therefore idempotent: one that is repeated or outdated changes nothing. If an object
has changed since it was observed, `ClusterWriter.write` raises Conflict (409), and the training is observed again.

The answers of the API server are stored in the cache immediately.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Final

from qwen35_operator.api import v1alpha1
from qwen35_operator.desired import object_names
from qwen35_operator.desired.objects import KubeObject
from qwen35_operator.kube.api_errors import ApiError, Conflict, Denied, Forbidden, Invalid, NotFound, Unauthorized
from qwen35_operator.kube.client import APPLY_PATCH, JSON_PATCH, MERGE_PATCH, Client, JsonObject
from qwen35_operator.kube.field_ownership import FIELD_MANAGER, taken_over
from qwen35_operator.kube.kinds import EVENT, OPTIONAL, RAY_CLUSTER, TRAINING, WRITTEN, ObjectKind, watched_as
from qwen35_operator.kube.object_cache import ObjectCache
from qwen35_operator.kube.object_parsing import record, training_of
from qwen35_operator.kube.object_records import Child, OwnWrite
from qwen35_operator.kube.store import TrainingKey
from qwen35_operator.reconcile.drift import is_as_desired
from qwen35_operator.reconcile.observed import Observed
from qwen35_operator.reconcile.writes import (
    Apply,
    ClusterWrite,
    Create,
    Delete,
    PostEvent,
    RefusedWrite,
    RemoveFinalizer,
    Scale,
    is_of_budget,
    is_repair,
)
from qwen35_operator.status.text_limits import cut

logger = logging.getLogger(__name__)

EVENT_REPEAT_TIME = timedelta(minutes=10)
"""Minimum time between two equal events of one training. An event that is repeated earlier is not posted."""
MAX_BUDGET_TRIES = 10_000
"""Maximum number of trainings of which a refused write of the budget is remembered. The oldest is forgotten."""
MAX_EVENT_BYTES = 1024
MAX_CAUSES = 10
"""Maximum number of causes that the message of a refused write lists."""
NAMESPACE_TERMINATING = "NamespaceTerminating"
TOO_MANY_REQUESTS = 429
CREATE_OPTIONS: Final = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"}
APPLY_OPTIONS: Final = {"fieldManager": FIELD_MANAGER, "force": "true"}
"""Options of a server-side apply. With `force`, a field that another manager has changed gets the operator's value."""


class NotLeading(Exception):
    """Raised instead of a write, because another process may lead by now. The write is left to that process."""


class ClusterWriter:
    """Carries out writes to the cluster, and stores the API server's answers in the cache."""

    def __init__(
        self,
        client: Client,
        cache: ObjectCache,
        component: str,
        progressed: Callable[[TrainingKey], None] = lambda key: None,
        may_write: Callable[[], bool] = lambda: True,
    ) -> None:
        """Create a writer.

        component: the source that events name. progressed: called with the training after each successful write, to
        reset the training's backoff. may_write: returns whether this process leads; asked right before each write.
        """
        self._client = client
        self._cache = cache
        self._component = component
        self._progressed = progressed
        self._may_write = may_write
        self._posted: dict[tuple[str, str, str], datetime] = {}
        self._budget_tries: dict[str, OwnWrite] = {}  # by uid of the training; the newest is last

    async def write(self, observed: Observed, writes: Sequence[ClusterWrite]) -> list[RefusedWrite]:
        """Carry out the writes in order. Returns those that the API server refused, or failed to carry out.

        After a refused write, only deletions and repairs are carried out: other writes depend on those before them. A refused
        repair stops no other write. Raises Conflict if an object has changed since it was observed, another ApiError if the
        API server is overloaded or does not answer, and NotLeading if this process does not lead any more.
        """
        refused: list[RefusedWrite] = []
        for write in writes:
            blocked = not all(is_repair(earlier.write) for earlier in refused)
            if blocked and not isinstance(write, Delete) and not is_repair(write):
                continue
            self.check_leading()
            refusal = await self._write_or_explain(observed, write)
            if refusal is not None:
                refused.append(refusal)
            elif not isinstance(write, PostEvent):
                self._progressed((observed.namespace, observed.name))
        return refused

    def budget_try(self, uid: str) -> OwnWrite | None:
        """Return the latest try to create or delete the budget of the training with this uid, if the API server refused it."""
        return self._budget_tries.get(uid)

    def check_leading(self) -> None:
        """Raise NotLeading unless this process leads. Call this right before a write."""
        if not self._may_write():
            raise NotLeading

    async def _write_or_explain(self, observed: Observed, write: ClusterWrite) -> RefusedWrite | None:
        """Carry out a write. One that fails counts as refused, so that the status names it. The usual reason is an admission webhook.

        An API server waits for a webhook for up to 30 s, so a request without an answer may have the same reason. If the API server
        itself does not answer, the write of the status fails next. A refused repair is due again after `drift.REPAIR_SECONDS`.
        Raises Conflict, and the error of an API server that requests a pause.
        """
        try:
            refused = await self._write(observed, write)
        except ApiError as error:
            if isinstance(error, Conflict) or error.status == TOO_MANY_REQUESTS or error.retry_after:
                raise
            cause = "the API server does not accept the operator's token: " if isinstance(error, Unauthorized) else ""
            message = f"{_named(write)} failed: {cause}{error.message}. The operator tries again"
            refused = RefusedWrite(write, "WriteFailed", message)
        if isinstance(write, Create | Delete) and is_of_budget(write):
            self._note_budget_try(observed.uid, refused)
        elif refused is not None and refused.reason != "Cleaning" and isinstance(write, Apply) and write.is_repair:
            self._note_try(observed, write, refused)
        return refused

    def _note_budget_try(self, uid: str, refused: RefusedWrite | None) -> None:
        """Record when the operator tried to create or delete a budget, and why that failed; forget it if it did not fail."""
        self._budget_tries.pop(uid, None)
        if refused is not None:
            cause = refused.reason, cut(refused.message, MAX_EVENT_BYTES)
            self._budget_tries[uid] = OwnWrite("", self._client.now(), None, cause)
        if len(self._budget_tries) > MAX_BUDGET_TRIES:
            del self._budget_tries[next(iter(self._budget_tries))]

    def _note_try(self, observed: Observed, write: Apply, refused: RefusedWrite) -> None:
        """Record in the stored child when the operator tried to write it, and why that failed."""
        written = write.manifest["metadata"].get("annotations", {}).get(object_names.HASH)
        tried = OwnWrite("", self._client.now(), written, (refused.reason, refused.message))
        store = self._cache.stores[watched_as(WRITTEN[write.manifest["kind"]], write.manifest)]
        for stored in list(store.of((observed.namespace, observed.name))):
            if isinstance(stored, Child) and stored.uid == write.uid:
                store.put_own(observed.name, replace(stored, own_write=tried))

    async def _write(self, observed: Observed, write: ClusterWrite) -> RefusedWrite | None:
        match write:
            case Create(manifest=manifest):
                return await self._create(observed, write, manifest)
            case Apply():
                return await self._apply(observed, write)
            case Scale():
                return await self._scale(observed, write)
            case Delete():
                return await self._delete(observed, write)
            case RemoveFinalizer():
                return await self._remove_finalizer(observed, write)
            case PostEvent():
                await self._post_event(observed, write)
        return None

    async def _create(self, observed: Observed, write: Create, manifest: KubeObject) -> RefusedWrite | None:
        kind, name = WRITTEN[manifest["kind"]], manifest["metadata"]["name"]
        try:
            created = await self._client.post(kind.path(observed.namespace), manifest, CREATE_OPTIONS)
        except Conflict:
            return await self._adopt_or_refuse(observed, write, kind, manifest)
        except (Forbidden, Invalid, NotFound) as error:
            if _namespace_terminating(error):
                return None
            return refusal(write, kind, observed.namespace, name, "create", error)
        self._store(observed, kind, created, written=True)
        return None

    async def _adopt_or_refuse(
        self, observed: Observed, write: Create, kind: ObjectKind, manifest: KubeObject
    ) -> RefusedWrite | None:
        """Handle a creation whose name is taken. Returns None if the existing object is adopted.

        The object is adopted if this training owns it. Otherwise the write is refused.
        """
        name = manifest["metadata"]["name"]
        try:
            existing = await self._client.get(kind.path(observed.namespace, name))
        except NotFound:
            return RefusedWrite(write, "Cleaning", f"{kind.name} {name} was just deleted and will be created again")
        metadata = existing["metadata"]
        references = metadata.get("ownerReferences", ())
        owner: JsonObject = next((reference for reference in references if reference.get("controller")), {})
        if owner.get("uid") == observed.uid and "deletionTimestamp" not in metadata:
            if training_of(existing) != observed.name:  # the label by which the watch finds it was changed
                return await self._apply(observed, Apply(manifest, metadata["uid"]))
            self._store(observed, kind, existing)
            return None
        earlier = owner.get("kind") == v1alpha1.KIND and owner.get("name") == observed.name
        if earlier or owner.get("uid") == observed.uid:
            return RefusedWrite(write, "Cleaning", f"an earlier {kind.name} {name} is still being deleted")
        message = (
            f"{kind.name} {name} exists and does not belong to this training. Delete it, or create the training under "
            "another name"
        )
        return RefusedWrite(write, "NameTaken", message)

    async def _apply(self, observed: Observed, write: Apply) -> RefusedWrite | None:
        manifest, kind = write.manifest, WRITTEN[write.manifest["kind"]]
        name = manifest["metadata"]["name"]
        path = kind.path(observed.namespace, name)
        guarded = {**manifest, "metadata": {**manifest["metadata"], "uid": write.uid}}
        try:
            current = await self._client.get(path)
            if current["metadata"]["uid"] == write.uid:
                if is_as_desired(current, manifest):
                    self._store(observed, kind, current, written=True)
                    return None
                await self._take_over_fields(path, current["metadata"])
            applied = await self._client.patch(path, guarded, APPLY_PATCH, APPLY_OPTIONS)
        except (NotFound, Forbidden, Invalid) as error:
            if isinstance(error, NotFound) or _other_object(error):
                return RefusedWrite(write, "Cleaning", f"{kind.name} {name} is gone and will be created again")
            if _immutable(error):
                await self._delete(observed, Delete(kind.name, name, write.uid))
                return RefusedWrite(write, "Cleaning", f"{kind.name} {name} was immutable and will be created again")
            return refusal(write, kind, observed.namespace, name, "get or patch", error)
        self._store(observed, kind, applied, written=True)
        return None

    async def _take_over_fields(self, path: str, metadata: JsonObject) -> None:
        """Change the owner of fields that the operator wrote by create or patch, so that an apply can remove them.

        metadata: metadata of the object as it was read. Raises Conflict if the object has changed meanwhile.
        """
        if (entries := taken_over(metadata.get("managedFields", ()))) is None:
            return
        values = {"/metadata/resourceVersion": metadata["resourceVersion"], "/metadata/managedFields": entries}
        steps = [{"op": "replace", "path": place, "value": value} for place, value in values.items()]
        await self._client.patch(path, steps, JSON_PATCH)

    async def _scale(self, observed: Observed, scale: Scale) -> RefusedWrite | None:
        group = f"/spec/workerGroupSpecs/{scale.index}"
        tests = {
            "/metadata/uid": scale.uid,
            f"{group}/groupName": scale.group,
            f"{group}/replicas": scale.current_replicas,
        }
        values: dict[str, Any] = {
            "replicas": scale.replicas,
            "minReplicas": scale.min_replicas,
            "maxReplicas": scale.max_replicas,
        }
        if scale.pods_to_delete:
            values["scaleStrategy"] = {"workersToDelete": list(scale.pods_to_delete)}
        patch = [{"op": "test", "path": path, "value": value} for path, value in tests.items()]
        patch += [{"op": "add", "path": f"{group}/{name}", "value": value} for name, value in values.items()]
        try:
            scaled = await self._client.patch(RAY_CLUSTER.path(observed.namespace, scale.cluster), patch, JSON_PATCH)
        except (NotFound, Invalid, Forbidden) as error:
            if isinstance(error, NotFound) or (isinstance(error, Invalid) and not error.details.get("causes")):
                # A test of the patch has failed: another party has changed the cluster and the event has not arrived yet.
                raise Conflict(error.status, error.message) from error
            return refusal(scale, RAY_CLUSTER, observed.namespace, scale.cluster, "patch", error)
        self._store(observed, RAY_CLUSTER, scaled)
        return None

    async def _delete(self, observed: Observed, delete: Delete) -> RefusedWrite | None:
        options = {"propagationPolicy": "Background", "preconditions": {"uid": delete.uid}}
        kind = WRITTEN[delete.kind]
        try:
            answer = await self._client.delete(kind.path(observed.namespace, delete.name), options)
        except NotFound:
            self._remove(observed, kind, delete.uid)  # the watch may be late
            return None
        except Conflict:
            # Either a later object has the name, or another write has changed the object meanwhile. A kind that the operator may
            # not watch sends no event that distinguishes the two.
            if kind not in OPTIONAL or await self._exists(observed, kind, delete):
                raise
            self._remove(observed, kind, delete.uid)
            return None
        except (Forbidden, Invalid) as error:
            return refusal(delete, kind, observed.namespace, delete.name, "delete", error)
        if answer.get("kind") == kind.name:
            self._store(observed, kind, answer)  # it has finalizers and is being deleted
        else:
            self._remove(observed, kind, delete.uid)
        return None

    async def _exists(self, observed: Observed, kind: ObjectKind, delete: Delete) -> bool:
        """Return whether the object to delete still exists, according to the API server. Raises ApiError if it does not say."""
        try:
            existing = await self._client.get(kind.path(observed.namespace, delete.name))
        except NotFound:
            return False
        return bool(existing["metadata"]["uid"] == delete.uid)

    async def _remove_finalizer(self, observed: Observed, write: RemoveFinalizer) -> RefusedWrite | None:
        remaining = [name for name in observed.finalizers if name != write.name]
        patch = {"metadata": {"resourceVersion": observed.version, "finalizers": remaining}}
        try:
            await self._client.patch(TRAINING.path(observed.namespace, observed.name), patch, MERGE_PATCH)
        except NotFound:
            return None
        except Forbidden as error:
            return refusal(write, TRAINING, observed.namespace, observed.name, "patch", error)
        return None

    async def _post_event(self, observed: Observed, event: PostEvent) -> None:
        """Post an event. If this fails, the failure is only logged, because no decision depends on events."""
        now = self._client.now()
        while self._posted and now - next(iter(self._posted.values())) >= EVENT_REPEAT_TIME:
            del self._posted[next(iter(self._posted))]  # the oldest is first
        key = observed.uid, event.reason, event.message
        if key in self._posted:
            return
        self._posted[key] = now
        time = now.strftime("%Y-%m-%dT%H:%M:%SZ")
        subject = {"apiVersion": f"{v1alpha1.GROUP}/{v1alpha1.VERSION}", "kind": v1alpha1.KIND, "name": observed.name}
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"namespace": observed.namespace, "generateName": f"{observed.name}."},
            "involvedObject": {**subject, "namespace": observed.namespace, "uid": observed.uid},
            "type": event.type,
            "reason": event.reason,
            "message": cut(event.message, MAX_EVENT_BYTES),
            "source": {"component": self._component},
            "firstTimestamp": time,
            "lastTimestamp": time,
            "count": 1,
        }
        try:
            await self._client.post(EVENT.path(observed.namespace), body)
        except ApiError as error:
            logger.warning("%s/%s: event %s was not posted: %s", observed.namespace, observed.name, event.reason, error)

    def _store(self, observed: Observed, kind: ObjectKind, raw: JsonObject, *, written: bool = False) -> None:
        """Store the object that the API server returned for a request.

        An object that meanwhile has another training's label is not stored here: the watch updates both trainings.
        written: whether the object is as desired.
        """
        if training_of(raw) == observed.name:
            kind = watched_as(kind, raw)
            stored = record(kind, raw)
            if written and isinstance(stored, Child):
                stored = replace(stored, own_write=OwnWrite(stored.version, self._client.now(), stored.hash))
            self._cache.stores[kind].put_own(observed.name, stored)

    def _remove(self, observed: Observed, kind: ObjectKind, uid: str) -> None:
        """Remove the record of a deleted object from the stores of its kind."""
        for store in (store for watched, store in self._cache.stores.items() if watched.name == kind.name):
            for stored in list(store.of((observed.namespace, observed.name))):
                if stored.uid == uid:
                    store.remove(stored.namespace, stored.name, stored.uid, stored.version)


def refusal(
    write: ClusterWrite, kind: ObjectKind, namespace: str, name: str, verb: str, error: ApiError
) -> RefusedWrite:
    """Return the refused write with the reason of the API server's error, and a message that says what to do.

    verb: what was requested, such as "create".
    """
    if isinstance(error, NotFound):
        message = f"the cluster has no kind {kind.resource}: KubeRay is not installed. Install KubeRay 1.5.1 or newer"
        return RefusedWrite(write, "KubeRayMissing", message)
    if isinstance(error, Denied):
        fix = "Allow it, or delete it yourself" if isinstance(write, Delete) else "Change spec, or the policy"
        return RefusedWrite(write, "Rejected", f"{kind.name} {name}: {error.message}. {fix}")
    if isinstance(error, Forbidden):
        if "exceeded quota" in error.message:
            message = f"{kind.name} {name}: {error.message}. Raise the quota, or free some of it"
            return RefusedWrite(write, "QuotaExceeded", message)
        message = f"the operator may not {verb} {kind.resource} in namespace {namespace}: {error.message}. Grant it"
        return RefusedWrite(write, "Forbidden", message)
    if kind.group == "ray.io" and "unknown field" in error.message:
        message = (
            f"the installed KubeRay does not know a field that {name} needs: {error.message}. Install KubeRay 1.5.1 or "
            "newer"
        )
        return RefusedWrite(write, "KubeRayTooOld", message)
    if isinstance(write, Delete):
        message = (
            f"the API server refuses to delete {kind.name} {name}: {error.message}. Allow it, or delete it yourself"
        )
        return RefusedWrite(write, "Rejected", message)
    causes = (error.details.get("causes") or [])[:MAX_CAUSES]
    shown = "; ".join(f"{cause.get('field', '')}: {cause.get('message', '')}" for cause in causes) or error.message
    message = f"the API server refuses {kind.name} {name}: {shown}. Change spec accordingly"
    return RefusedWrite(write, "Rejected", message)


def _named(write: ClusterWrite) -> str:
    """Return a name of the write, for people."""
    match write:
        case Create(manifest=manifest):
            return f"the creation of {manifest['kind']} {manifest['metadata']['name']}"
        case Apply(manifest=manifest):
            verb = "repair" if write.is_repair else "change"
            return f"the {verb} of {manifest['kind']} {manifest['metadata']['name']}"
        case Scale():
            return f"the change of RayCluster {write.cluster} to {write.replicas} nodes of {write.group}"
        case Delete():
            return f"the deletion of {write.kind} {write.name}"
        case RemoveFinalizer():
            return f"the removal of the finalizer {write.name}"
        case PostEvent():
            return f"the event {write.reason}"


def _other_object(error: ApiError) -> bool:
    """Return whether `error` means that the uid in a patch is not the uid of the object that has this name now."""
    return any(cause.get("field") == "metadata.uid" for cause in error.details.get("causes") or [])


def _immutable(error: ApiError) -> bool:
    """Return whether `error` is the answer to a change of a ConfigMap in which somebody has set `immutable`."""
    return any("when `immutable` is set" in cause.get("message", "") for cause in error.details.get("causes") or [])


def _namespace_terminating(error: ApiError) -> bool:
    """Return whether `error` means that the namespace is being deleted or does not exist any more."""
    causes = error.details.get("causes") or []
    gone = isinstance(error, NotFound) and error.details.get("kind") == "namespaces"
    return gone or any(cause.get("reason") == NAMESPACE_TERMINATING for cause in causes)

"""Carry out a decision's actions, in order, up to the first that is refused.

Every write is guarded: a creation by its name, all else by the uid or a test, so that acting twice, or on an old view, does
nothing. What the API server answers is put into the stores at once.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from qwen35_operator.api import v1alpha1
from qwen35_operator.kube.client import JSON_PATCH, MERGE_PATCH, Client, Json
from qwen35_operator.kube.cluster import Cluster
from qwen35_operator.kube.errors import ApiError, Conflict, Forbidden, Invalid, NotFound
from qwen35_operator.kube.kinds import EVENT, RAY_CLUSTER, WRITTEN, Kind, watched_as
from qwen35_operator.kube.parse import record, training_of
from qwen35_operator.kube.store import Key
from qwen35_operator.reconcile.actions import Action, Announce, Create, Delete, Refused, Scale, Update
from qwen35_operator.reconcile.observed import Observed

logger = logging.getLogger(__name__)

REPEAT = timedelta(minutes=10)
"""The same event of the same training is posted once within this time."""
TERMINATING = "NamespaceTerminating"


class Actor:
    """Writes to the cluster."""

    def __init__(
        self, client: Client, cluster: Cluster, component: str, progressed: Callable[[Key], None] = lambda key: None
    ) -> None:
        """`progressed` is told of each write that is carried out: a failure after it is the first of its kind."""
        self._client = client
        self._cluster = cluster
        self._component = component
        self._progressed = progressed
        self._announced: dict[tuple[str, str, str], datetime] = {}

    async def act(self, seen: Observed, actions: Sequence[Action]) -> Refused | None:
        """All of them, or the first that was refused. Raises ApiError for what may go better another time."""
        for action in actions:
            if (refused := await self._do(seen, action)) is not None:
                return refused
            if not isinstance(action, Announce):
                self._progressed((seen.namespace, seen.name))
        return None

    async def _do(self, seen: Observed, action: Action) -> Refused | None:
        match action:
            case Create(manifest):
                return await self._create(seen, action, manifest)
            case Update(manifest, uid):
                return await self._update(seen, action, manifest, uid)
            case Scale():
                return await self._scale(seen, action)
            case Delete():
                return await self._delete(seen, action)
            case Announce():
                await self._announce(seen, action)
        return None

    async def _create(self, seen: Observed, action: Create, manifest: Mapping[str, Any]) -> Refused | None:
        kind, name = WRITTEN[manifest["kind"]], manifest["metadata"]["name"]
        try:
            made = await self._client.post(kind.path(seen.namespace), manifest, {"fieldValidation": "Strict"})
        except Conflict:
            return await self._meet(seen, action, kind, manifest)
        except (Forbidden, Invalid, NotFound) as error:
            return None if _going(error) else refusal(action, kind, seen.namespace, name, "create", error)
        self._put(seen, kind, made)
        return None

    async def _meet(self, seen: Observed, action: Create, kind: Kind, manifest: Mapping[str, Any]) -> Refused | None:
        """Something has the name already: ours, from before, or somebody else's."""
        name = manifest["metadata"]["name"]
        try:
            there = await self._client.get(kind.path(seen.namespace, name))
        except NotFound:
            return Refused(action, "Cleaning", f"{kind.name} {name} was just deleted; it is created anew at once")
        about = there["metadata"]
        owner: Json = next((one for one in about.get("ownerReferences", ()) if one.get("controller")), {})
        if owner.get("uid") == seen.uid and "deletionTimestamp" not in about:
            if training_of(there) != seen.name:  # somebody has changed the label by which it is found
                return await self._update(seen, action, manifest, about["uid"])
            self._put(seen, kind, there)
            return None
        earlier = owner.get("kind") == v1alpha1.KIND and owner.get("name") == seen.name
        if earlier or owner.get("uid") == seen.uid:
            return Refused(action, "Cleaning", f"{kind.name} {name} of before is still being deleted")
        message = f"{kind.name} {name} exists and is not this training's. Delete it, or create the training under another name"
        return Refused(action, "NameTaken", message)

    async def _update(
        self, seen: Observed, action: Create | Update, manifest: Mapping[str, Any], uid: str
    ) -> Refused | None:
        kind, name = WRITTEN[manifest["kind"]], manifest["metadata"]["name"]
        guarded = {**manifest, "metadata": {**manifest["metadata"], "uid": uid}}
        try:
            made = await self._client.patch(kind.path(seen.namespace, name), guarded, MERGE_PATCH)
        except (NotFound, Conflict):
            return Refused(action, "Cleaning", f"{kind.name} {name} is gone; it is created anew at once")
        except (Forbidden, Invalid) as error:
            return refusal(action, kind, seen.namespace, name, "patch", error)
        self._put(seen, kind, made)
        return None

    async def _scale(self, seen: Observed, action: Scale) -> Refused | None:
        group = f"/spec/workerGroupSpecs/{action.index}"
        tests = {"/metadata/uid": action.uid, f"{group}/groupName": action.group, f"{group}/replicas": action.present}
        values: dict[str, Any] = {"replicas": action.wanted, "minReplicas": action.least, "maxReplicas": action.most}
        if action.victims:
            values["scaleStrategy"] = {"workersToDelete": list(action.victims)}
        patch = [{"op": "test", "path": path, "value": value} for path, value in tests.items()]
        patch += [{"op": "add", "path": f"{group}/{name}", "value": value} for name, value in values.items()]
        try:
            made = await self._client.patch(RAY_CLUSTER.path(seen.namespace, action.cluster), patch, JSON_PATCH)
        except (NotFound, Invalid) as error:
            # Somebody else has changed it, and the watch has not told yet: look again.
            raise Conflict(error.status, error.message) from error
        except Forbidden as error:
            return refusal(action, RAY_CLUSTER, seen.namespace, action.cluster, "patch", error)
        self._put(seen, RAY_CLUSTER, made)
        return None

    async def _delete(self, seen: Observed, action: Delete) -> Refused | None:
        options = {"propagationPolicy": "Background", "preconditions": {"uid": action.uid}}
        kind = WRITTEN[action.kind]
        try:
            left = await self._client.delete(kind.path(seen.namespace, action.name), options)
        except NotFound:
            return None
        except Forbidden as error:
            return refusal(action, kind, seen.namespace, action.name, "delete", error)
        if left.get("kind") == kind.name:
            self._put(seen, kind, left)  # it has finalizers, and is on its way out
        else:
            for store in (store for watched, store in self._cluster.stores.items() if watched.name == kind.name):
                for one in list(store.of((seen.namespace, seen.name))):
                    if one.uid == action.uid:
                        store.remove(one.namespace, one.name, one.uid, one.version)
        return None

    async def _announce(self, seen: Observed, action: Announce) -> None:
        """Best effort: nothing depends on an event."""
        now = self._client.now()
        while self._announced and now - next(iter(self._announced.values())) >= REPEAT:
            del self._announced[next(iter(self._announced))]  # the oldest is the first
        key = seen.uid, action.reason, action.message
        if key in self._announced:
            return
        self._announced[key] = now
        stamp = now.strftime("%Y-%m-%dT%H:%M:%SZ")
        about = {"namespace": seen.namespace, "generateName": f"{seen.name}."}
        subject = {"apiVersion": f"{v1alpha1.GROUP}/{v1alpha1.VERSION}", "kind": v1alpha1.KIND, "name": seen.name}
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": about,
            "involvedObject": {**subject, "namespace": seen.namespace, "uid": seen.uid},
            "type": action.type,
            "reason": action.reason,
            "message": action.message[:1024],
            "source": {"component": self._component},
            "firstTimestamp": stamp,
            "lastTimestamp": stamp,
            "count": 1,
        }
        try:
            await self._client.post(EVENT.path(seen.namespace), event)
        except ApiError as error:
            logger.warning("%s/%s: event %s was not posted: %s", seen.namespace, seen.name, action.reason, error)

    def _put(self, seen: Observed, kind: Kind, raw: Json) -> None:
        """Know at once what was written. What has another training's label by now is the watch's: it tells both."""
        if training_of(raw) == seen.name:
            kind = watched_as(kind, raw)
            self._cluster.stores[kind].put_own(seen.name, record(kind, raw))


def refusal(action: Action, kind: Kind, namespace: str, name: str, verb: str, error: ApiError) -> Refused:
    """Why the API server would not, in words that say what to do."""
    said = error.message
    if isinstance(error, NotFound):
        message = f"there is no kind {kind.resource}: KubeRay is not installed. Install KubeRay 1.5.1 or newer"
        return Refused(action, "KubeRayMissing", message)
    if isinstance(error, Forbidden):
        if "exceeded quota" in said:
            return Refused(action, "QuotaExceeded", f"{kind.name} {name}: {said}. Raise the quota, or free some of it")
        message = f"the operator may not {verb} {kind.resource} in namespace {namespace}: {said}. Grant it"
        return Refused(action, "Forbidden", message)
    if kind.group == "ray.io" and "unknown field" in said:
        message = f"the installed KubeRay does not know what {name} needs: {said}. Install KubeRay 1.5.1 or newer"
        return Refused(action, "KubeRayTooOld", message)
    causes = error.details.get("causes") or []
    shown = "; ".join(f"{one.get('field', '')}: {one.get('message', '')}" for one in causes[:10]) or said
    return Refused(action, "Rejected", f"the API server refuses {kind.name} {name}: {shown}. Change spec accordingly")


def _going(error: ApiError) -> bool:
    """Whether the namespace goes, or has gone, and everything in it too."""
    causes = error.details.get("causes") or []
    gone = isinstance(error, NotFound) and error.details.get("kind") == "namespaces"
    return gone or any(one.get("reason") == TERMINATING for one in causes)

"""An API server in memory, with the names, uids, versions and preconditions of the real one. Tests can make it refuse."""

import json
from collections.abc import Awaitable, Callable, Mapping
from copy import deepcopy
from datetime import UTC, datetime
from typing import Any

from qwen35_operator.kube.api_errors import ApiError, Conflict, Invalid, NotFound
from qwen35_operator.kube.client import APPLY_PATCH, JSON_PATCH, PLAIN, JsonObject, Query

START = datetime(2026, 1, 1, tzinfo=UTC)


async def _nothing(verb: str, path: str) -> None: ...


class MemoryApi:
    """Implements the Client protocol. `before` is called with every request first, and may raise or wait."""

    def __init__(self, before: Callable[[str, str], Awaitable[None]] = _nothing) -> None:
        self.objects: dict[str, JsonObject] = {}
        self.requests: list[tuple[str, str]] = []
        self.bodies: list[Any] = []
        self.queries: list[Query | None] = []
        self.before = before
        self.time = START
        self._count = 0

    # What tests do.

    def place(self, path: str, raw: Mapping[str, Any]) -> JsonObject:
        """Store an object, replacing any earlier one."""
        body = json.loads(json.dumps(raw))
        metadata = body["metadata"]
        metadata["resourceVersion"] = self._next()
        metadata.setdefault("uid", f"uid-{metadata['resourceVersion']}")
        metadata.setdefault("creationTimestamp", self.time.strftime("%Y-%m-%dT%H:%M:%SZ"))
        self.objects[path] = body
        return deepcopy(body)

    def refuse(self, verb: str, plural: str, *errors: ApiError) -> None:
        """Refuse the next requests of this verb and resource, one with each of the errors."""
        remaining = list(errors)
        earlier = self.before

        async def before(method: str, path: str) -> None:
            await earlier(method, path)
            if remaining and method == verb and plural in path.split("/"):
                raise remaining.pop(0)

        self.before = before

    def wrote(self) -> list[tuple[str, str]]:
        """The verb and the last part of the path of every write."""
        return [(verb, path.rsplit("/", 1)[1]) for verb, path in self.requests if verb != "GET"]

    # The protocol.

    def now(self) -> datetime:
        return self.time

    async def get(self, path: str, query: Query | None = None, *, accept: str = PLAIN) -> JsonObject:
        await self._asked("GET", path, None, query)
        return deepcopy(self._at(path))

    async def post(self, path: str, body: Mapping[str, Any], query: Query | None = None) -> JsonObject:
        await self._asked("POST", path, body, query)
        metadata = body["metadata"]
        name = metadata.get("name") or f"{metadata['generateName']}{self._next()}"
        if f"{path}/{name}" in self.objects:
            raise Conflict(409, f"{name} already exists")
        return self.place(f"{path}/{name}", {**body, "metadata": {**metadata, "name": name}})

    async def put(self, path: str, body: Mapping[str, Any]) -> JsonObject:
        await self._asked("PUT", path, body)
        if body["metadata"]["resourceVersion"] != self._at(path)["metadata"]["resourceVersion"]:
            raise Conflict(409, "the object has been modified")
        return self.place(path, body)

    async def patch(self, path: str, body: Any, kind: str, query: Query | None = None) -> JsonObject:
        await self._asked("PATCH", path, body, query)
        path = path.removesuffix("/status")
        if kind == APPLY_PATCH and path not in self.objects:
            raise Conflict(409, "uid mismatch: no existing object was found")
        there = deepcopy(self._at(path))
        changed = _patched(there, body) if kind == JSON_PATCH else _merged(there, body)
        if changed["metadata"]["uid"] != there["metadata"]["uid"]:
            # Unlike a deletion, a patch has no preconditions: the uid is a field that cannot change.
            cause = {"reason": "FieldValueInvalid", "field": "metadata.uid", "message": "field is immutable"}
            raise Invalid(422, "metadata.uid: field is immutable", {"causes": [cause]})
        if changed["metadata"]["resourceVersion"] != there["metadata"]["resourceVersion"]:
            raise Conflict(409, "the object has been modified")
        return deepcopy(there) if changed == there else self.place(path, changed)

    async def delete(self, path: str, body: Mapping[str, Any]) -> JsonObject:
        await self._asked("DELETE", path, body)
        there = self._at(path)
        if body["preconditions"]["uid"] != there["metadata"]["uid"]:
            raise Conflict(409, "the uid in the precondition is not the object's")
        if there["metadata"].get("finalizers"):
            there["metadata"]["deletionTimestamp"] = self.time.strftime("%Y-%m-%dT%H:%M:%SZ")
            return self.place(path, there)
        del self.objects[path]
        return {"kind": "Status", "status": "Success"}

    async def _asked(self, verb: str, path: str, body: Any, query: Query | None = None) -> None:
        self.requests.append((verb, path))
        self.bodies.append(deepcopy(body))
        self.queries.append(query)
        await self.before(verb, path)

    def _at(self, path: str) -> JsonObject:
        if path not in self.objects:
            raise NotFound(404, f"{path} not found")
        return self.objects[path]

    def _next(self) -> str:
        self._count += 1
        return str(self._count)


def _patched(raw: JsonObject, patch: list[JsonObject]) -> JsonObject:
    changed = deepcopy(raw)
    for step in patch:
        *way, last = step["path"].strip("/").split("/")
        place: Any = changed
        for part in way:
            inside = dict(enumerate(place)) if isinstance(place, list) else place
            place = inside.get(int(part) if isinstance(place, list) else part)
            if place is None:
                raise Invalid(422, f"there is no {step['path']}")
        if step["op"] == "test" and place.get(last) != step["value"]:
            raise Invalid(422, f"testing {step['path']} failed")
        if step["op"] != "test":
            place[last] = step["value"]
    return changed


def _merged(raw: Any, patch: Any) -> Any:
    if not isinstance(patch, Mapping) or not isinstance(raw, Mapping):
        return deepcopy(patch)
    merged = {**raw, **{name: _merged(raw.get(name), value) for name, value in patch.items()}}
    return {name: value for name, value in merged.items() if value is not None}

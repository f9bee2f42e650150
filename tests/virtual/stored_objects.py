"""The objects of the API server in memory, and the history of their changes."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from tests.virtual.resources import Resource

type Key = tuple[Resource, str, str]
"""Kind, namespace (empty for a kind without namespaces) and name."""
type Body = Mapping[str, Any]


@dataclass(frozen=True)
class Stored:
    """One version of an object. The body is never changed: clients get copies of `text`."""

    resource: Resource
    body: Body

    @cached_property
    def text(self) -> bytes:
        return json.dumps(self.body, separators=(",", ":")).encode()

    @property
    def metadata(self) -> Body:
        return self.body["metadata"]

    @property
    def key(self) -> Key:
        return self.resource, self.metadata.get("namespace", ""), self.metadata["name"]

    @property
    def version(self) -> int:
        return int(self.metadata["resourceVersion"])

    def copy(self) -> dict[str, Any]:
        return dict(json.loads(self.text))


@dataclass(frozen=True)
class Change:
    """One change of one object. before: None if it was created. after: as it is, or was when it was deleted."""

    kind: Literal["ADDED", "MODIFIED", "DELETED"]
    before: Stored | None
    after: Stored

    @property
    def version(self) -> int:
        return self.after.version


@dataclass
class Objects:
    """All objects by kind, namespace and name."""

    version: int = 0
    """resourceVersion of the latest change."""
    compacted: int = 0
    """A watch cannot begin at this resourceVersion or before it."""
    changes: list[Change] = field(default_factory=list)
    _objects: dict[Key, Stored] = field(default_factory=dict)
    _listeners: list[Callable[[Change], None]] = field(default_factory=list)

    def next_version(self) -> str:
        self.version += 1
        return str(self.version)

    def find(self, resource: Resource, namespace: str | None, name: str) -> Stored | None:
        return self._objects.get((resource, namespace or "", name))

    def of(self, resource: Resource, namespace: str | None = None) -> Iterator[Stored]:
        """All objects of a kind, in all namespaces or in one, ordered by name as the API server lists them."""
        keys = [key for key in self._objects if key[0] is resource and namespace in (None, key[1])]
        for key in sorted(keys, key=lambda key: key[1:]):
            yield self._objects[key]

    def all(self) -> tuple[Stored, ...]:
        return tuple(self._objects.values())

    def put(self, stored: Stored) -> None:
        """Store a new object or a new version of one."""
        before = self._objects.get(stored.key)
        self._objects[stored.key] = stored
        self._record(Change("ADDED" if before is None else "MODIFIED", before, stored))

    def remove(self, last: Stored) -> None:
        """Remove an object. last: the object with the resourceVersion of its deletion."""
        before = self._objects.pop(last.key)
        self._record(Change("DELETED", before, last))

    def listen(self, heard: Callable[[Change], None]) -> Callable[[], None]:
        """Call `heard` after every change. Returns the function that ends this."""
        self._listeners.append(heard)
        return lambda: self._listeners.remove(heard)

    def compact(self) -> None:
        """Forget all changes so far, as etcd does after some minutes."""
        self.compacted = self.version
        self.changes.clear()

    def _record(self, change: Change) -> None:
        self.changes.append(change)
        for heard in tuple(self._listeners):
            heard(change)

"""The trainings themselves, as kopf's events have them. Kept as compact JSON: a parsed object takes ten times as much."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from qwen35_operator.kube.store import Key

type Raw = Mapping[str, Any]


class Trainings:
    """The newest known body of each training."""

    def __init__(self) -> None:
        self._bodies: dict[Key, tuple[int, str, bytes]] = {}  # version, uid, JSON

    def __len__(self) -> int:
        return len(self._bodies)

    def __iter__(self) -> Iterator[Key]:
        return iter(tuple(self._bodies))

    def put(self, raw: Raw) -> bool:
        """Take a body in. False when it is no news."""
        about = raw["metadata"]
        key, version = (about["namespace"], about["name"]), int(about["resourceVersion"])
        known = self._bodies.get(key)
        if known is not None and version <= known[0]:
            return False
        slim = {**raw, "metadata": {name: value for name, value in about.items() if name != "managedFields"}}
        self._bodies[key] = version, about["uid"], json.dumps(slim, separators=(",", ":")).encode()
        return True

    def put_own(self, raw: Raw) -> None:
        """Take in the answer to a write of ours, unless the training was deleted meanwhile."""
        about = raw["metadata"]
        known = self._bodies.get((about["namespace"], about["name"]))
        if known is not None and known[1] == about["uid"]:
            self.put(raw)

    def remove(self, key: Key, uid: str) -> None:
        """Forget a deleted one, unless a later one has its name."""
        known = self._bodies.get(key)
        if known is not None and known[1] == uid:
            del self._bodies[key]

    def get(self, key: Key) -> dict[str, Any] | None:
        known = self._bodies.get(key)
        return None if known is None else json.loads(known[2])

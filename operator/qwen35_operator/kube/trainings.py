"""The trainings themselves, as kopf's events have them. Kept as compact JSON: a parsed object takes ten times as much."""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from qwen35_operator.kube.kinds import TRAINING
from qwen35_operator.kube.store import Key
from qwen35_operator.kube.watch import not_listed
from qwen35_trainer.spec import Problem

type Raw = Mapping[str, Any]


class Trainings:
    """The newest known body of each training. `problem` says why they cannot be seen, while they cannot."""

    def __init__(self) -> None:
        self.problem: Problem | None = not_listed(TRAINING)
        self._bodies: dict[Key, tuple[int, str, str, bytes]] = {}  # version, uid, state, JSON

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
        state = sys.intern((raw.get("status") or {}).get("state", "Pending"))
        self._bodies[key] = version, about["uid"], state, json.dumps(slim, separators=(",", ":")).encode()
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
        return None if known is None else json.loads(known[3])

    def states(self) -> Counter[str]:
        """How many are in each state; Pending is also that of those which have no status yet."""
        return Counter(state for _, _, state, _ in self._bodies.values())

"""What the watches have seen of one kind, by namespace and training. A cache: it may be behind, and is never ahead.

An event that is older than what is known of the same object is ignored, so that a watch that replays does no harm.
Answers to our own writes are put in at once: the next decision sees what the last one did. An answer may come after the
watch has told of the object's end; it must not bring the object back, since nothing would end it again.
"""

from collections import defaultdict
from collections.abc import Iterable

from qwen35_operator.kube.parse import Record

type Key = tuple[str, str]
"""Namespace and name of a training."""


class Store:
    """Records of one kind."""

    def __init__(self) -> None:
        self._records: dict[Key, dict[str, Record]] = defaultdict(dict)
        self._owner: dict[Key, Key] = {}  # namespace and name of the object → its training
        self._ended: dict[str | None, int] = {}  # by namespace, or all: newest version as of which ends are known

    def of(self, training: Key) -> Iterable[Record]:
        """The objects of a training."""
        return self._records.get(training, {}).values()

    def put(self, training: str, record: Record) -> bool:
        """Take a record in. False when it is no news."""
        known = self._known(record.namespace, record.name)
        if known is not None and known.uid == record.uid and int(record.version) <= int(known.version):
            return False
        if known is not None and int(record.version) < int(known.version):
            return False  # of an object that was deleted since
        key = record.namespace, training
        self._drop(record.namespace, record.name)
        self._records[key][record.name] = record
        self._owner[record.namespace, record.name] = key
        return True

    def put_own(self, training: str, record: Record) -> bool:
        """Take in the answer to a write of ours. False when it is no news."""
        known = self._known(record.namespace, record.name)
        told = max(self._ended.get(record.namespace, 0), self._ended.get(None, 0))
        if (known is None or known.uid != record.uid) and int(record.version) <= told:
            return False  # the watch is past it
        return self.put(training, record)

    def remove(self, namespace: str, name: str, uid: str, version: str) -> bool:
        """Forget a deleted object. False when something newer has its name."""
        self._end(namespace, version)
        known = self._known(namespace, name)
        if known is None or (known.uid != uid and int(version) < int(known.version)):
            return False
        self._drop(namespace, name)
        return True

    def replace(self, namespace: str | None, records: Iterable[tuple[str, Record]], version: str) -> set[Key]:
        """A complete list as of `version`, of a namespace or of all. Returns the trainings for which it was news."""
        self._end(namespace, version)
        changed: set[Key] = set()
        listed: set[Key] = set()
        for training, record in records:
            listed.add((record.namespace, record.name))
            if self.put(training, record):
                changed.add((record.namespace, training))
        for where, name in list(self._owner):
            if (where, name) in listed or namespace not in (None, where):
                continue
            known = self._known(where, name)
            if known is not None and int(known.version) <= int(version):  # newer ones were created since
                changed.add(self._owner[where, name])
                self._drop(where, name)
        return changed

    def _end(self, namespace: str | None, version: str) -> None:
        self._ended[namespace] = max(self._ended.get(namespace, 0), int(version))

    def _known(self, namespace: str, name: str) -> Record | None:
        owner = self._owner.get((namespace, name))
        return None if owner is None else self._records[owner].get(name)

    def _drop(self, namespace: str, name: str) -> None:
        owner = self._owner.pop((namespace, name), None)
        if owner is not None:
            self._records[owner].pop(name, None)
            if not self._records[owner]:
                del self._records[owner]

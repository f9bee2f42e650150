"""What the watches have seen of one kind, by namespace and training. A cache: it may be behind, and is never ahead.

An event that is older than what is known of the same object is ignored, so that a watch that replays does no harm.
Every change names the trainings for which it is news: two of them when an object's label was moved to another.
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

    def put(self, training: str, record: Record) -> set[Key]:
        """Take a record in."""
        known = self._known(record.namespace, record.name)
        if known is not None and known.uid == record.uid and int(record.version) <= int(known.version):
            return set()
        if known is not None and int(record.version) < int(known.version):
            return set()  # of an object that was deleted since
        key = record.namespace, training
        changed = {key} | self._drop(record.namespace, record.name)
        self._records[key][record.name] = record
        self._owner[record.namespace, record.name] = key
        return changed

    def put_own(self, training: str, record: Record) -> set[Key]:
        """Take in the answer to a write of ours."""
        known = self._known(record.namespace, record.name)
        told = max(self._ended.get(record.namespace, 0), self._ended.get(None, 0))
        if (known is None or known.uid != record.uid) and int(record.version) <= told:
            return set()  # the watch is past it
        return self.put(training, record)

    def remove(self, namespace: str, name: str, uid: str, version: str) -> set[Key]:
        """Forget a deleted object, unless something newer has its name."""
        self._end(namespace, version)
        known = self._known(namespace, name)
        if known is None or (known.uid != uid and int(version) < int(known.version)):
            return set()
        return self._drop(namespace, name)

    def replace(self, namespace: str | None, records: Iterable[tuple[str, Record]], version: str) -> set[Key]:
        """A complete list as of `version`, of a namespace or of all."""
        self._end(namespace, version)
        changed: set[Key] = set()
        listed: set[Key] = set()
        for training, record in records:
            listed.add((record.namespace, record.name))
            changed |= self.put(training, record)
        for where, name in list(self._owner):
            if (where, name) in listed or namespace not in (None, where):
                continue
            known = self._known(where, name)
            if known is not None and int(known.version) <= int(version):  # newer ones were created since
                changed |= self._drop(where, name)
        return changed

    def _end(self, namespace: str | None, version: str) -> None:
        self._ended[namespace] = max(self._ended.get(namespace, 0), int(version))

    def _known(self, namespace: str, name: str) -> Record | None:
        owner = self._owner.get((namespace, name))
        return None if owner is None else self._records[owner].get(name)

    def _drop(self, namespace: str, name: str) -> set[Key]:
        """The training that had it."""
        owner = self._owner.pop((namespace, name), None)
        if owner is None:
            return set()
        self._records[owner].pop(name, None)
        if not self._records[owner]:
            del self._records[owner]
        return {owner}

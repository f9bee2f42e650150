"""Caches the records of one kind of object, by training. The cache may lag behind the API server but never goes back.

An event older than the stored record of the same object is ignored, so a watch may repeat events. Every method that
changes records returns the affected trainings. A change of an object affects its training, and also its previous
training if the object's label named another training before.

Answers to the operator's own writes are stored immediately, so that the next decision sees them. Such an answer may
arrive after the watch has reported the deletion of the object. In this case the answer is ignored, because no later
event would remove the restored record.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from qwen35_operator.kube.object_records import Child, ObjectRecord

type TrainingKey = tuple[str, str]
"""Namespace and name of a training."""


class Store:
    """The records of the known child objects of one kind, by training."""

    def __init__(self) -> None:
        self._records: dict[TrainingKey, dict[str, ObjectRecord]] = defaultdict(dict)
        self._training_of: dict[tuple[str, str], TrainingKey] = {}  # by namespace and name of the object
        # By namespace, None for all: all deletions up to this resourceVersion are known.
        self._deletions_known: dict[str | None, int] = {}

    def of(self, training: TrainingKey) -> Iterable[ObjectRecord]:
        """Return the records of a training's objects."""
        return self._records.get(training, {}).values()

    def put(self, training: str, record: ObjectRecord) -> set[TrainingKey]:
        """Store a record, unless the same or a newer version of the object is stored. Returns the affected trainings.

        A record from a watch has no `own_write`, which describes the operator's latest write of the object. It then gets
        the `own_write` of the record that it replaces, if that is of the same object. training: name of the training to
        which the object belongs.
        """
        stored = self._stored(record.namespace, record.name)
        if stored is not None and stored.uid == record.uid and int(record.version) <= int(stored.version):
            return set()
        if stored is not None and int(record.version) < int(stored.version):
            return set()  # of an object that has been deleted and created again since
        if isinstance(stored, Child) and isinstance(record, Child) and stored.uid == record.uid:
            own_write = record.own_write or stored.own_write
            record = record if own_write is record.own_write else replace(record, own_write=own_write)
        key = record.namespace, training
        changed = {key} | self._drop(record.namespace, record.name)
        self._records[key][record.name] = record
        self._training_of[record.namespace, record.name] = key
        return changed

    def put_own(self, training: str, record: ObjectRecord) -> set[TrainingKey]:
        """Store the answer to a write of the operator, unless the object has been deleted since.

        Returns the affected trainings. training: name of the training to which the object belongs.
        """
        stored = self._stored(record.namespace, record.name)
        deletions_known = max(self._deletions_known.get(record.namespace, 0), self._deletions_known.get(None, 0))
        if (stored is None or stored.uid != record.uid) and int(record.version) <= deletions_known:
            return set()  # the watch has already reported its deletion
        if stored is not None and (stored.uid, stored.version) == (record.uid, record.version):
            self._records[record.namespace, training][record.name] = record  # the watch's event was faster
            return set()
        return self.put(training, record)

    def remove(self, namespace: str, name: str, uid: str, version: str) -> set[TrainingKey]:
        """Remove the record of a deleted object. Returns the affected trainings.

        The record of a newer object with the same name is kept. version: the resourceVersion of the deletion.
        """
        self._advance(namespace, version)
        stored = self._stored(namespace, name)
        if stored is None or (stored.uid != uid and int(version) < int(stored.version)):
            return set()
        return self._drop(namespace, name)

    def replace(
        self, namespace: str | None, records: Iterable[tuple[str, ObjectRecord]], version: str
    ) -> set[TrainingKey]:
        """Replace the records of a namespace by a complete list. Returns the affected trainings.

        namespace: None for all namespaces. records: the listed objects, each with the name of its training. version:
        the resourceVersion of the list. Records that are newer than the list are kept.
        """
        self._advance(namespace, version)
        changed: set[TrainingKey] = set()
        listed: set[tuple[str, str]] = set()
        for training, record in records:
            listed.add((record.namespace, record.name))
            changed |= self.put(training, record)
        for object_namespace, name in list(self._training_of):
            if (object_namespace, name) in listed or namespace not in (None, object_namespace):
                continue
            stored = self._stored(object_namespace, name)
            if stored is not None and int(stored.version) <= int(version):  # newer objects were created after the list
                changed |= self._drop(object_namespace, name)
        return changed

    def _advance(self, namespace: str | None, version: str) -> None:
        self._deletions_known[namespace] = max(self._deletions_known.get(namespace, 0), int(version))

    def _stored(self, namespace: str, name: str) -> ObjectRecord | None:
        training = self._training_of.get((namespace, name))
        return None if training is None else self._records[training].get(name)

    def _drop(self, namespace: str, name: str) -> set[TrainingKey]:
        """Drop the record of an object. Returns its training, or an empty set if there was no record."""
        training = self._training_of.pop((namespace, name), None)
        if training is None:
            return set()
        self._records[training].pop(name, None)
        if not self._records[training]:
            del self._records[training]
        return {training}

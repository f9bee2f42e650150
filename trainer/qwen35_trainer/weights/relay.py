"""Plans which replica reads from which (a broadcast tree): replicas that have a version serve the others. Pure.

    train ranks ─┬─► replica ─► replica ─► replica         the first readers read from the train ranks, the others from replicas
                 ├─► replica ─► replica                    that have loaded the version
                 └─► …

The train ranks send a version at most `trainer_readers` times, however many replicas there are, unless reads fail or replicas
that have the version are lost. Each round of transfers doubles the number of replicas that have the version. A replica serves one
reader at a time, because two readers would each get half of its bandwidth, and neither could serve others before both had finished.

If a read fails, or if the reader is lost while it reads, either the source or the reader may be at fault. No further replica
then reads from this source, unless the source is the train ranks. But if the same reader fails MAX_FAILED_READS times, the reader
is taken to be at fault: it then reads from the train ranks, and the source of its last read stays in use. One bad reader
therefore costs one source, and not all of them.
"""

from __future__ import annotations

from collections import Counter

MIN_TRAINER_READERS = 4
"""Number of replicas that may always read from the train ranks at the same time.

With fewer readers, one slow replica could delay all others.
"""
REPLICA_READERS = 1
"""Maximum number of replicas that read from the same replica at the same time."""
MAX_FAILED_READS = 2
"""Number of failed reads of a version after which a replica reads this version only from the train ranks."""
TRAINER = -1
"""Number of the source that stands for all train ranks together. Replicas have numbers from 0."""


def trainer_readers(train_ranks: int, replica_ranks: int) -> int:
    """Return how many replicas may read from the train ranks at the same time.

    This is the number of replicas that together have the bandwidth of the train ranks, and at least
    MIN_TRAINER_READERS. train_ranks: number of ranks that hold a shard. replica_ranks: number of ranks of one replica.
    Each rank is assumed to have a device with a network interface.
    """
    return max(MIN_TRAINER_READERS, train_ranks // replica_ranks)


class Relay:
    """The distribution of one version: which replicas have loaded it, which read it from which source, and which wait.

    from_trainer: maximum number of replicas that read from the train ranks at the same time. from_replica: maximum
    number of replicas that read from the same replica at the same time.
    """

    def __init__(self, from_trainer: int = MIN_TRAINER_READERS, from_replica: int = REPLICA_READERS) -> None:
        self._limits = from_trainer, from_replica
        self._waiting: dict[int, None] = {}  # in the order of requests
        self._reading: dict[int, int] = {}  # reader → source
        self._sources: dict[int, None] = {}  # replicas that serve the version, in the order in which they loaded it
        self._failures: Counter[int] = Counter()  # number of failed reads of each replica

    @property
    def waiting(self) -> tuple[int, ...]:
        """The replicas that wait for a source, in the order of their requests."""
        return tuple(self._waiting)

    @property
    def reading(self) -> dict[int, int]:
        """Number of a replica that reads the version → number of its source (TRAINER or a replica)."""
        return dict(self._reading)

    def add(self, reader: int) -> None:
        """Add a replica to the queue of replicas that wait for a source from which to read the version.

        If the replica is reading, it does not count as a reader of its present source any more. If it already waits, it
        keeps its place in the queue.
        """
        self._reading.pop(reader, None)
        self._waiting[reader] = None

    def loaded(self, replica: int, *, serves: bool) -> None:
        """Record that a replica has loaded the version.

        serves: whether other replicas can read the version from this replica.
        """
        self._waiting.pop(replica, None)
        self._reading.pop(replica, None)
        if serves:
            self._sources[replica] = None

    def failed(self, reader: int) -> None:
        """Record that a replica could not read from its source. The replica waits again.

        The source serves no further replica, except in two cases: the source is the trainer, or `reader` has now failed
        MAX_FAILED_READS times.
        """
        self._failures[reader] += 1
        if not self._needs_trainer(reader):
            self._drop_source_of(reader)
        self.add(reader)

    def lost(self, replica: int) -> None:
        """Remove a replica that has ended.

        If the lost replica was reading from another replica, that source serves no further replica: the driver may have
        ended the reader because the source hangs. Replicas that were reading from the lost replica are not changed:
        their reads fail, and the caller reports each of them to `failed`.
        """
        self._drop_source_of(replica)
        for table in (self._waiting, self._reading, self._sources, self._failures):
            table.pop(replica, None)

    def assign(self) -> dict[int, int]:
        """Assign sources to waiting replicas. Returns replica → source for the replicas that can begin to read now.

        The source is TRAINER while no replica serves the version, and always for a reader that has failed
        MAX_FAILED_READS times. Otherwise the source is a replica.
        """
        begun: dict[int, int] = {}
        readers = Counter(self._reading.values())
        for needs_trainer in (True, False):
            for reader in (each for each in self.waiting if self._needs_trainer(each) == needs_trainer):
                source = self._free_source(readers, needs_trainer=needs_trainer)
                if source is None:
                    break
                del self._waiting[reader]
                self._reading[reader] = begun[reader] = source
                readers[source] += 1
        return begun

    def _needs_trainer(self, reader: int) -> bool:
        return self._failures[reader] >= MAX_FAILED_READS

    def _drop_source_of(self, reader: int) -> None:
        """Let the source from which a replica reads serve no further replica. The trainer stays a source."""
        self._sources.pop(self._reading.get(reader, TRAINER), None)

    def _free_source(self, readers: Counter[int], *, needs_trainer: bool) -> int | None:
        """Return the source with the smallest number of readers; None if that source has its maximum number of readers.

        readers: source → number of replicas that read from it. needs_trainer: whether the source must be TRAINER.
        Otherwise it is a replica, or TRAINER while no replica serves the version.
        """
        from_trainer, from_replica = self._limits
        if needs_trainer or not self._sources:
            return TRAINER if readers[TRAINER] < from_trainer else None
        source = min(self._sources, key=lambda each: readers[each])
        return source if readers[source] < from_replica else None


def waves(replicas: int, from_trainer: int = MIN_TRAINER_READERS) -> list[list[int]]:
    """Plan the transfers of a publication to `replicas` replicas. Returns one list for each wave of transfers.

    The list contains the source of each transfer: the number of a replica, or TRAINER. The transfers of a wave run
    together. All transfers are assumed to take equally long, so a wave begins when the wave before it has ended.
    from_trainer: maximum number of replicas that read from the train ranks at the same time.
    """
    relay = Relay(from_trainer)
    for replica in range(replicas):
        relay.add(replica)
    planned: list[list[int]] = []
    while begun := relay.assign():
        planned.append(list(begun.values()))
        for reader in begun:
            relay.loaded(reader, serves=True)
    return planned

"""Plans which replica reads from which: replicas that have a version serve the others. Pure.

    train ranks ─┬─► replica ─► replica ─► replica         the first readers read from the train ranks, the others from replicas
                 ├─► replica ─► replica                    that have loaded the version
                 └─► …

The train ranks send a version at most TRAINER_READERS times, however many replicas there are, unless replicas that have it are lost. The number of
replicas that have it doubles with each transfer: a replica serves one reader at a time, because two readers would each get half of its
bandwidth, and nobody could serve others before both had finished.
"""

from __future__ import annotations

from collections import Counter

TRAINER_READERS = 4
"""Maximum number of replicas that read from the train ranks at the same time: the bandwidth of the ranks adds up."""
REPLICA_READERS = 1
"""Maximum number of replicas that read from one replica at the same time."""
TRAINER = -1
"""The source that stands for all train ranks. Replicas have the numbers from 0."""


class Relay:
    """The state of one version: who has it, who reads it from whom, and who waits for it."""

    def __init__(self, trainer_readers: int = TRAINER_READERS, replica_readers: int = REPLICA_READERS) -> None:
        self._limits = trainer_readers, replica_readers
        self._waiting: dict[int, None] = {}  # in the order of requests
        self._reading: dict[int, int] = {}  # reader → source
        self._sources: dict[int, None] = {}  # replicas that serve the version, in the order in which they loaded it

    @property
    def waiting(self) -> tuple[int, ...]:
        """The replicas that have no source yet."""
        return tuple(self._waiting)

    @property
    def reading(self) -> dict[int, int]:
        """Replica that reads the version → its source."""
        return dict(self._reading)

    def add(self, reader: int) -> None:
        """Let a replica wait for the version. It waits once, whatever it did before."""
        self._reading.pop(reader, None)
        self._waiting[reader] = None

    def loaded(self, replica: int, *, serves: bool) -> None:
        """Record that a replica has loaded the version. serves: whether others can read it there."""
        self._waiting.pop(replica, None)
        self._reading.pop(replica, None)
        if serves:
            self._sources[replica] = None

    def failed(self, reader: int) -> None:
        """Record that a replica could not read from its source. It waits again, and the source serves nobody any more, unless it is the trainer."""
        source = self._reading.get(reader, TRAINER)
        self._sources.pop(source, None)
        self.add(reader)

    def lost(self, replica: int) -> None:
        """Forget a replica that has ended. Its readers find out themselves, and `failed` records that."""
        for table in (self._waiting, self._reading, self._sources):
            table.pop(replica, None)

    def assign(self) -> dict[int, int]:
        """Give sources to waiting replicas. Returns replica → source for those that can begin to read now.

        Replicas that have the version are preferred. The train ranks are read from only while no replica serves it.
        """
        begun: dict[int, int] = {}
        readers = Counter(self._reading.values())
        for reader in self.waiting:
            source = self._free_source(readers)
            if source is None:
                break
            del self._waiting[reader]
            self._reading[reader] = begun[reader] = source
            readers[source] += 1
        return begun

    def _free_source(self, readers: Counter[int]) -> int | None:
        """Return the source with the lowest number of readers that may have another one. readers: of each source."""
        trainer_readers, replica_readers = self._limits
        if not self._sources:
            return TRAINER if readers[TRAINER] < trainer_readers else None
        source = min(self._sources, key=lambda each: readers[each])
        return source if readers[source] < replica_readers else None


def waves(
    replicas: int, trainer_readers: int = TRAINER_READERS, replica_readers: int = REPLICA_READERS
) -> list[list[int]]:
    """Return the sources of each wave of a publication to `replicas` replicas whose transfers all take equally long.

    A wave begins when the one before has ended. Each entry of a wave is the source of one reader.
    """
    relay = Relay(trainer_readers, replica_readers)
    for replica in range(replicas):
        relay.add(replica)
    planned: list[list[int]] = []
    while begun := relay.assign():
        planned.append(list(begun.values()))
        for reader in begun:
            relay.loaded(reader, serves=True)
    return planned

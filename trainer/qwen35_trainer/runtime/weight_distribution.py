"""Sends the newest version of the weights to replicas.

    publish ─► every replica waits ─► `Relay` has a source for it ─► LoadWeights with that source ─► the replica's report
                    ▲                                                                                 │
                    │◄── it could not be read there (`EngineReport.unread`): another source ──────────┤
                    │                        the replica has loaded it, and others may read it there ─┘

waits on                           unblocked by                                          deadline
a replica: a source that is free   a report, or the loss, of a replica that reads there  PoolLimits.publish, in the rollout pool

A version in registered memory (RDMA) is relayed: replicas that have loaded it serve it to other replicas.
All other transports have one copy per machine, or a store that serves all replicas, so every replica gets
each version immediately.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

from qwen35_trainer.runtime.replica_channel import EngineReport
from qwen35_trainer.weights.published import PublishedWeights, RegisteredCopy, RegisteredShards
from qwen35_trainer.weights.relay import TRAINER, Relay, trainer_readers


class WeightReader(Protocol):
    """A replica to which versions of the weights can be sent."""

    @property
    def number(self) -> int: ...

    def send_weights(self, weights: PublishedWeights) -> None: ...


class WeightDistribution:
    """Decides when each replica gets the newest version, and from which source: the train ranks or another replica."""

    def __init__(self, replica_ranks: int = 1) -> None:
        """Create a distribution without a version. replica_ranks: number of ranks (devices) of one replica."""
        self._replica_ranks = replica_ranks
        self.newest: PublishedWeights | None = None
        self._relay = Relay()
        self._readers: dict[int, WeightReader] = {}  # replicas that were asked to load the newest version, by number
        self._copies: dict[int, RegisteredCopy] = {}  # where replicas serve the newest version, by number

    def publish(self, weights: PublishedWeights, replicas: Iterable[WeightReader]) -> None:
        """Send a new version to `replicas`, and to the replicas that still wait for the previous version.

        The replicas that still wait do not get the previous version any more.
        """
        waiting = [self._readers[number] for number in self._relay.waiting]
        self.newest = weights
        ranks = len(weights.source.shards) if isinstance(weights.source, RegisteredShards) else 1
        self._relay = Relay(trainer_readers(ranks, self._replica_ranks))
        self._readers, self._copies = {}, {}
        for replica in {each.number: each for each in (*replicas, *waiting)}.values():
            self.send(replica)

    def send(self, replica: WeightReader) -> None:
        """Send the newest version to a replica, as soon as there is a source from which the replica can read it."""
        assert self.newest is not None, "the first version comes first"
        if not isinstance(self.newest.source, RegisteredShards):
            replica.send_weights(self.newest)
            return
        self._readers[replica.number] = replica
        self._relay.add(replica.number)
        self._send_waiting()

    def reported(self, replica: WeightReader, report: EngineReport) -> None:
        """Record whether a replica has loaded the newest version, and send that version to waiting replicas.

        A replica that could not read the version from its source waits for another source. A replica that was still
        starting when the newest version was published loads an older version first. If it reports that it could not
        read that version, it gets the newest one.
        """
        if self.newest is None:
            return
        if replica.number not in self._readers:
            if report.unread is not None:
                self.send(replica)
            return
        version = self.newest.manifest.version
        if report.loaded == version:
            if report.copy is not None:
                self._copies[replica.number] = report.copy
            self._relay.loaded(replica.number, serves=report.copy is not None)
        elif report.unread == version:
            self._relay.failed(replica.number)
        else:
            return
        self._send_waiting()

    def lost(self, replica: WeightReader) -> None:
        """Forget a replica that has ended. Then send the newest version to waiting replicas that now have a source.

        Replicas wait until the train ranks, or a replica that has the version, can serve one more reader.
        """
        if self._readers.pop(replica.number, None) is not None:
            self._relay.lost(replica.number)
            self._send_waiting()

    def _send_waiting(self) -> None:
        """Send the newest version to all waiting replicas for which there is a source."""
        assert self.newest is not None, "replicas wait for a version"
        for reader, source in self._relay.assign().items():
            weights = self.newest if source == TRAINER else replace(self.newest, source=self._copies[source])
            self._readers[reader].send_weights(weights)

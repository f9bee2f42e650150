"""Mode Colocated: the rollout pool and the train pool take turns on the devices that they share (sleep and wake).

    generation ──► replicas sleep: weights dropped, caches freed ──► ranks wake: weights, optimizer from host memory ──► training
        ▲                                                                                                                   │
        └── replicas wake, load the next version ◄── ranks sleep: everything to host memory ◄───────────────────────────────┘

waits on                 unblocked by                                         deadline
replicas sleep or wake   the report of each replica, or its replacement       publication.timeoutSeconds, then it is replaced
a replica that starts    it joins, or it is lost, or the run stops            PoolLimits.open
ranks sleep or wake      the answer of each rank                              async.stallSeconds

A pool computes only during its turn, and its turn begins only after the other pool has given its memory back. The
weights are copied to host memory during the turn of training, so the replicas can load them while the ranks sleep.
docs/architecture.md has a diagram.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Literal, Protocol

from qwen35_trainer.weights.memory_change import MemoryChange

logger = logging.getLogger(__name__)

type Side = Literal["generation", "training"]


class SharingRanks(Protocol):
    """The methods of the train pool that `DeviceTurns` calls in mode Colocated, where both pools share devices."""

    async def sleep(self) -> MemoryChange: ...

    async def wake(self) -> None: ...


class SharingReplicas(Protocol):
    """The methods of the rollout pool that `DeviceTurns` calls in mode Colocated, where both pools share devices."""

    async def sleep(self) -> MemoryChange: ...

    async def wake(self, *, reload: bool) -> None: ...

    def stop_starting(self) -> None: ...


class DeviceTurns:
    """Gives the devices to one pool at a time, in mode Colocated, where both pools share the devices.

    At first the train pool has the devices, and no replica has started. span: called when a turn has ended, with
    what the turn was for ("training" or "generation"), its start and its end in Unix seconds, and a label for the
    timeline.
    """

    def __init__(
        self, ranks: SharingRanks, replicas: SharingReplicas, span: Callable[[Side, float, float, str], object]
    ) -> None:
        self._ranks, self._replicas, self._span = ranks, replicas, span
        self._side: Side = "training"
        self._began = time.time()

    async def begin_training(self) -> None:
        """Give the devices to the train pool: first all replicas sleep, then all train ranks wake.

        Returns when the ranks are awake. Does nothing if the train pool has the devices already.
        """
        if self._side == "training":
            return
        self._end_turn(await self._replicas.sleep())
        await self._ranks.wake()
        self._begin_turn("training")

    async def begin_generation(self, *, reload: bool) -> None:
        """Give the devices to the rollout pool: first all train ranks sleep, then all replicas wake.

        reload: whether the replicas load the version of the weights that they had before; otherwise the caller must
        publish the next version afterwards. Does nothing if the rollout pool has the devices already.
        """
        if self._side == "generation":
            return
        self._end_turn(await self._ranks.sleep())
        self._begin_turn("generation")  # replicas that are missing start now
        await self._replicas.wake(reload=reload)

    def stop(self) -> None:
        """End the replicas that are starting, and let no others start, because the run stops.

        The train pool then gets the devices for the last checkpoint without waiting for replicas that load their model.
        """
        self._replicas.stop_starting()

    def _end_turn(self, change: MemoryChange) -> None:
        logger.info("the turn of %s ends: it gives back %s of device memory", self._side, change)
        self._span(self._side, self._began, time.time(), f"gives back {change}")

    def _begin_turn(self, side: Side) -> None:
        self._side, self._began = side, time.time()

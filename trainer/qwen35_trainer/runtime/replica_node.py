"""A further node of a rollout replica that is larger than a node: the processes of its devices, and the weights that they read.

    first node: RolloutWorker ─── open ───► ReplicaNode: processes of this node's devices ◄── vLLM's messages ── engine core of the
                              ─── watch ──► answered when one of them ends                                       first node
                              ─── fetch ──► a version in this host's memory ─► the processes read their slices
                              ─── release ► the memory may be overwritten

waits on            unblocked by                                 deadline
open                the processes have joined and loaded         PoolLimits.open, in the driver
watch               the end of a process                         none: it lasts as long as the replica
fetch               the bytes of the version                     publication.timeoutSeconds, in the driver

The first node's rollout worker makes all calls. The driver starts this process, and ends it with the replica, whose engine would
otherwise wait for processes that do not exist any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group

from qwen35_trainer.failure_reasons import FailureReason
from qwen35_trainer.runtime.process import Process, own_address, starting
from qwen35_trainer.weights.published import PublishedWeights
from qwen35_trainer.weights.transports import receiver

if TYPE_CHECKING:
    from qwen35_trainer.models.qwen3_5.classes import HFConfig
    from qwen35_trainer.rollout.vllm_core import CoreSettings
    from qwen35_trainer.weights.host_weights import HostWeights, SharedVersion

WATCH_SECONDS = 1.0
"""Interval at which the thread of the processes checks whether one of them has ended."""


@dataclass(frozen=True)
class NodeActors:
    """Ray's handles of the actors of a replica's further nodes, and the reservation of its nodes."""

    actors: tuple[Any, ...]
    reserved: PlacementGroup | None

    def end(self) -> None:
        """Kill the actors, and give the reserved nodes back."""
        for actor in self.actors:
            ray.kill(actor)
        if self.reserved is not None:
            remove_placement_group(self.reserved)


class NodeLost(RuntimeError):
    """A process of a further node of a replica has ended, so the replica cannot generate any more."""

    failure = FailureReason.WORKER_LOST


class ReplicaNode(Process):
    """The Ray actor of a further node of a replica. Call `open` first, which starts the processes of the node's devices.

    name: the actor's name, for its log file. logs: folder of the log files. threads: number of torch's threads of each process.
    """

    def __init__(self, name: str, logs: Path, threads: int) -> None:
        super().__init__(name, logs)
        self._threads = threads
        self._receiver = receiver()
        self._weights: HostWeights | None = None  # of the version that was fetched last
        self._fetching = asyncio.Lock()  # a fetch continues when its caller has stopped waiting
        self._joined: asyncio.Future[None] | None = None
        self._ended = asyncio.Event()

    async def address(self) -> tuple[str, str]:
        """Return the host of this process, which in a cluster is its pod, and the address at which other processes reach it.

        An answer means that the process has started.
        """
        return socket.gethostname(), own_address()

    async def open(self, config: HFConfig, settings: CoreSettings) -> None:
        """Start the processes of this node's devices, and wait until they have joined those of the other nodes.

        config, settings: those with which the first node builds the engine core, except for `settings.node`. Raises what
        vLLM raises if the processes cannot start.
        """
        loop = asyncio.get_running_loop()
        self._joined = loop.create_future()
        # The processes end with the thread that started them.
        threading.Thread(target=self._run, args=(loop, config, settings), name="workers", daemon=True).start()
        await asyncio.shield(self._joined)

    async def watch(self) -> None:
        """Wait until a process of this node has ended, and then raise NodeLost."""
        await self._ended.wait()
        raise NodeLost(f"a process of the replica on {socket.gethostname()} has ended")

    async def fetch(self, published: PublishedWeights) -> SharedVersion:
        """Fetch and verify a version, and return where the processes of this node find it.

        Raises the errors of `WeightReceiver.fetch`. The version stays in memory until `release`, or the next call.
        """
        async with self._fetching:
            self._weights = None
            self._weights = await self._receiver.fetch(published)
            return self._weights.shared

    async def release(self) -> None:
        """Let the memory of the version that was fetched last be overwritten: the processes have copied it."""
        self._weights = None

    def _run(self, loop: asyncio.AbstractEventLoop, config: HFConfig, settings: CoreSettings) -> None:
        """Start the processes, and check them until one ends. Runs on a thread of its own."""
        joined = self._joined
        assert joined is not None
        try:
            with starting():
                self.use_threads(self._threads)
                from qwen35_trainer.rollout.vllm_core import start_workers

                workers = start_workers(config, settings)
        except BaseException as error:  # noqa: BLE001  # raised by `open`
            problem = error
            loop.call_soon_threadsafe(lambda: joined.set_exception(problem))
            return
        loop.call_soon_threadsafe(joined.set_result, None)
        with contextlib.closing(workers):
            while not workers.wait(WATCH_SECONDS):
                pass
            loop.call_soon_threadsafe(self._ended.set)  # before the others end, which takes seconds

"""The workers of the leader: take a key, reconcile it, say when to look again.

A worker that is told to stop first ends what it has in hand.
"""

import asyncio
import logging
import time

from qwen35_operator import logs
from qwen35_operator.kube.errors import ApiError, Conflict
from qwen35_operator.kube.queue import Queue
from qwen35_operator.kube.store import Key
from qwen35_operator.metrics import Metrics
from qwen35_operator.reconcile.reconciler import Reconciler, Refusal

logger = logging.getLogger(__name__)

GRACE = 2.5
"""Seconds that a reconcile in hand has when the operator stops, or leads no longer."""


class Work:
    """The queue, and who works it off."""

    def __init__(self, metrics: Metrics) -> None:
        self._queue = Queue(time.monotonic)
        self._metrics = metrics
        self._since: dict[Key, float] = {}

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, key: Key) -> None:
        """There is news of this training."""
        self._since.setdefault(key, time.monotonic())
        self._queue.add(key)

    def progressed(self, key: Key) -> None:
        """Something was done for it: what fails next has not failed before."""
        self._queue.succeeded(key)

    async def run(self, reconciler: Reconciler, workers: int) -> None:
        """Until cancelled."""
        self._since.clear()  # what a standby has seen was not its to act on
        async with asyncio.TaskGroup() as tasks:
            for _ in range(workers):
                tasks.create_task(self._work(reconciler))

    async def _work(self, reconciler: Reconciler) -> None:
        while True:
            key = await self._queue.take()
            current = asyncio.ensure_future(self._once(reconciler, key))
            try:
                await asyncio.shield(current)
            except asyncio.CancelledError:
                await asyncio.wait({current}, timeout=GRACE)
                current.cancel()
                raise
            finally:
                self._queue.done(key)

    async def _once(self, reconciler: Reconciler, key: Key) -> None:
        """One reconcile, a task of its own; whatever becomes of it, the key comes back when it must."""
        logs.current.set(key)
        started, since = time.monotonic(), self._since.pop(key, None)
        result = "done"
        try:
            after = await reconciler.reconcile(key)
        except Conflict:
            result = "stale"
            self._queue.add_failed(key)
        except Refusal as refusal:
            result = "refused"
            logger.warning("%s/%s: %s; again in %g s", *key, refusal, self._queue.add_failed(key))
        except ApiError as error:
            result = "unavailable"
            logger.warning("%s/%s: %s; again in %g s", *key, error, self._queue.add_failed(key))
        except Exception:
            result = "failed"
            logger.exception("%s/%s: this is a bug; again in %g s", *key, self._queue.add_failed(key))
        else:
            self._queue.succeeded(key)
            if after is not None:
                self._queue.add_later(key, after)
        ended = time.monotonic()
        self._metrics.reconciles.labels(result).inc()
        self._metrics.seconds.observe(ended - started)
        if since is not None:
            self._metrics.latency.observe(ended - since)

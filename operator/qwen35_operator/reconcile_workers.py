"""The leader's workers: each takes a key from the queue, reconciles the training, and schedules the next reconcile.

A process that begins to lead reconciles every training, because nobody has since the end of the last leader (`first_sweep`):

    changed from now on ──► queue
    active              ──► queue, behind those
    at rest             ──► after REST_SECONDS, one every REST_PAUSE_SECONDS ──► queue, behind those

A write that meets a newer object (409 Conflict, optimistic concurrency) ends the reconcile. The next one, after a
backoff, decides from newer observations. There is no periodic resync: a training is reconciled after an event about it or
its objects, and after the seconds that a decision names. A cancelled worker ends when its reconcile in progress has
finished, or after STOP_SECONDS.
"""

import asyncio
import logging
import time
from collections.abc import Iterable

from qwen35_operator import logs
from qwen35_operator.kube.api_errors import ApiError, Conflict
from qwen35_operator.kube.queue import WorkQueue
from qwen35_operator.kube.store import TrainingKey
from qwen35_operator.metrics import Metrics
from qwen35_operator.reconcile.first_sweep import FirstSweep
from qwen35_operator.reconcile.reconciler import Reconciler, Refusal
from qwen35_operator.reconcile.writer import NotLeading

logger = logging.getLogger(__name__)

STOP_SECONDS = 2.5
"""Maximum time that a reconcile in progress may take to finish when the operator stops or no longer leads."""
REST_SECONDS = 10.0
"""Time after the start from which a new leader reconciles trainings at rest. Nobody waits for more than the deletion of old objects."""
REST_PAUSE_SECONDS, BUSY_REST_PAUSE_SECONDS = 0.02, 0.1
"""Time from one training at rest to the next one, and the same while more trainings are queued than there are workers."""
LASTING_CONFLICT_SECONDS = 2.0
"""Backoff from which on conflicts in a row are logged: one or two are normal, because watches are late."""


class ReconcileWorkers:
    """The queue of trainings, and the workers that reconcile them."""

    def __init__(self, metrics: Metrics) -> None:
        self._queue = WorkQueue(time.monotonic)
        self._metrics = metrics
        self._since: dict[TrainingKey, float] = {}  # when the oldest event since the last reconcile arrived
        self._working = False

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, key: TrainingKey) -> None:
        """Enqueue a training that has changed, to be reconciled soon.

        In a process that does not lead, this method does nothing: a new leader first reconciles all trainings.
        """
        if not self._working:
            return
        self._since.setdefault(key, time.monotonic())
        self._queue.add(key)

    def add_behind(self, key: TrainingKey) -> None:
        """Enqueue a training that may have changed, behind those that have."""
        if self._working:
            self._queue.add_behind(key)

    def progressed(self, key: TrainingKey) -> None:
        """Reset the training's backoff. Called after each successful write."""
        self._queue.succeeded(key)

    async def run(self, reconciler: Reconciler, count: int, sweep: FirstSweep) -> None:
        """Run `count` workers, until cancelled. sweep: all trainings, to reconcile in any case.

        Trainings that change meanwhile come before them. Those at rest come REST_SECONDS later, and slowly.
        """
        self._working = True
        self._queue.share(count)
        for key in sweep.active:
            self._queue.add_behind(key)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._add_slowly(sweep.at_rest, count))
                for _ in range(count):
                    tasks.create_task(self._work(reconciler))
        finally:
            self._working = False
            self._queue.clear()
            self._since.clear()

    async def _add_slowly(self, at_rest: Iterable[TrainingKey], workers: int) -> None:
        await asyncio.sleep(REST_SECONDS)
        for key in at_rest:
            self._queue.add_behind(key)
            await asyncio.sleep(BUSY_REST_PAUSE_SECONDS if len(self._queue) > workers else REST_PAUSE_SECONDS)

    async def _work(self, reconciler: Reconciler) -> None:
        while True:
            key = await self._queue.take()
            current = asyncio.ensure_future(self._reconcile(reconciler, key))
            try:
                await asyncio.shield(current)
            except asyncio.CancelledError:
                await asyncio.wait({current}, timeout=STOP_SECONDS)
                current.cancel()
                raise
            finally:
                self._queue.done(key)

    async def _reconcile(self, reconciler: Reconciler, key: TrainingKey) -> None:
        """Reconcile one training, and schedule the next reconcile. Exceptions are logged and not raised.

        After an exception, the training is enqueued again with a backoff that grows with each failure in a row.
        """
        logs.current.set(key)
        started, since = time.monotonic(), self._since.pop(key, None)
        result = "done"
        try:
            after = await reconciler.reconcile(key)
        except Conflict as error:
            result = "stale"
            if (wait := self._queue.add_failed(key)) >= LASTING_CONFLICT_SECONDS:
                logger.warning("%s/%s: changes all the time: %s; again in %g s", *key, error, wait)
        except Refusal as refusal:
            result = "refused"
            wait = self._queue.add_failed(key)
            if refusal.after is not None:
                self._queue.add_later(key, refusal.after)
            logger.warning("%s/%s: %s; again in %g s", *key, refusal, wait)
        except ApiError as error:
            result = "unavailable"
            wait = self._queue.add_failed(key, at_least=error.retry_after)
            logger.warning("%s/%s: %s; again in %g s", *key, error, wait)
        except NotLeading:
            result = "not leading"
            logger.warning("%s/%s: not written, because this process may not lead any more", *key)
            self._queue.add_failed(key)  # in case that it does: the Lease may be renewed after a pause
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

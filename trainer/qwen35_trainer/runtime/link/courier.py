"""Delivers reports and receives orders on a separate thread, so that a slow operator does not delay the training.

    notify ─► newest() ─► report ──► delivered              control ─► on_order
                 ▲          │ LinkDown
                 └─ backoff ◄                               notify_history ─► packed() ─► history

waits on                   unblocked by                     deadline
report: something new      notify                           none; the thread ends with the process
report: its turn           an urgent or the last report     REPORT_INTERVAL_SECONDS after the previous one
history: its turn          time                             HISTORY_INTERVAL_SECONDS after the previous one
finish                     delivery of the last report      given by its caller
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable

from qwen35_trainer.contract import Control, ProgressReport
from qwen35_trainer.contract.retry import backoff_seconds
from qwen35_trainer.runtime.link.operator_link import FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS, Link, LinkDown

logger = logging.getLogger(__name__)

REPORT_INTERVAL_SECONDS = 5.0
"""Minimum time, in seconds, between two reports that are not urgent, because each report is a write in the cluster."""
HISTORY_INTERVAL_SECONDS = 30.0
"""Minimum time, in seconds, between two deliveries of the history, because each delivery writes
hundreds of kilobytes."""
CANCEL_SECONDS = 5.0
"""Maximum time, in seconds, that `Courier.finish` waits for its thread to end after it has cancelled a delivery that
took too long."""


class Undelivered(Exception):
    """The last report was not delivered before the deadline. The message contains the latest problem."""


class Courier:
    """Delivers reports to the operator, and receives the operator's orders, on a separate thread.

    Call `start` first and `finish` or `abandon` last; any thread may call `notify` and `notify_history` in between.

    newest: returns the report to deliver. on_order: called with each order. packed: returns the packed history
    so far, or None while there is none. The courier calls `newest` and `on_order` on its own thread, and
    `packed` on another thread.

    The history is delivered a last time before the last report. If a delivery of the history fails, only a
    warning is logged.
    """

    def __init__(
        self,
        link: Link,
        newest: Callable[[], ProgressReport],
        on_order: Callable[[Control], object],
        packed: Callable[[], bytes | None] = lambda: None,
        every_seconds: float = REPORT_INTERVAL_SECONDS,
    ) -> None:
        self._link, self._newest, self._on_order, self._every = link, newest, on_order, every_seconds
        self._packed = packed
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="operator", daemon=True)
        self._changed, self._urgent, self._history_changed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._writing_history = asyncio.Lock()
        self._last = self._delivered = self._history_failed = False
        self._sent_at = float("-inf")
        self._problem = "no call was answered"
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._thread.start()

    def notify(self, *, urgent: bool = False) -> None:
        """Schedule a report.

        urgent: whether to send it immediately, instead of REPORT_INTERVAL_SECONDS after the previous report.
        """
        self._call_on_thread(self._schedule, urgent, False)

    def notify_history(self) -> None:
        """Schedule a delivery of the history."""
        self._call_on_thread(self._history_changed.set)

    def finish(self, seconds: float) -> None:
        """Deliver the last report, and end the thread.

        Raises Undelivered if the report is not delivered within `seconds`.
        """
        self._call_on_thread(self._schedule, True, True)
        self._thread.join(seconds)
        if not self._delivered:
            self._call_on_thread(self._cancel)
            self._thread.join(CANCEL_SECONDS)
            raise Undelivered(self._problem)

    def abandon(self) -> None:
        """End the thread without another report."""
        self._call_on_thread(self._cancel)
        self._thread.join(CANCEL_SECONDS)

    def _call_on_thread[*Arguments](self, act: Callable[[*Arguments], None], *arguments: *Arguments) -> None:
        with contextlib.suppress(RuntimeError):  # the thread has ended through a bug, which `finish` reports
            self._loop.call_soon_threadsafe(act, *arguments)

    def _run(self) -> None:
        # `finish` cancels the task when its deadline has passed.
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner, contextlib.suppress(asyncio.CancelledError):
            runner.run(self._work())

    async def _work(self) -> None:
        self._task = asyncio.current_task()
        try:
            async with asyncio.TaskGroup() as tasks:
                background = [tasks.create_task(self._receive_orders()), tasks.create_task(self._deliver_histories())]
                await self._deliver_reports()
                for task in background:
                    task.cancel()
        finally:
            await self._link.close()

    async def _receive_orders(self) -> None:
        async for control in self._link.orders():
            self._on_order(control)

    async def _deliver_histories(self) -> None:
        """Deliver the history after changes, at most every HISTORY_INTERVAL_SECONDS."""
        while True:
            await self._history_changed.wait()
            await self._deliver_history()
            await asyncio.sleep(HISTORY_INTERVAL_SECONDS)

    async def _deliver_history(self) -> None:
        """Deliver the history so far. A lock keeps concurrent calls from replacing a newer history by an older one."""
        async with self._writing_history:
            self._history_changed.clear()
            packed = await asyncio.to_thread(self._packed)
            if packed is None:
                return
            try:
                await self._link.history(packed)
            except LinkDown as error:
                self._history_changed.set()
                if not self._history_failed:
                    logger.warning("%s; until it is, `qwen35 report` shows an earlier state, or nothing", error)
                self._history_failed = True
            else:
                self._history_failed = False

    async def _deliver_reports(self) -> None:
        """Deliver reports until the last one is delivered."""
        failures = 0
        while True:
            await self._wait_for_turn(failures)
            last = self._last  # read before the report is made: a later change belongs to the next report
            if last and (not failures or self._history_changed.is_set()):
                await self._deliver_history()
            self._changed.clear()
            self._urgent.clear()
            self._sent_at = self._loop.time()
            try:
                await self._link.report(self._newest())
            except LinkDown as error:
                failures, self._problem = failures + 1, str(error)
                if failures == 1:
                    logger.warning("%s; the training continues, and the newest report will be sent again", error)
                self._changed.set()
                continue
            if failures:
                logger.warning("the operator can be reached again")
            failures = 0
            if last:
                self._delivered = True
                return

    async def _wait_for_turn(self, failures: int) -> None:
        """Wait for a change to report, and then until the next report may be sent.

        A report may be sent REPORT_INTERVAL_SECONDS after the previous one or, if `failures` reports in a row were not
        delivered, after a backoff. An urgent report is sent immediately in both cases.
        """
        await self._changed.wait()
        if failures:
            pause = backoff_seconds(failures, first=FIRST_BACKOFF_SECONDS, maximum=MAX_BACKOFF_SECONDS)
        else:
            pause = self._sent_at + self._every - self._loop.time()
        if pause > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._urgent.wait(), pause)

    def _schedule(self, urgent: bool, last: bool) -> None:
        self._last = self._last or last
        self._changed.set()
        if urgent:
            self._urgent.set()

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

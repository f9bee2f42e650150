"""Carries the newest report out and every order in, on a thread of its own, so that no operator slows a training down.

    news ─► newest() ─► report ──► delivered                control ─► on_order
               ▲          │ LinkDown
               └─ backoff ◄                                 history_news ─► packed() ─► history

waits on                  unblocked by                            deadline
report: something to say  news                                    never waits alone: the thread ends with the process
report: its turn          an urgent one, or the last              EVERY_SECONDS after the one before
history: its turn         time                                    HISTORY_SECONDS after the one before
finish                    the last report delivered               its caller's
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable

from qwen35_trainer.contract import Control, Progress
from qwen35_trainer.runtime.link.backoff import backoff
from qwen35_trainer.runtime.link.base import Link, LinkDown

logger = logging.getLogger(__name__)

EVERY_SECONDS = 5.0
"""Between two reports that are not urgent: each costs the cluster a write."""
HISTORY_SECONDS = 30.0
"""Between two histories: each is a write of hundreds of kilobytes."""
CLOSE_SECONDS = 5.0


class Undelivered(Exception):
    """The last report was not taken before the deadline; says what stood in the way."""


class Courier:
    """`start` it; then any thread may tell `news`; `finish` is the last call.

    newest and on_order are called on the courier's thread: what is to be reported, and what is asked. packed, on a thread of
    its own, is the history so far; None while there is none. It is left once more before the last report, after which nobody
    waits for it: a history that cannot be left is a warning.
    """

    def __init__(
        self,
        link: Link,
        newest: Callable[[], Progress],
        on_order: Callable[[Control], object],
        packed: Callable[[], bytes | None] = lambda: None,
        every_seconds: float = EVERY_SECONDS,
    ) -> None:
        self._link, self._newest, self._on_order, self._every = link, newest, on_order, every_seconds
        self._packed = packed
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="operator", daemon=True)
        self._news, self._urgent, self._history_news = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._leaving = asyncio.Lock()
        self._last = self._delivered = self._unleft = False
        self._sent = float("-inf")
        self._problem = "nothing was answered yet"
        self._work: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._thread.start()

    def news(self, *, urgent: bool = False) -> None:
        """There is something to report. urgent: without waiting for its turn."""
        self._tell(self._take, urgent, False)

    def history_news(self) -> None:
        """There is something new to leave in the history."""
        self._tell(self._history_news.set)

    def finish(self, seconds: float) -> None:
        """Deliver the last report, and end. Raises Undelivered when nobody has taken it after `seconds`."""
        self._tell(self._take, True, True)
        self._thread.join(seconds)
        if not self._delivered:
            self._tell(self._cancel)
            self._thread.join(CLOSE_SECONDS)
            raise Undelivered(self._problem)

    def _tell[*Arguments](self, act: Callable[[*Arguments], None], *arguments: *Arguments) -> None:
        with contextlib.suppress(RuntimeError):  # the thread ended by a fault of ours, which finish tells
            self._loop.call_soon_threadsafe(act, *arguments)

    def _run(self) -> None:
        # Cancelled when finish gives up.
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner, contextlib.suppress(asyncio.CancelledError):
            runner.run(self._both())

    async def _both(self) -> None:
        self._work = asyncio.current_task()
        try:
            async with asyncio.TaskGroup() as tasks:
                beside = [tasks.create_task(self._listen()), tasks.create_task(self._chronicle())]
                await self._deliver()
                for task in beside:
                    task.cancel()
        finally:
            await self._link.close()

    async def _listen(self) -> None:
        async for control in self._link.orders():
            self._on_order(control)

    async def _chronicle(self) -> None:
        """Leave the history, now and then."""
        while True:
            await self._history_news.wait()
            await self._leave()
            await asyncio.sleep(HISTORY_SECONDS)

    async def _leave(self) -> None:
        """The history so far; one that comes later overtakes none."""
        async with self._leaving:
            self._history_news.clear()
            packed = await asyncio.to_thread(self._packed)
            if packed is None:
                return
            try:
                await self._link.history(packed)
            except LinkDown as error:
                self._history_news.set()
                if not self._unleft:
                    logger.warning("%s; until it is, `qwen35 report` shows an earlier state, or nothing", error)
                self._unleft = True
            else:
                self._unleft = False

    async def _deliver(self) -> None:
        """Until the last report is delivered."""
        failures = 0
        while True:
            await self._turn(failures)
            last = self._last  # before the report is made: what comes meanwhile is the next one's
            if last and (not failures or self._history_news.is_set()):
                await self._leave()
            self._news.clear()
            self._urgent.clear()
            self._sent = self._loop.time()
            try:
                await self._link.report(self._newest())
            except LinkDown as error:
                failures, self._problem = failures + 1, str(error)
                if failures == 1:
                    logger.warning("%s; the training goes on, the newest report is kept and tried again", error)
                self._news.set()
                continue
            if failures:
                logger.warning("the operator can be reached again")
            failures = 0
            if last:
                self._delivered = True
                return

    async def _turn(self, failures: int) -> None:
        """Wait for something to say, and until it may be said."""
        await self._news.wait()
        pause = backoff(failures) if failures else self._sent + self._every - self._loop.time()
        if pause > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._urgent.wait(), pause)

    def _take(self, urgent: bool, last: bool) -> None:
        self._last = self._last or last
        self._news.set()
        if urgent:
            self._urgent.set()

    def _cancel(self) -> None:
        if self._work is not None:
            self._work.cancel()

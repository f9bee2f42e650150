"""Delivery to a metrics service over the network. A failure of the service does not affect the run.

    run's thread: write ─► queue ─► sink's thread: open once ─► Sink.write ─► service
                             │ full                  │ fails
                             └──────── lost ◄────────┘        the first loss is logged, and close logs the count

waits on              unblocked by                       deadline
write                 never waits                        –
sink's thread: queue  a record, or close                 daemon: ends with the process
close                 room in the queue, then delivery   `close_seconds` for each of the two
"""

import logging
import queue
import threading
from collections.abc import Callable
from typing import Final

from qwen35_trainer.progress.records import RunRecord, SpanRecord
from qwen35_trainer.progress.sinks.sink import Sink

_LOG: Final = logging.getLogger(__name__)
_QUEUE_RECORDS: Final = 1024


class ServiceSink:
    """Passes all records except spans to another sink, in a separate thread.

    Counts the records that cannot be delivered. Logs a warning at the first of them, and their number in `close`.

    name: name of the service, for messages. open_sink: function that creates the other sink. The thread calls it at
    the first record; if that fails, the record is lost, and the thread calls it again at the next record. failures:
    the exceptions by which the service's client reports failures; any other exception is a bug and ends the thread.
    close_seconds: maximum time, in seconds, that `close` waits for each of two steps: room in the queue, and the end
    of the thread.
    """

    def __init__(
        self,
        name: str,
        open_sink: Callable[[], Sink],
        failures: tuple[type[Exception], ...],
        *,
        close_seconds: float = 120.0,
    ) -> None:
        self.lost = 0
        self._lost_lock = threading.Lock()
        self._name = name
        self._open_sink = open_sink
        self._failures = failures
        self._close_seconds = close_seconds
        self._queue: queue.Queue[RunRecord | None] = queue.Queue(_QUEUE_RECORDS)
        self._thread = threading.Thread(target=self._deliver, name=f"metrics-{name}", daemon=True)
        self._thread.start()

    def write(self, record: RunRecord) -> None:
        if isinstance(record, SpanRecord):
            return
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._lose("it is slower than the run")

    def close(self) -> None:
        try:
            self._queue.put(None, timeout=self._close_seconds)
            self._thread.join(self._close_seconds)
        except queue.Full:
            self._lose("it is slower than the run")
        if self._thread.is_alive():
            _LOG.warning("%s: gave up after %g s with records undelivered", self._name, self._close_seconds)
        if self.lost:
            _LOG.warning("%s: %d records were not delivered; metrics.jsonl has them all", self._name, self.lost)

    def _deliver(self) -> None:
        sink: Sink | None = None
        while (record := self._queue.get()) is not None:
            try:
                sink = sink or self._open_sink()
                sink.write(record)
            except self._failures as error:
                self._lose(f"{type(error).__name__}: {error}")
        if sink is not None:
            try:
                sink.close()
            except self._failures as error:
                self._lose(f"{type(error).__name__}: {error}")

    def _lose(self, reason: str) -> None:
        with self._lost_lock:
            self.lost += 1
            first = self.lost == 1
        if first:
            _LOG.warning(
                "%s does not accept metrics: %s. Training continues, and metrics.jsonl has every record. "
                "Further losses are counted without a message.",
                self._name,
                reason,
            )

"""Tells the operator how the attempt goes, and the run what the operator asks.

    with reporting(option) as reporter:      Running, at once
        reporter.begin(…)                    what earlier attempts did
        reporter.write(record) …             every EVERY_SECONDS; a checkpoint at once
                                             the history, at checkpoints and evaluations
        reporter.control                     the newest order; an order to stop is acknowledged on arrival
                                             Succeeded, Stopped or Failed, until delivered or FINAL_SECONDS;
                                             after a signal that leaves no time, INTERRUPTED_SECONDS

The last report leaves when everything else is over, the files of the run included: the operator takes the pods away then.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from qwen35_trainer.contract import Control, Progress
from qwen35_trainer.contract.names import POD_VARIABLE
from qwen35_trainer.progress.records import (
    CheckpointRecord,
    EvaluationRecord,
    ExportRecord,
    FinishRecord,
    Record,
    SpanRecord,
    from_line,
)
from qwen35_trainer.runtime.checkpoint import Checkpoint
from qwen35_trainer.runtime.clock import Clock
from qwen35_trainer.runtime.folder import RunFolder
from qwen35_trainer.runtime.interrupted import Interrupted
from qwen35_trainer.runtime.link.base import Link
from qwen35_trainer.runtime.link.courier import Courier, Undelivered
from qwen35_trainer.runtime.link.history import Kept
from qwen35_trainer.runtime.link.open import open_link
from qwen35_trainer.runtime.link.standing import Ended, Standing, saved
from qwen35_trainer.spec import Manifest, dump_manifest

logger = logging.getLogger(__name__)

FINAL_SECONDS = 120.0
"""How long an operator may be away at the end before the run says that it could not be told."""
INTERRUPTED_SECONDS = 3.0
"""The same after a signal that leaves no time: less than `signals.END_SECONDS`, after which the run is killed."""


class OperatorNotTold(RuntimeError):
    """The run is over, and the operator does not know how: says how it ended, and what was in the way."""


class Reporter:
    """A sink with ears. Without a link it is silent, and nothing is ever asked of the run."""

    def __init__(self, link: Link | None = None, attempt: int = 1, final_seconds: float = FINAL_SECONDS) -> None:
        self._standing = Standing(attempt, head=os.environ.get(POD_VARIABLE))
        self._lock = threading.Lock()  # orders come on the courier's thread
        self._courier = None if link is None else Courier(link, self._report, self._receive, self._packed)
        self._final_seconds = final_seconds
        self._history: Kept | None = None
        self._finish: FinishRecord | None = None
        self._begun = self._stopping = self._saved = False
        self.control: Control | None = None
        """What the operator asks of this attempt."""

    @property
    def stop_ordered(self) -> bool:
        return self._standing.stop is not None

    def start(self) -> None:
        if self._courier is not None:
            self._courier.start()
            self._change(lambda standing: standing, urgent=True)

    def begin(self, *, manifest: Manifest, metrics: Path, checkpoint: Checkpoint | None, started: float) -> None:
        """The attempt begins at `started`, from the checkpoint if there is one."""
        if self._courier is None:
            return
        clock, report, earlier = Clock(started), None, list[Record]()
        if checkpoint is not None:
            at = checkpoint.progress
            clock = Clock(started, at.elapsed)
            report = saved(checkpoint.path, at.update, checkpoint.path.stat().st_mtime)
            earlier = earlier_records(metrics, at.update)
        bound = None if manifest.spec.mode == "SFT" else manifest.spec.effective_async.maxVersionLag
        self._history = Kept(dump_manifest(manifest), bound, RunFolder(metrics.parent).samples, earlier)
        self._change(lambda standing: standing.resumed(clock, earlier, report), urgent=report is not None)

    def training(self, updates: int) -> None:
        """The driver starts, for so many updates: from here on it is the one to stop."""
        self._begun = True
        self._change(lambda standing: replace(standing, updates=updates))

    def stopping(self) -> None:
        """The driver was told to stop."""
        self._stopping = True

    def phase(self, text: str) -> None:
        self._change(lambda standing: replace(standing, phase=text))

    def hosts(self, hosts: Mapping[str, str]) -> None:
        """Where the rollout replicas are: replica → pod."""
        if hosts != self._standing.hosts:
            self._change(lambda standing: replace(standing, hosts=dict(hosts)))

    def write(self, record: Record) -> None:
        checkpoint = isinstance(record, CheckpointRecord)
        self._saved |= checkpoint and self._stopping
        if isinstance(record, FinishRecord):
            self._finish = record
        self._change(lambda standing: standing.after(record), urgent=checkpoint or isinstance(record, ExportRecord))
        if self._courier is not None and self._history is not None:
            self._history.add(record)
            if isinstance(record, CheckpointRecord | ExportRecord | EvaluationRecord):
                self._courier.history_news()

    def close(self) -> None:
        """Nothing yet: `conclude` has the last word."""

    def conclude(self, error: BaseException | None = None) -> None:
        """The last report: how the run ended, `error` being what it raised. Raises OperatorNotTold."""
        if self._courier is None:
            return
        ended = self._ended(error)
        hurried = isinstance(error, Interrupted) and not self.stop_ordered
        seconds = min(INTERRUPTED_SECONDS, self._final_seconds) if hurried else self._final_seconds
        self._change(lambda standing: replace(standing, ended=ended, phase=""), urgent=True)
        try:
            self._courier.finish(seconds)
        except Undelivered as problem:
            said = f"{ended.state}: {ended.message}" if ended.message else ended.state
            raise OperatorNotTold(f"{said}\nThe operator could not be told within {seconds:g} s: {problem}") from error

    def _ended(self, error: BaseException | None) -> Ended:
        finish = self._finish
        if finish is not None:
            return Ended(finish.outcome, finish.reason, finish.message if error is None else str(error))
        if isinstance(error, Interrupted):
            # Nothing to save before the driver was there; after that, only a checkpoint makes it a stop.
            kept = self._saved or (self.stop_ordered and not self._begun)
            return Ended("Stopped", "", str(error)) if kept else Ended("Failed", "Interrupted", str(error))
        reason = "NoFinalState" if error is None else type(error).__name__
        return Ended("Failed", reason, str(error or "the run ended without a record of how"))

    def _receive(self, control: Control) -> None:
        """Called on the courier's thread."""
        if control.attempt != self._standing.attempt:
            return
        self.control = control
        if (stop := control.stop) is not None and stop.id != self._standing.stop:
            self._change(lambda standing: replace(standing, stop=stop.id), urgent=True)

    def _report(self) -> Progress:
        """Called on the courier's thread."""
        return self._standing.progress(time.time())

    def _packed(self) -> bytes | None:
        """Called on a thread of the courier's."""
        return None if self._history is None else self._history.packed()

    def _change(self, change: Callable[[Standing], Standing], *, urgent: bool = False) -> None:
        if self._courier is None:
            return
        with self._lock:  # an order may come meanwhile
            self._standing = change(self._standing)
        self._courier.news(urgent=urgent)


@contextmanager
def reporting(option: str | None) -> Iterator[Reporter]:
    """A reporter for --link, silent without; at the end it reports how the body ended. Raises LinkRefused, OperatorNotTold."""
    reporter = Reporter() if option is None else Reporter(*open_link(option))
    reporter.start()
    try:
        yield reporter
    except BaseException as error:
        reporter.conclude(error)
        raise
    reporter.conclude()


def earlier_records(metrics: Path, until: int) -> list[Record]:
    """What the attempts before did up to that update. Spans are not even parsed: there are a thousand to an update."""
    if not metrics.is_file():
        return []
    with metrics.open("rb") as lines:
        found = _records(line for line in lines if not line.startswith(_SPAN) and line.endswith(b"\n"))
        return [
            record for record in found if not isinstance(record, SpanRecord | FinishRecord) and record.update <= until
        ]


_SPAN = b'{"record":"span",'


def _records(lines: Iterable[bytes]) -> Iterator[Record]:
    for line in lines:
        try:
            yield from_line(line.decode())
        except ValueError as error:
            logger.warning("a record is missing in the totals: %s", error)

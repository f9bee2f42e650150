"""Reports the progress of the attempt to the operator, and passes the operator's orders to the run.

    with reporting(option) as reporter:      reports Running immediately
        reporter.begin(…)                    adds what earlier attempts did
        reporter.write(record) …             reports every REPORT_INTERVAL_SECONDS, and a checkpoint immediately;
                                             delivers the history at checkpoints and evaluations
        reporter.control                     the newest orders; an order to stop is acknowledged on arrival
                                             at the end reports Succeeded, Stopped or Failed, for at most FINAL_REPORT_SECONDS,
                                             or INTERRUPTED_REPORT_SECONDS after a signal that leaves no time

The last report is sent after everything else has ended and all files of the run are written, because the operator
deletes the pods when it receives the last report.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from qwen35_trainer.contract import Control, ProgressReport
from qwen35_trainer.contract.shared_names import CLUSTER_VARIABLE, POD_VARIABLE
from qwen35_trainer.epoch import Superseded
from qwen35_trainer.exits import Interrupted
from qwen35_trainer.failure_reasons import FailureReason, reason_of
from qwen35_trainer.manifest import Manifest, dump_manifest
from qwen35_trainer.progress import packed_history
from qwen35_trainer.progress.metrics_file import MetricsFile, number_of
from qwen35_trainer.progress.records import (
    CheckpointRecord,
    EvaluationRecord,
    ExportRecord,
    FinishRecord,
    RunRecord,
    SpanRecord,
    UpdateRecord,
    from_line,
    line_start,
)
from qwen35_trainer.progress.repeats import Repeats
from qwen35_trainer.progress.run_fold import RunFold
from qwen35_trainer.progress.sample_file import Moment, newest_moments, read_samples
from qwen35_trainer.progress.summary import summary_of
from qwen35_trainer.runtime.checkpoint_store import SavedCheckpoint
from qwen35_trainer.runtime.folder import RunFolder
from qwen35_trainer.runtime.link.courier import Courier, Undelivered
from qwen35_trainer.runtime.link.operator_link import Link, open_link
from qwen35_trainer.runtime.link.standing import AttemptEnd, Standing, checkpoint_report
from qwen35_trainer.runtime.measurements import TrainingClock

logger = logging.getLogger(__name__)

FINAL_REPORT_SECONDS = 120.0
"""Maximum time, in seconds, for the delivery of the last report. After it, the run ends with OutcomeUndelivered."""
INTERRUPTED_REPORT_SECONDS = 3.0
"""Maximum time, in seconds, for the delivery of the last report after a signal that leaves no time to save.

It is less than `signals.END_SECONDS`, after which the run is killed.
"""


class OutcomeUndelivered(RuntimeError):
    """The run has ended, but the operator did not receive the outcome. The message has the outcome and the problem."""

    failure = None  # it cannot be reported


class Reporter:
    """A metrics sink that reports to the operator and receives the operator's orders.

    Without a link it does nothing.
    """

    def __init__(self, link: Link | None = None, attempt: int = 1, final_seconds: float = FINAL_REPORT_SECONDS) -> None:
        self._standing = Standing(attempt, head=os.environ.get(POD_VARIABLE), cluster=os.environ.get(CLUSTER_VARIABLE))
        self._lock = threading.Lock()  # orders arrive on the courier's thread
        self._courier = None if link is None else Courier(link, self._report, self._receive, self._packed)
        self._final_seconds = final_seconds
        self._history: RunHistory | None = None
        self._finish: FinishRecord | None = None
        self._begun = self._stopping = self._saved = False
        self.control: Control | None = None
        """The newest orders of the operator for this attempt. None: there are no orders yet."""

    @property
    def stop_ordered(self) -> bool:
        return self._standing.stop is not None

    def start(self) -> None:
        if self._courier is not None:
            self._courier.start()
            self._change(lambda standing: standing, urgent=True)

    def begin(self, *, manifest: Manifest, metrics: Path, checkpoint: SavedCheckpoint | None, started: float) -> None:
        """Record how this attempt begins, so that later reports and the history include the work of earlier attempts.

        metrics: path of the metrics file, whose records up to the checkpoint are read. checkpoint: the checkpoint from
        which the attempt resumes; None: it starts from the beginning. started: time at which the attempt began, in Unix
        seconds. Without a link to an operator, this does nothing.
        """
        if self._courier is None:
            return
        clock, report, earlier = TrainingClock(started), None, RunFold()
        if checkpoint is not None:
            meta = checkpoint.progress
            clock = TrainingClock(started, meta.elapsed)
            report = checkpoint_report(checkpoint.path, meta.update, checkpoint.path.stat().st_mtime)
            earlier = earlier_records(metrics, meta.update)
        bound = None if manifest.spec.mode == "SFT" else manifest.spec.effective_async.maxVersionLag
        self._history = RunHistory(dump_manifest(manifest), bound, RunFolder(metrics.parent).samples, earlier)
        self._change(lambda standing: standing.resumed(clock, earlier.totals, report), urgent=report is not None)

    def training(self, updates: int) -> None:
        """Record that the driver starts to train. updates: number of updates of the whole run.

        From here on, orders to stop go to the driver.
        """
        self._begun = True
        self._change(lambda standing: replace(standing, updates=updates))

    def stopping(self) -> None:
        """Record that the driver was asked to stop."""
        self._stopping = True

    def phase(self, text: str) -> None:
        self._change(lambda standing: replace(standing, phase=text))

    def replicas(self, hosts: Mapping[str, tuple[str, ...]], drained: frozenset[str]) -> None:
        """Record where the rollout replicas run, and which of them are drained.

        hosts: name of a replica → its pods. drained: names of the replicas that hold no sequences and run in a pod that
        will be removed.
        """
        if (hosts, drained) != (self._standing.hosts, self._standing.drained):
            self._change(lambda standing: replace(standing, hosts=dict(hosts), drained=drained))

    def write(self, record: RunRecord) -> None:
        checkpoint = isinstance(record, CheckpointRecord)
        self._saved |= checkpoint and self._stopping
        if isinstance(record, FinishRecord):
            self._finish = record
        self._change(lambda standing: standing.after(record), urgent=checkpoint or isinstance(record, ExportRecord))
        if self._courier is not None and self._history is not None:
            self._history.add(record)
            if isinstance(record, CheckpointRecord | ExportRecord | EvaluationRecord):
                self._courier.notify_history()

    def close(self) -> None:
        """Do nothing, because `conclude` sends the last report. Every metrics sink must have this method."""

    def conclude(self, error: BaseException | None = None) -> None:
        """Send the last report, with the outcome of the attempt. Without a link to an operator, do nothing.

        error: the exception that ended the run; None: it ended without one. Nothing is sent if `error` is Superseded
        because a later attempt owns the run's folder: the report would replace that attempt's report, and the operator
        does not wait for this attempt.

        Raises OutcomeUndelivered if the operator does not receive the report within FINAL_REPORT_SECONDS or, after a
        signal, within INTERRUPTED_REPORT_SECONDS.
        """
        if self._courier is None:
            return
        if isinstance(error, Superseded) and error.by_later_attempt:
            self._courier.abandon()
            return
        end = self._attempt_end(error)
        hurried = isinstance(error, Interrupted) and not self.stop_ordered
        seconds = min(INTERRUPTED_REPORT_SECONDS, self._final_seconds) if hurried else self._final_seconds
        self._change(lambda standing: replace(standing, end=end, phase=""), urgent=True)
        try:
            self._courier.finish(seconds)
        except Undelivered as problem:
            outcome = f"{end.state}: {end.message}" if end.message else end.state
            raise OutcomeUndelivered(
                f"{outcome}\nThis could not be reported to the operator within {seconds:g} s: {problem}"
            ) from error

    def _attempt_end(self, error: BaseException | None) -> AttemptEnd:
        finish = self._finish
        if finish is not None:
            return AttemptEnd(finish.outcome, finish.reason, finish.message if error is None else str(error))
        if isinstance(error, Interrupted):
            # Before the driver starts there is nothing to save; after that, only a checkpoint makes this a stop.
            nothing_lost = self._saved or (self.stop_ordered and not self._begun)
            if nothing_lost:
                return AttemptEnd("Stopped", "", str(error))
            return AttemptEnd("Failed", FailureReason.INTERRUPTED, str(error))
        if error is None:
            return AttemptEnd("Failed", FailureReason.NO_FINAL_STATE, "the run ended without a record of how")
        reason, message = reason_of(error), str(error)
        if reason is FailureReason.UNEXPECTED_ERROR:
            message = f"{type(error).__name__}: {message}"
        return AttemptEnd("Failed", reason, message)

    def _receive(self, control: Control) -> None:
        """Store the operator's orders if they are for this attempt, and acknowledge an order to stop.

        The courier calls this method on its thread.
        """
        if control.attempt != self._standing.attempt:
            return
        self.control = control
        if (stop := control.stop) is not None and stop.id != self._standing.stop:
            self._change(lambda standing: replace(standing, stop=stop.id), urgent=True)

    def _report(self) -> ProgressReport:
        """Return a report of the present state of the attempt. The courier calls this method on its thread."""
        return self._standing.progress(time.time())

    def _packed(self) -> bytes | None:
        """Return the packed history so far, or None before `begin`.

        The courier calls this method on another thread than its own.
        """
        return None if self._history is None else self._history.packed()

    def _change(self, change: Callable[[Standing], Standing], *, urgent: bool = False) -> None:
        if self._courier is None:
            return
        with self._lock:  # an order may arrive at the same time
            self._standing = change(self._standing)
        self._courier.notify(urgent=urgent)


class RunHistory:
    """The records of the run so far. Packed into a ConfigMap, they allow a report after the pods are gone.

    One thread may add records while another thread packs them.
    """

    def __init__(self, manifest: str, max_version_lag: int | None, samples: Path, earlier: RunFold) -> None:
        """Create the history of an attempt that begins.

        manifest: the resolved manifest, as YAML. max_version_lag: the maximum lag; None in SFT. samples: path of
        samples.jsonl. earlier: the records of previous attempts, to which `add` adds the records of this attempt.
        """
        self._manifest, self._bound, self._samples = manifest, max_version_lag, samples
        self._lock = threading.Lock()
        self._run = earlier

    def add(self, record: RunRecord) -> None:
        with self._lock:
            self._run.add(record)

    def packed(self) -> bytes:
        """Return the history so far, in the format of `progress.packed_history`."""
        with self._lock:
            records = self._run.records
            summary = summary_of(self._run.totals, max_version_lag=self._bound, peak_rss_mib=None)
        return packed_history.pack(self._manifest, summary, records, samples=self._newest_samples())

    def _newest_samples(self) -> list[Moment]:
        try:
            return newest_moments(read_samples(self._samples))
        except (OSError, ValueError) as error:
            logger.warning("the report in the cluster has no responses: %s", error)
            return []


@contextmanager
def reporting(option: str | None) -> Iterator[Reporter]:
    """Context manager: yield a reporter for the value of --link, and report the outcome when the body ends.

    option: the value of --link; None: the reporter does nothing. Raises LinkRefused if the value cannot be used, and
    OutcomeUndelivered if the operator does not receive the outcome.
    """
    reporter = Reporter() if option is None else Reporter(*open_link(option))
    reporter.start()
    try:
        yield reporter
    except BaseException as error:
        reporter.conclude(error)
        raise
    reporter.conclude()


def earlier_records(metrics: Path, until: int) -> RunFold:
    """Return a RunFold of the records that led to the weights after update `until`, from all previous attempts.

    metrics: path of the metrics file. If the file does not exist, the result is empty. Spans, the bars of the timeline, are
    left out, because there may be many. Records of the ends of attempts and damaged lines are left out, too. Each damaged
    line is logged.
    """
    fold = RunFold()
    if not metrics.is_file():
        return fold
    file = MetricsFile(metrics)
    repeats = Repeats(number if number is not None and number[1] <= until else None for number in file.numbers())
    for place, line in enumerate(file.lines()):
        if not line.startswith(_LEFT_OUT) and (record := _parsed(line)) is not None and record.update <= until:
            fold.add(record, repeated=repeats.repeated(place, number_of(line)))
    return fold


_LEFT_OUT = (line_start(SpanRecord), line_start(FinishRecord))


def _parsed(line: bytes) -> UpdateRecord | EvaluationRecord | CheckpointRecord | ExportRecord | None:
    """Return the record in a line. For a damaged line, log a warning and return None."""
    try:
        record = from_line(line.decode())
    except ValueError as error:
        logger.warning("a record is missing in the totals: %s", error)
        return None
    return None if isinstance(record, SpanRecord | FinishRecord) else record

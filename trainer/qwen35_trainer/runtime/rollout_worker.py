"""One replica of the rollout pool: an engine on its own thread, behind the worker's end of the channel to the driver.

    driver ──commands──► CommandOrder ──► inbox ──► engine thread: step, step, step …
    driver ◄──reports─── ReportLog ◄────────────── outbox: tokens, finished, taken, loaded

waits on                  unblocked by                           deadline
engine thread: inbox      a command, or the end                  IDLE_WAIT_SECONDS, then it looks again
exchange                  a finished group, weights, …           report_seconds, gather_seconds
loading: the bytes        they are mapped or transferred         publication.timeoutSeconds, in the driver
loading: the commit       the engine thread, between two steps   publication.timeoutSeconds, in the driver
sleep, wake               the engine thread, between two steps   publication.timeoutSeconds, in the driver
a probe: its log-probs    the engine's next steps, a commit      publication.timeoutSeconds, then it is dropped
a failed probe: which     the version is fetched again, and      COMPARISON_SECONDS, then no parameter is named
parameters differ         loaded over the parameters

The engine thread never waits while the engine has sequences. Commands return immediately. Weights are fetched, verified
and received by the engine while generation continues, and replaced between two tokens without dropping a sequence. The
new tokens of unfinished sequences are reported at intervals (PROGRESS_SHARE), so that not all of them are lost with this
process, and all tokens of a sequence when it ends. A sequence that cannot be generated is reported as finished, with its
error. Any other failure here, such as a log-prob that is not a number, or log-probs of a probe that differ from the
trainer's, ends the replica: the next `exchange` raises EngineFailed, and the driver replaces the replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from numpy.typing import NDArray

from qwen35_trainer.data.expert_choices import RecordedChoices
from qwen35_trainer.failure_reasons import FailureReason, reason_of
from qwen35_trainer.manifest import RolloutSpec, TrainingSpec, VLLMSpec
from qwen35_trainer.pipeline.events import SequenceId
from qwen35_trainer.rollout.rollout_engine import (
    Completed,
    EndReason,
    GeneratedTokens,
    RolloutEngine,
    SequenceRequest,
    StepOutput,
)
from qwen35_trainer.runtime.calls import ActorUnreachable, answer
from qwen35_trainer.runtime.machine import device, manager_of
from qwen35_trainer.runtime.process import Process, own_address, starting
from qwen35_trainer.runtime.replica_channel import (
    MAX_REPORT_SECONDS,
    CommandBatch,
    CommandOrder,
    DropSequences,
    EngineReport,
    LoadWeights,
    ProbeWeights,
    ReplicaCommand,
    ReportLog,
    SleepEngine,
    SubmitSequences,
    TakeSequences,
    WakeEngine,
    unpacked_commands,
)
from qwen35_trainer.runtime.replica_node import NodeLost
from qwen35_trainer.runtime.reported_tokens import TokenBlock
from qwen35_trainer.runtime.step_times import StepLog
from qwen35_trainer.runtime.worker_connection import Endpoint, Packed, WorkerServer, pack
from qwen35_trainer.weights.memory_change import MemoryChange
from qwen35_trainer.weights.probe import Probe, ProbeResult
from qwen35_trainer.weights.published import PublishedWeights, RegisteredCopy
from qwen35_trainer.weights.transfer_agent import SourceLost
from qwen35_trainer.weights.transports import receiver
from qwen35_trainer.weights.weight_manifest import WeightsDamaged, listed

if TYPE_CHECKING:
    from qwen35_trainer.models.qwen3_5.build_model import ModelSettings
    from qwen35_trainer.models.qwen3_5.classes import HFConfig
    from qwen35_trainer.rollout.vllm_core import CoreSettings, NodePlace
    from qwen35_trainer.weights.host_weights import HostWeights

logger = logging.getLogger(__name__)

type ProbedLogProbs = tuple[NDArray[np.float32], ...]
"""The log-probs (T - 1,) of each sequence of a probe."""

IDLE_WAIT_SECONDS = 0.5
"""Maximum time that the engine thread waits on an empty inbox before it checks whether it has to end."""
MIN_GATHER_SECONDS, MAX_GATHER_SECONDS = 0.02, 10.0
GATHER_SHARE = 0.05
"""Time for which a report waits for more sequences to finish, as a share of the mean duration of a sequence.

Each report costs the driver time, so sequences are reported together. A group is delayed by at most this share.
"""
AWAITED_SHARE = 1 / 8
"""A report is due when this share of a replica's sequences has finished, even if their groups have unfinished samples.

The other samples of a group decide when it trains, so a finished sequence does not cause a report, unless it is the
last one that the replica has of its group. But the driver must fill the slots of finished sequences before the replica
has used up its queue, which is a quarter of its slots (`job.QUEUE_SHARE`).
"""
PROGRESS_SECONDS = 1.0
"""Minimum interval at which the new tokens of unfinished sequences are read.

Unreported tokens are lost with the process.
"""
PROGRESS_SHARE = 1 / 8
"""Interval at which the new tokens of unfinished sequences are read, as a share of the mean duration of a sequence.

A sequence that is longer than the mean reports its new tokens only when they are this share of the tokens that it has
reported. Sequences therefore report their progress in about eight parts, regardless of the length of responses. The loss
of a process costs an eighth of what it has generated, on average.
"""
COMPARISON_SECONDS = 60.0
"""Maximum time in which a replica that failed a probe finds out which of its parameters are wrong, before it ends.

It generates nothing meanwhile. The driver would replace it after `rollout_pool.MAX_STEP_SECONDS` without a step.
"""
MAX_UNCLAIMED_REPORTS = 64
"""Number of reports after which the choices of experts of a report are dropped if the driver has not claimed them.

It claims them as soon as it has the report, so more are dropped only if its calls are lost.
"""
MAX_GAP_SECONDS = 0.002
"""Maximum pause between two steps of the engine that are recorded as one interval of work."""


class EngineFailed(RuntimeError):
    """The engine of a replica has ended because of an error, which the message contains."""

    failure = FailureReason.WORKER_LOST


class NotFiniteLogProbs(RuntimeError):
    """The engine returned a log-prob that is infinite or not a number: its weights or its device are damaged."""

    failure = FailureReason.NOT_FINITE


@dataclass(frozen=True)
class WorkerAddress:
    """The address of a worker's process. In a cluster, the host is the pod.

    endpoint: the address at which the process takes calls without Ray; None: it takes calls only through Ray.
    """

    host: str
    process_id: int
    endpoint: Endpoint | None = None
    further_hosts: tuple[str, ...] = ()
    """The hosts of the replica's further nodes, if it is larger than a node."""


@dataclass
class _Outbox:
    """The work of the engine since the last report."""

    progress: dict[SequenceId, list[GeneratedTokens]] = field(default_factory=dict)
    tokens: dict[SequenceId, GeneratedTokens] = field(default_factory=dict)
    started: dict[SequenceId, int] = field(default_factory=dict)
    finished: dict[SequenceId, EndReason] = field(default_factory=dict)
    errors: dict[SequenceId, str] = field(default_factory=dict)
    taken: list[SequenceId] = field(default_factory=list)
    choices: dict[SequenceId, RecordedChoices] = field(default_factory=dict)
    loaded: int | None = None
    copy: RegisteredCopy | None = None
    unread: int | None = None
    slept: MemoryChange | None = None
    woken: bool = False
    probed: ProbeResult | None = None
    probes_dropped: int = 0
    generated: int = 0
    intervals: list[tuple[float, float]] = field(default_factory=list)


class EngineThread:
    """The thread on which a replica's engine runs, until `close`. Only `receive` uses the engine on another thread.

    on_report: called, on any thread, when a report is due because there is a result for which the driver waits.
    """

    def __init__(self, engine: RolloutEngine, on_report: Callable[[], object]) -> None:
        self._engine, self._on_report = engine, on_report
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._outbox = _Outbox()
        self._reported: dict[SequenceId, int] = {}  # number of tokens that each sequence came with or has reported
        self._closing = threading.Event()
        # Intervals are measured on the monotonic clock, because the wall clock may be set while the engine works.
        self._progressed = self._stepped = time.monotonic()  # when progress was last read; when the last step ended
        self._steps, self._step_log = 0, StepLog()
        self._probing: Future[ProbedLogProbs | None] | None = None
        self._holding = threading.Event()
        self._asleep = False  # until a version is committed after `wake`
        self._commanded = False  # whether a command is being carried out
        self._unsent: dict[SequenceId, list[GeneratedTokens]] = {}  # tokens that wait until they are PROGRESS_SHARE
        self._submitted: dict[SequenceId, float] = {}  # monotonic second
        self._duration = 0.0  # mean of the last finished sequences, in seconds
        self._kept: dict[SequenceId, int] = {}  # number of tokens with which a sequence that may train was submitted
        self._unclaimed: dict[int, list[RecordedChoices]] = {}  # the choices of each report, by its number
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # These methods are called by other threads. What they order is done between two steps.

    def submit(self, requests: Sequence[SequenceRequest]) -> None:
        """Queue sequences to generate."""
        self._inbox.put(lambda: self._submit(requests))

    def drop(self, sequences: Sequence[SequenceId]) -> None:
        """Queue the command to stop generating sequences. Nothing more is reported about these sequences."""
        self._inbox.put(lambda: self._drop(sequences))

    def take(self, sequences: Sequence[SequenceId]) -> None:
        """Queue the command to stop generating sequences and to report all their tokens."""
        self._inbox.put(lambda: self._take(sequences))

    def receive(self, weights: Any, version: int) -> None:  # noqa: ANN401  # tensors, of which this module knows nothing
        """Let the engine check and prepare new weights while it generates. Runs on the caller's thread.

        An error of the engine is raised here.
        """
        self._engine.receive(weights, version)

    def commit(self, version: int, copy: RegisteredCopy | None = None) -> Future[None]:
        """Queue the command to use the received weights of `version`. The future is done once the engine uses them.

        copy: the memory from which other replicas can read the weights; None: they cannot. If the engine fails first,
        the future is never done.
        """
        committed: Future[None] = Future()
        self._inbox.put(lambda: self._commit(version, committed, copy))
        return committed

    def report_unread(self, version: int) -> None:
        """Report that version `version` could not be read from another replica."""
        with self._lock:
            self._outbox.unread = version
        self._on_report()

    def probe(self, probe: Probe, version: int) -> Future[ProbedLogProbs | None]:
        """Queue a probe of `version`: the engine computes log-probs, which are then compared with the trainer's.

        The future gets the log-probs that the engine computes for each sequence of the probe. The future gets None if
        another version is in service, or comes into service before the probe ends, or if the probe is dropped. If the
        engine fails first, the future is never done.
        """
        probing: Future[ProbedLogProbs | None] = Future()
        probing.set_running_or_notify_cancel()  # so that a waiter that gives up does not cancel it
        self._inbox.put(lambda: self._probe(probe, version, probing))
        return probing

    def drop_probe(self) -> None:
        """Queue the command to drop the probe that runs, if there is one."""
        self._inbox.put(self._drop_probe)

    def sleep(self) -> Future[None]:
        """Queue the command to give back the engine's device memory and drop all sequences.

        The future is done when the memory is given back. The next report contains the memory in use before and after
        that. If the engine fails first, the future is never done.
        """
        slept: Future[None] = Future()
        self._inbox.put(lambda: self._sleep(slept))
        return slept

    def wake(self) -> Future[None]:
        """Queue the command to take the device memory again. The engine makes its next step after the next `commit`.

        The future is done when the memory is taken. If the engine fails first, the future is never done.
        """
        woken: Future[None] = Future()
        self._inbox.put(lambda: self._wake(woken))
        return woken

    def hold(self) -> None:
        """Let the engine make no further step. Commands are still carried out."""
        self._holding.set()

    def passed(self, result: ProbeResult) -> None:
        """Record that the replica has passed a probe: its log-probs agree with the trainer's.

        The next report will contain `result`. This method does not cause a report.
        """
        with self._lock:
            self._outbox.probed = result

    def changed_by_loading(self, weights: Any, version: int) -> Future[list[str] | None]:  # noqa: ANN401  # as for `receive`
        """Queue the command to load `version`, which is in service, once more.

        The future gets the names of the parameters whose values change, because the replica had wrong values for them.
        The future gets None if `version` is not in service any more.
        """
        changed: Future[list[str] | None] = Future()
        changed.set_running_or_notify_cancel()
        self._inbox.put(lambda: self._load_again(weights, version, changed))
        return changed

    def fail(self, error: BaseException) -> None:
        """End the engine because of `error`, such as damaged weights, and record the error.

        If an earlier error is recorded already, that error is kept. `RolloutWorker.exchange` then raises EngineFailed,
        with the recorded error as its cause.
        """
        self.failure = self.failure or error
        self._closing.set()
        self._on_report()

    def report(self, number: int) -> EngineReport:
        """Return a report of everything since the previous report. number: number of the new report."""
        with self._lock:
            outbox, self._outbox = self._outbox, _Outbox()
            lengths = {name: self._reported[name] for name in outbox.progress}
            steps, measured = self._steps, self._step_log.take()
        if outbox.choices:
            self._unclaimed[number] = list(outbox.choices.values())
        self._unclaimed.pop(number - MAX_UNCLAIMED_REPORTS, None)
        return EngineReport(
            number,
            started=outbox.started,
            progress=TokenBlock(outbox.progress),
            lengths=lengths,
            tokens=TokenBlock({name: [tokens] for name, tokens in outbox.tokens.items()}),
            finished=outbox.finished,
            errors=outbox.errors,
            taken=tuple(outbox.taken),
            choices=tuple(outbox.choices),
            loaded=outbox.loaded,
            copy=outbox.copy,
            unread=outbox.unread,
            slept=outbox.slept,
            woken=outbox.woken,
            probed=outbox.probed,
            probes_dropped=outbox.probes_dropped,
            generated=outbox.generated,
            intervals=tuple(outbox.intervals),
            steps=steps,
            measured=measured,
            busy=(self._engine.busy and not self._asleep) or self._commanded or not self._inbox.empty(),
        )

    def take_choices(self, number: int) -> list[RecordedChoices]:
        """Return the choices of the sequences in `EngineReport.choices` of report `number`, and forget them.

        Raises KeyError if they were taken before, or if the report has none.
        """
        return self._unclaimed.pop(number)

    @property
    def progress_seconds(self) -> float:
        """Minimum time, in seconds, between two reads of the new tokens of unfinished sequences."""
        return max(PROGRESS_SECONDS, PROGRESS_SHARE * self._duration)

    @property
    def gather_seconds(self) -> float:
        """Maximum time, in seconds, for which a due report waits for more sequences to finish."""
        return min(max(MIN_GATHER_SECONDS, GATHER_SHARE * self._duration), MAX_GATHER_SECONDS)

    @property
    def has_urgent_report(self) -> bool:
        """Whether a report must not wait for more sequences to finish.

        That is the case after weights were loaded or could not be read, after sequences were taken, and after the
        engine failed, fell asleep or woke up.
        """
        with self._lock:
            box = self._outbox
            has_weights = box.loaded is not None or box.unread is not None
            has_turned = box.slept is not None or box.woken
            return has_weights or has_turned or bool(box.taken) or self.failure is not None

    @property
    def report_seconds(self) -> float:
        """Maximum time, in seconds, until a report becomes due, whether or not a sequence has finished."""
        return min(self.progress_seconds, MAX_REPORT_SECONDS)

    def close(self) -> None:
        self._closing.set()

    # These methods run on the thread.

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._take_commands()
                if self._has_step:
                    self._step()
        except Exception as error:  # noqa: BLE001  # raised by the next call for reports
            self.fail(error)

    @property
    def _has_step(self) -> bool:
        return self._engine.busy and not self._asleep and not self._holding.is_set()

    def _take_commands(self) -> None:
        try:
            run = self._inbox.get(block=not self._has_step, timeout=IDLE_WAIT_SECONDS)
            self._commanded = True
            while True:
                run()
                run = self._inbox.get_nowait()
        except queue.Empty:
            self._commanded = False

    def _submit(self, requests: Sequence[SequenceRequest]) -> None:
        now = time.monotonic()
        for request in requests:
            self._reported[request.sequence], self._submitted[request.sequence] = len(request.kept), now
            if request.trains:
                self._kept[request.sequence] = len(request.kept)
        if refused := self._engine.submit(requests):
            with self._lock:
                for completed in refused:
                    self._add_finished(completed)
            self._on_report()

    def _drop(self, sequences: Sequence[SequenceId]) -> None:
        self._engine.take(sequences)
        with self._lock:
            for name in sequences:
                for table in (self._reported, self._submitted, self._unsent, self._kept):
                    table.pop(name, None)
                self._outbox.progress.pop(name, None)
                self._outbox.started.pop(name, None)
                self._outbox.choices.pop(name, None)

    def _take(self, sequences: Sequence[SequenceId]) -> None:
        self._settle()
        taken = self._engine.take(sequences)
        with self._lock:
            for name, tokens in taken.items():
                self._add_whole(name, tokens)
                self._outbox.taken.append(name)
        self._on_report()

    def _commit(self, version: int, committed: Future[None], copy: RegisteredCopy | None = None) -> None:
        self._settle()
        self._engine.commit(version)
        self._asleep = False
        self._end_probe(None)
        with self._lock:
            self._outbox.loaded, self._outbox.copy = version, copy
        committed.set_result(None)
        self._on_report()

    def _sleep(self, slept: Future[None]) -> None:
        self._drop_probe()
        self._drop(list(self._submitted))
        self._asleep = True
        change = self._engine.sleep()
        with self._lock:
            self._outbox.slept = change
        slept.set_result(None)
        self._on_report()

    def _wake(self, woken: Future[None]) -> None:
        self._engine.wake()
        with self._lock:
            self._outbox.woken = True
        woken.set_result(None)
        self._on_report()

    def _probe(self, probe: Probe, version: int, probing: Future[ProbedLogProbs | None]) -> None:
        self._end_probe(None)
        self._probing = probing
        if self._engine.version == version:
            self._engine.probe(probe.sequences)
        else:
            self._end_probe(None)

    def _drop_probe(self) -> None:
        self._engine.probe(())
        self._end_probe(None)

    def _end_probe(self, result: ProbedLogProbs | None) -> None:
        if self._probing is None:
            return
        if result is None:
            with self._lock:
                self._outbox.probes_dropped += 1
        self._probing.set_result(result)
        self._probing = None

    def _load_again(self, weights: Any, version: int, changed: Future[list[str] | None]) -> None:  # noqa: ANN401
        if self._engine.version != version:
            changed.set_result(None)
            return
        try:
            before = self._engine.checksums()
            self._engine.settle()  # without its output: wrong weights have computed it
            self._engine.receive(weights, version)
            self._engine.commit(version)
            after = self._engine.checksums()
        except Exception as error:  # noqa: BLE001  # raised to the caller, which then ends the engine
            changed.set_exception(error)
        else:
            changed.set_result([name for name, checksum in before.items() if after.get(name) != checksum])

    def _step(self) -> None:
        started, began = time.time(), time.monotonic()
        output = self._engine.step()
        seconds = time.monotonic() - began
        progress: dict[SequenceId, GeneratedTokens] = {}
        if began - self._progressed >= self.progress_seconds:
            self._progressed, progress = began, self._engine.progress()
        with self._lock:
            if output.probed is None and not output.probing:
                self._step_log.add(output, seconds)  # a probe takes longer than other prompts of its length
            # A step that computes only a probe does not show that the engine can generate.
            self._steps += output.tokens > 0 or self._probing is None
            for name, tokens in progress.items():
                self._add_progress(name, tokens)
            self._add_interval(started, began)
            awaited = self._add_output(output)
        self._end_step(output, awaited)

    def _settle(self) -> None:
        """End the step in flight, if there is one, so that the command that runs comes between two steps."""
        started, began = time.time(), time.monotonic()
        output = self._engine.settle()
        with self._lock:
            if output.tokens:
                self._add_interval(started, began)
            awaited = self._add_output(output)
        self._end_step(output, awaited)

    def _add_output(self, output: StepOutput) -> bool:
        """Add the started and finished sequences of a step to the outbox. Returns whether a report is due."""
        self._outbox.started |= output.started
        self._outbox.generated += output.tokens
        for completed in output.finished:
            self._add_finished(completed)
        return self._is_awaited(output.finished)

    def _end_step(self, output: StepOutput, awaited: bool) -> None:
        """End the probe if the step has computed the end of it, and report if a report is due."""
        if output.probed is not None:
            self._end_probe(output.probed)
        if awaited:
            self._on_report()

    def _add_interval(self, started: float, began: float) -> None:
        """Add the time of a step that ends now to the outbox. One interval grows until the engine has no sequences.

        started, began: the start of the step in Unix seconds, and on the monotonic clock, which gives the duration.
        """
        intervals, ended = self._outbox.intervals, time.monotonic()
        if intervals and began - self._stepped < MAX_GAP_SECONDS:
            first, last = intervals[-1]
            intervals[-1] = (first, last + ended - self._stepped)
        else:
            intervals.append((started, started + ended - began))
        self._stepped = ended

    def _is_awaited(self, finished: Sequence[Completed]) -> bool:
        """Return whether a report is due because of sequences that have just finished (`AWAITED_SHARE`)."""
        if not finished:
            return False
        unfinished_groups = {group for group, _ in self._submitted}
        return len(self._outbox.finished) >= AWAITED_SHARE * len(self._submitted) or any(
            completed.sequence[0] not in unfinished_groups for completed in finished
        )

    def _add_progress(self, name: SequenceId, tokens: GeneratedTokens) -> None:
        """Add new tokens of a running sequence to the outbox, once they are PROGRESS_SHARE of its reported tokens.

        Raises NotFiniteLogProbs if a log-prob is infinite or not a number.
        """
        _check_finite(name, tokens)
        unsent = self._unsent.setdefault(name, [])
        unsent.append(_without_choices(tokens))
        new = sum(map(len, unsent))
        if new >= PROGRESS_SHARE * self._reported[name]:
            self._outbox.progress.setdefault(name, []).extend(unsent)
            self._reported[name] += new
            del self._unsent[name]

    def _add_finished(self, completed: Completed) -> None:
        """Add a finished sequence to the outbox."""
        name = completed.sequence
        if completed.reason is EndReason.ERROR:
            self._outbox.errors[name] = completed.error
        else:
            self._duration += 0.1 * (time.monotonic() - self._submitted[name] - self._duration)
        self._add_whole(name, completed.tokens)
        self._outbox.finished[name] = completed.reason

    def _add_whole(self, name: SequenceId, tokens: GeneratedTokens) -> None:
        """Add all tokens of a sequence to the outbox, with the choices of those that were computed here.

        The engine does not have the sequence any more, and it is forgotten. Its tokens in the outbox that would show its progress
        are not sent.

        Raises NotFiniteLogProbs if a log-prob is infinite or not a number.
        """
        self._unsent.pop(name, None)
        del self._submitted[name]
        if (kept := self._kept.pop(name, None)) is not None and len(own := tokens[kept:]) and own.choices is not None:
            self._outbox.choices[name] = own.choices
        whole = _without_choices(tokens)
        _check_finite(name, whole[self._reported.pop(name) :])
        self._outbox.progress.pop(name, None)
        self._outbox.tokens[name] = whole


class RolloutWorker(Process):
    """The Ray actor of one replica. Call `open` first, which builds the engine.

    shared: indices or UUIDs of the devices that this replica shares with train ranks; None: Ray assigns devices.
    life: the number of the attempt and the number of the replica, which are part of the random seed, so that no two
    actors of a run draw the same samples. end_token: the token that ends a response. devices: number of devices of the
    replica, which is larger in the straggler lane (replicas for long sequences). nodes: Ray's handles of the ReplicaNode
    actors of the replica's further nodes, if it is larger than a node. pictures: whether any prompt has pictures.
    vocabulary: number of tokens of the tokenizer. base: the manifest's folder. threads: number of torch's threads.
    logs: folder of the log files.
    """

    def __init__(
        self,
        spec: TrainingSpec,
        name: str,
        *,
        life: tuple[int, ...],
        end_token: int,
        devices: int = 1,
        nodes: Sequence[Any] = (),
        pictures: bool = False,
        shared: Sequence[str] | None = None,
        vocabulary: int,
        base: Path,
        threads: int,
        logs: Path,
    ) -> None:
        super().__init__(name, logs)
        if shared is not None and spec.accelerator.profile != "CPU":
            # Before torch is imported. Ray would show this process no device, because it asked for none.
            manager_of(spec.accelerator.profile).set_current_process_visible_accelerator_ids(list(shared))
        self._spec, self._life, self._end_token, self._vocabulary = spec, life, end_token, vocabulary
        self._devices, self._pictures, self._base, self._threads = devices, pictures, base, threads
        self._nodes = tuple(nodes)
        self._place: NodePlace | None = None  # of this node, if the replica is larger than a node
        self._watching: asyncio.Task[None] | None = None
        self._engine: EngineThread | None = None
        self._order, self._log = CommandOrder(self._apply), ReportLog()
        self._calls = WorkerServer({"exchange": self.exchange, "obey": self.obey})
        self._listening: asyncio.Task[Endpoint | None] | None = None
        self._changed = asyncio.Event()
        self._exchange, self._is_waiting = (
            0,
            False,
        )  # number of the last call of `exchange`; whether it waits for a report
        self._arrived: asyncio.Queue[LoadWeights | ProbeWeights | SleepEngine | WakeEngine] = asyncio.Queue()
        self._receiver = receiver()
        self._loaded: PublishedWeights | None = None  # the version in service
        self._opening: asyncio.Task[int | None] | None = None
        self._loading: asyncio.Task[None] | None = None
        self._probes: set[asyncio.Task[None]] = set()
        self._replacing = asyncio.Lock()  # held from the receipt of a version until its commit

    async def address(self) -> WorkerAddress:
        """Return the address of this process. An answer means that the processes of all nodes of the replica have started."""
        self._listening = self._listening or asyncio.create_task(self._listen())
        endpoint = await asyncio.shield(self._listening)
        further = await self._on_nodes("address", act="starting its process")
        return WorkerAddress(socket.gethostname(), os.getpid(), endpoint, tuple(host for host, _ in further))

    async def _listen(self) -> Endpoint | None:
        """Take calls without Ray. Returns None if that is impossible."""
        try:
            return await self._calls.open(own_address())
        except OSError as error:
            logger.warning("calls travel through Ray, because no port can be opened: %s", error)
            return None

    async def open(self) -> int | None:
        """Build the engine. Returns its token room: the number of tokens, over all sequences, that fit into its memory.

        Returns None if the memory suffices for the longest sequences in all slots. If the answer is lost, the driver
        repeats the call, which then waits for the same engine.
        """
        self._opening = self._opening or asyncio.create_task(self._open())
        return await asyncio.shield(self._opening)

    async def _open(self) -> int | None:
        """Build the engine in a thread, so that this actor can answer `address` meanwhile.

        Returns the same as `open`.
        """
        loop = asyncio.get_running_loop()
        engine = await (self._start_with_nodes() if self._nodes else asyncio.to_thread(self._start))
        self._engine = EngineThread(engine, lambda: loop.call_soon_threadsafe(self._changed.set))
        self._watching = asyncio.create_task(self._watch()) if self._nodes else None
        self._loading = asyncio.create_task(self._load_arrived())
        return self._limiting_room(engine)

    async def _start_with_nodes(self) -> RolloutEngine:
        """Build the engine while the further nodes start their processes. Raises the first error of any node."""
        further = await self._on_nodes("address", act="starting its process")
        config, of_nodes = await asyncio.to_thread(self._settings_of_nodes, [address for _, address in further])
        opening = [
            self._on_node(number, "open", config, settings, act="starting vLLM")
            for number, settings in enumerate(of_nodes, 1)
        ]
        building = asyncio.ensure_future(asyncio.to_thread(self._start))
        lost = asyncio.ensure_future(self._lost(opening))
        await asyncio.wait({building, lost}, return_when=asyncio.FIRST_COMPLETED)
        if not building.done():
            lost.result()  # raises, and the driver ends this process, which may wait for the lost one
        lost.cancel()
        return building.result()

    async def _lost(self, opening: Iterable[Coroutine[Any, Any, None]]) -> None:
        """Open the further nodes, and wait until one of them is lost. Raises the error of the first that is, or cannot start."""
        await asyncio.gather(*opening)
        await self._on_nodes("watch", act="starting vLLM")

    def _settings_of_nodes(self, addresses: Sequence[str]) -> tuple[HFConfig, list[CoreSettings]]:
        """Choose the place where the nodes meet. Returns the model's configuration and the settings of each further node.

        addresses: of the further nodes.
        """
        from qwen35_trainer.rollout.vllm_core import NodePlace

        own, count = own_address(), 1 + len(addresses)
        with socket.create_server((own, 0), family=socket.AF_INET6 if ":" in own else socket.AF_INET) as free:
            port = free.getsockname()[1]  # for torch.distributed, which cannot choose one
        self._place = NodePlace(0, count, own, own, port)
        config, settings = self._core()
        places = (NodePlace(number, count, address, own, port) for number, address in enumerate(addresses, 1))
        return config, [replace(settings, node=place) for place in places]

    async def _watch(self) -> None:
        """End the engine when a further node of the replica is lost."""
        try:
            await self._on_nodes("watch", act="generating")
        except Exception as error:  # noqa: BLE001  # raised by the next call for reports
            self._running.fail(error)

    async def _on_nodes(self, method: str, *arguments: object, act: str) -> list[Any]:
        """Call a method of all further nodes of the replica, and return the results. Raises the error of the first that fails."""
        numbers = range(1, 1 + len(self._nodes))
        return await asyncio.gather(*(self._on_node(number, method, *arguments, act=act) for number in numbers))

    async def _on_node(self, number: int, method: str, *arguments: object, act: str) -> Any:  # noqa: ANN401  # an actor's result
        """Call a method of the ReplicaNode of node `number`, and return the result. act: what the call does, for errors.

        Raises NodeLost if the node cannot be reached, which the driver would otherwise take for an unreachable replica.
        """
        call = getattr(self._nodes[number - 1], method).remote(*arguments)
        try:
            return await answer(call, of=f"node {number} of {self.name}", act=act, seconds=None)
        except ActorUnreachable as error:
            raise NodeLost(str(error)) from error

    def _limiting_room(self, engine: RolloutEngine) -> int | None:
        assert self._spec.rollout is not None
        room = engine.token_room
        return room if room < self._spec.rollout.maxSequencesPerReplica * self._length else None

    def _start(self) -> RolloutEngine:
        """Import torch and build the engine."""
        with starting():
            self.use_threads(self._threads)
            return self._build()

    def _build(self) -> RolloutEngine:
        """Build the engine that the manifest names.

        The modules of engines, which import torch, are imported here, because the driver also imports this module.
        """
        spec = self._spec
        assert spec.rollout is not None
        return self._vllm(spec) if spec.rollout.engine == "VLLM" else self._torch(spec, spec.rollout)

    def _torch(self, spec: TrainingSpec, rollout: RolloutSpec) -> RolloutEngine:
        from qwen35_trainer.models.qwen3_5.build_model import build
        from qwen35_trainer.rollout.torch import TorchEngine

        return TorchEngine(
            build(self._model_settings).to(device(spec.accelerator.profile)),
            end_token=self._end_token,
            slots=rollout.maxSequencesPerReplica,
            max_length=self._length,
            seed=self._seed,
            float32_logits=spec.train.headPrecision == "FP32",
            records_choices=spec.train.router.replay,
        )

    def _vllm(self, spec: TrainingSpec) -> RolloutEngine:
        """Build vLLM's engine. If adapters train, also load the base weights, which published versions then lack.

        Without adapters, no weights are loaded here, because every replica loads a published version before it joins.
        """
        from qwen35_trainer.models.qwen3_5.build_model import base_weights
        from qwen35_trainer.rollout.vllm import VLLMEngine
        from qwen35_trainer.rollout.vllm_core import build_core

        config, settings = self._core()
        engine = VLLMEngine(
            build_core(config, settings),
            config,
            end_token=self._end_token,
            max_length=self._length,
            on_cpu=settings.on_cpu,
            lora=spec.train.lora,
            reads_pictures=self._pictures,
            records_choices=spec.train.router.replay,
        )
        if spec.train.lora is not None:
            engine.load_base(base_weights(self._model_settings))
        return engine

    def _core(self) -> tuple[HFConfig, CoreSettings]:
        """Return the model's configuration and the settings of vLLM's engine core."""
        from qwen35_trainer.models.qwen3_5.build_model import configuration
        from qwen35_trainer.rollout.vllm_core import CoreSettings, NodePlace

        spec, rollout = self._spec, self._spec.rollout
        assert rollout is not None
        config = configuration(spec.model, vocabulary=self._vocabulary, max_length=self._length, base=self._base)
        return config, CoreSettings(
            slots=rollout.maxSequencesPerReplica,
            max_length=self._length,
            seed=self._seed,
            memory_fraction=rollout.memoryFraction,
            on_cpu=spec.accelerator.profile == "CPU",
            devices=self._devices,
            node=self._place or NodePlace(),
            options=rollout.vllm or VLLMSpec(),
            lora=spec.train.lora,
            sleeps=spec.mode == "Colocated",
            picture_tokens=spec.data.maxPromptTokens if self._pictures else 0,
            records_choices=spec.train.router.replay,
        )

    @property
    def _model_settings(self) -> ModelSettings:
        from qwen35_trainer.models.qwen3_5.build_model import ModelSettings
        from qwen35_trainer.models.qwen3_5.precision import PRECISIONS

        spec = self._spec
        precision = PRECISIONS[spec.model.precision]
        return ModelSettings(spec.model, spec.seed, self._vocabulary, self._length, self._base, precision)

    @property
    def _length(self) -> int:
        """Maximum length of a prompt and its response together, in tokens."""
        return self._spec.data.maxPromptTokens + self._spec.data.maxResponseTokens

    @property
    def _seed(self) -> int:
        return int(np.random.SeedSequence((self._spec.seed, *self._life)).generate_state(1)[0])

    async def obey(self, batch: CommandBatch | bytes) -> None:
        """Carry out packed commands in the order of their numbers. Commands that were carried out before are ignored."""
        with self._failing():
            self._order.receive(unpacked_commands(batch))

    async def exchange(self, after: int, batch: CommandBatch | bytes) -> Packed:
        """Carry out packed commands, and then return, packed, all reports after report number `after`.

        after: number of the last report that the driver has received, which acknowledges this report and all earlier
        ones. If there is no later report, the method waits until one is due: for example when a group has finished or
        weights were loaded, and at the latest after `report_seconds`. If `exchange` is called again meanwhile, the
        earlier call returns no reports, because the driver does not wait for that call any more. Raises EngineFailed if
        the engine has failed.
        """
        with self._failing():
            self._order.receive(unpacked_commands(batch))
            self._exchange += 1
            if not (reports := self._log.after(after)) and await self._is_due(self._exchange):
                self._log.add(self._running.report(self._log.next_number))
                reports = self._log.after(after)
            return pack(reports)

    async def _is_due(self, exchange: int) -> bool:
        """Wait until a report is due. Returns False if a later call of `exchange` than number `exchange` waits for it instead.

        Raises EngineFailed if the engine has failed.
        """
        engine = self._running
        if self._is_waiting:  # the waiting call may have cleared the event, and must end
            self._changed.set()
        self._is_waiting = True
        with contextlib.suppress(TimeoutError):  # then report first tokens and progress although nothing finished
            await asyncio.wait_for(self._changed.wait(), engine.report_seconds)
            async with asyncio.timeout(engine.gather_seconds):
                while not engine.has_urgent_report and exchange == self._exchange:
                    self._changed.clear()
                    await self._changed.wait()
        if exchange != self._exchange:
            return False
        self._is_waiting = False
        self._changed.clear()
        if (failure := engine.failure) is not None:
            self._changed.set()  # the same call through Ray must fail immediately too
            raise _engine_failed(self.name, failure) from failure
        return True

    async def stored_choices(self, number: int) -> list[ray.ObjectRef[RecordedChoices]]:
        """Put the choices of the sequences in `EngineReport.choices` of report `number` into Ray's object store.

        Returns a reference for each sequence, in this order, so that the driver gets references and not tables. Raises
        KeyError if the choices were claimed before, or too late (MAX_UNCLAIMED_REPORTS).
        """
        tables = self._running.take_choices(number)
        return await asyncio.to_thread(lambda: [ray.put(table) for table in tables])

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Context manager: an error in the body ends the engine, so that the repeated call fails too.

        Otherwise the repeated call could succeed without the commands or the report that the error has cost.
        """
        try:
            yield
        except EngineFailed:
            raise
        except Exception as error:
            if self._engine is not None:
                self._engine.fail(error)
            raise

    @property
    def _running(self) -> EngineThread:
        assert self._engine is not None, "the engine was not built"
        return self._engine

    def _apply(self, command: ReplicaCommand) -> None:
        match command:
            case SubmitSequences(requests):
                self._running.submit(requests)
            case DropSequences(sequences):
                self._running.drop(sequences)
            case TakeSequences(sequences):
                self._running.take(sequences)
            case LoadWeights() | ProbeWeights() | SleepEngine() | WakeEngine():
                self._arrived.put_nowait(command)

    async def _load_arrived(self) -> None:
        """Load and probe versions of the weights, and sleep and wake, in the order of the commands, until cancelled.

        An error ends the engine.
        """
        while True:
            try:
                match await self._arrived.get():
                    case LoadWeights(weights):
                        await self._load(weights)
                    case ProbeWeights(version, probe):
                        if self._loaded is not None and self._loaded.manifest.version == version:
                            self._begin_probe(self._loaded, probe)
                    case SleepEngine():
                        await asyncio.wrap_future(self._running.sleep())
                    case WakeEngine(reload):
                        await asyncio.wrap_future(self._running.wake())
                        if reload and self._loaded is not None:
                            await self._load(replace(self._loaded, probe=None))  # it was probed when it came
            except Exception as error:  # noqa: BLE001  # raised by the next call for reports
                self._running.fail(error)
                return

    async def _load(self, published: PublishedWeights) -> None:
        """Fetch and verify a version while the engine makes steps, then put the version in service between two steps.

        If the version should be read from another replica, and that fails, this is reported, so that the driver sends
        the version again.
        """
        version, engine = published.manifest.version, self._running
        try:
            weights = await self._fetch(published)
        except (SourceLost, WeightsDamaged) as error:
            if not isinstance(published.source, RegisteredCopy):
                raise
            logger.warning("version %d could not be read from another replica: %s", version, error)
            engine.report_unread(version)
            return
        async with self._replacing:
            await asyncio.to_thread(engine.receive, weights, version)
            del weights  # a reference would keep the version in memory
            await asyncio.wrap_future(engine.commit(version, self._receiver.copy))
            await self._on_nodes("release", act="releasing weights")
        self._loaded = published
        if published.probe is not None:
            self._begin_probe(published, published.probe)

    async def _fetch(self, published: PublishedWeights) -> HostWeights:
        """Fetch and verify a version on all nodes of the replica. Raises the error of the first node that fails."""
        fetching = asyncio.ensure_future(self._receiver.fetch(published))
        _, elsewhere = await asyncio.gather(fetching, self._on_nodes("fetch", published, act="fetching weights"))
        weights = fetching.result()
        return weights.with_nodes(elsewhere) if elsewhere else weights

    def _begin_probe(self, published: PublishedWeights, probe: Probe) -> None:
        """Begin to compare the version in service with its probe. The next version does not wait for the result."""
        probing = asyncio.create_task(self._probe(published, probe))
        self._probes.add(probing)
        probing.add_done_callback(self._probes.discard)

    async def _probe(self, published: PublishedWeights, probe: Probe) -> None:
        """Compare the log-probs of the version in service with those of the trainer.

        If they differ too much, end the engine. Does nothing if another version is in service, or comes into service
        first, or if no slot becomes free for the probe within `publication.timeoutSeconds`. An engine that hangs is
        detected by its missing steps.
        """
        version, engine, seconds = published.manifest.version, self._running, self._spec.publication.timeoutSeconds
        try:
            log_probs = await asyncio.wait_for(asyncio.wrap_future(engine.probe(probe, version)), seconds)
            if log_probs is None:
                return
            result = probe.result(log_probs, version)
            if result.mean <= probe.limit:
                engine.passed(result)
                return
            engine.hold()  # what it would generate from now on is known to be wrong
            async with self._replacing:
                assert self._loading is not None, "the version was loaded"
                self._loading.cancel()  # no other version comes into service while parameters are compared
                engine.fail(probe.failure(result, await self._wrong(published)))
        except TimeoutError:
            engine.drop_probe()
            logger.warning(
                "version %d was not compared with the trainer: its probe took more than %g s", version, seconds
            )
        except Exception as error:  # noqa: BLE001  # raised by the next call for reports
            engine.fail(error)

    async def _wrong(self, published: PublishedWeights) -> str:
        """Load the version in service once more, and return, as text, which parameters had other values."""
        version = published.manifest.version
        try:
            async with asyncio.timeout(COMPARISON_SECONDS):
                weights = await self._fetch(published)
                changed = await asyncio.wrap_future(self._running.changed_by_loading(weights, version))
        except Exception as error:  # noqa: BLE001  # a part of the message: the replica is lost in any case
            return f"its parameters could not be compared with the published ones: {type(error).__name__}: {error}"
        if changed is None:
            return "its parameters were not compared, because a later version has replaced them"
        if not changed:
            return "loading the version again changes no parameter, so its kernels, or what it does not load, are wrong"
        return f"its parameters differ from the published ones in {listed(changed)}"


def _without_choices(tokens: GeneratedTokens) -> GeneratedTokens:
    return tokens if tokens.choices is None else replace(tokens, choices=None)


def _check_finite(name: SequenceId, tokens: GeneratedTokens) -> None:
    if not np.isfinite(tokens.log_probs).all():
        at = int(np.isfinite(tokens.log_probs).argmin())
        raise NotFiniteLogProbs(
            f"token {tokens.ids[at]} of sequence {name} has the log-prob {tokens.log_probs[at]} with the weights of version "
            f"{tokens.versions.tolist()[at]}"
        )


def _engine_failed(name: str, failure: BaseException) -> EngineFailed:
    """Return the error that the driver receives when an engine fails.

    It has the failure reason of its cause, such as too little memory, if the cause has one.
    """
    error = EngineFailed(f"{name}: {type(failure).__name__}: {failure}")
    if (reason := reason_of(failure)) is not FailureReason.UNEXPECTED_ERROR:
        error.failure = reason
    return error

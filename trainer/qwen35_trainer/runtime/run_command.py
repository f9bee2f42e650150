"""`qwen35 run`: from a manifest to a finished run, on this machine or, as the command of a head pod, in a cluster.

    manifest ─► checks ─► Ray, data ─► folder ─► driver ─► view … ─► summary.json, report.html

After the first signal (Ctrl-C or SIGTERM), the run finishes the current update and saves. A second signal ends the run
within seconds, without saving. Before the folder is claimed, the first signal ends the command, because nothing is
written yet (signals.py). With --link, an order to stop has the effect of the first signal.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from qwen35_trainer.contract import Control
from qwen35_trainer.epoch import Epoch, FolderRefused, Superseded
from qwen35_trainer.exits import Interrupted
from qwen35_trainer.failure_reasons import FailureReason
from qwen35_trainer.manifest import Manifest, ManifestError, TrainingSpec, check_new, dump_manifest
from qwen35_trainer.progress.html_report import write_report
from qwen35_trainer.progress.metrics_file import read_records
from qwen35_trainer.progress.recorder import Recorder
from qwen35_trainer.progress.records import FinishRecord
from qwen35_trainer.progress.run_fold import RunFold
from qwen35_trainer.progress.run_view import View, make_view
from qwen35_trainer.progress.summary import Summary, summary_of
from qwen35_trainer.runtime.background import run_in_thread
from qwen35_trainer.runtime.folder import RunFolder
from qwen35_trainer.runtime.job import Job, RunData
from qwen35_trainer.runtime.link.reporter import Reporter
from qwen35_trainer.runtime.machine import devices_here, too_few_devices, uninstalled
from qwen35_trainer.runtime.owner import owner_of, run_of
from qwen35_trainer.runtime.preflight import problems_of, unsupported, untransported
from qwen35_trainer.runtime.prepare import prepare
from qwen35_trainer.runtime.process import MemoryWatch, share_cores, trim
from qwen35_trainer.runtime.resuming import RunStart, find_start, start_name
from qwen35_trainer.runtime.signals import SECOND_SIGNAL, Signals, limit

if TYPE_CHECKING:  # Ray takes a second to import, so it is imported after the checks that do not need it
    import ray

    from qwen35_trainer.runtime.driver import DriverState

FOLLOW_WAIT_SECONDS = 1.0
"""Maximum wait, in seconds, of one call of `Driver.follow`. At this interval, signals are passed to the driver."""

DRIVER_ANSWER_SECONDS = 600.0
"""Maximum time, in seconds, for an answer of the driver.

It usually answers within FOLLOW_WAIT_SECONDS, but takes longer while it starts.
"""

SIGNAL_POLL_SECONDS = 0.5
"""Interval, in seconds, at which a wait for the driver looks for signals. It is far below `signals.END_SECONDS`."""

STOPPED_BEFORE_TRAINING = "stopped by the operator before the training began; nothing was written"


class ReportFailed(RuntimeError):
    """The run has ended, but its summary or report could not be written.

    The message contains the outcome of the run.
    """

    failure = None  # the outcome of the run is recorded


@dataclass(frozen=True)
class FinishedRun:
    """A run that has ended: its final record, its summary and its folder."""

    finish: FinishRecord
    summary: Summary
    folder: RunFolder

    @property
    def saved_nothing(self) -> bool:
        """Whether the run was stopped before anything could be saved, so that no checkpoint exists."""
        return self.finish.outcome == "Stopped" and not self.summary["checkpoint"]


def run(
    manifest: Manifest,
    *,
    file: Path,
    output: Path | None,
    resume: str | None,
    console: Console,
    started: float,
    reporter: Reporter,
    signals: Signals | None = None,
    in_cluster: bool = False,
    how_to_resume: str = "--resume auto",
) -> FinishedRun:
    """Run a training from its manifest to its end, and report to `reporter`. Returns the results.

    file: path of the manifest. output: the output folder; None: runs/NAME. resume: the value of --resume; None: the
    option is not given. started: time at which the command began, in Unix seconds. signals: the signals to this
    command; None: there are none. in_cluster: whether this process runs in the head pod of a training, and uses the Ray
    cluster of its pods. how_to_resume: the command that continues this run, for messages.

    Raises ManifestError, DataError, FolderRefused or CheckpointError, before anything is written, if the manifest,
    the data, a folder or the checkpoint cannot be used. Raises Superseded if another attempt has taken over a folder.
    Raises Interrupted if a signal leaves no time to save, and ReportFailed if the run has ended but its results
    cannot be written.
    """
    problems = [*unsupported(manifest), *uninstalled(manifest.spec)]
    problems += untransported(manifest.spec, one_host=not in_cluster)
    if manifest.spec.accelerator.profile != "CPU" and not in_cluster:
        problems += too_few_devices(manifest.spec, devices_here(manifest.spec.accelerator.profile))
    if problems:
        raise ManifestError(file, problems)
    if not in_cluster:
        share_cores(manifest.spec)
    base = file.resolve().parent
    folder = RunFolder((output or Path("runs") / manifest.metadata.name).resolve())
    folder.check(manifest, resume=resume is not None, how_to_resume=how_to_resume, in_cluster=in_cluster)
    start = find_start(resume, folder, manifest, base, in_cluster=in_cluster)
    # In a cluster the operator has made these checks, and knows which trainings have begun.
    if start.checkpoint is None and not in_cluster and (problems := check_new(manifest.spec)):
        raise ManifestError(file, problems)
    reporter.begin(manifest=manifest, metrics=folder.metrics, checkpoint=start.checkpoint, started=started)
    bound = None if manifest.spec.mode == "SFT" else manifest.spec.effective_async.maxVersionLag
    name = manifest.metadata.name
    memory = None if in_cluster else MemoryWatch()  # it can measure only the processes of this machine
    with make_view(console, name=name, folder=folder.root, updates_total=None, max_version_lag=bound) as view:
        follower = _Follower(view, reporter, signals or Signals())
        follower.phase("checking what the manifest names")
        follower.signals.attend(partial(_check, manifest, file))
        follower.phase("starting Ray, reading the data")
        preparing = partial(
            prepare, manifest, base, folder, resume=start.checkpoint, started=started, in_cluster=in_cluster
        )
        prepared = _Prepared(run_in_thread("data", preparing))  # while Ray starts, because both take seconds
        claimed = partial(_claimed, start=start, resume=resume is not None)
        training = partial(_train, prepared, claimed, follower, in_cluster, _workers(manifest.spec))
        ended = follower.signals.attend(training, needs=prepared.done)
        follower.phase("writing the report")
        peak_rss_mib = memory.stop() if memory else None
        try:
            return FinishedRun(ended.finish, _report(ended, folder, bound, peak_rss_mib), folder)
        finally:
            ended.epoch.end()


@dataclass(frozen=True)
class _EndedTraining:
    """A training whose results are still to be written."""

    manifest: Manifest
    finish: FinishRecord
    epoch: Epoch
    """The period in which this attempt owns the output folder. The caller ends it after the results are written."""


class _Prepared:
    """The job and the data of a run, which another thread prepares.

    `take` returns them and keeps no reference, so that the caller can free the memory of the data.
    """

    def __init__(self, preparing: Future[tuple[Job, RunData]]) -> None:
        self._preparing: list[Future[tuple[Job, RunData]]] = [preparing]
        self.done: Future[None] = Future()
        """Done when the preparation has ended. If the preparation failed, this future has its error."""
        preparing.add_done_callback(self._end)

    def take(self) -> tuple[Job, RunData]:
        """Wait for the preparation, and return the job and the data.

        May be called once. Raises the error of the preparation.
        """
        return self._preparing.pop().result()

    def _end(self, preparing: Future[tuple[Job, RunData]]) -> None:
        if error := preparing.exception():
            self.done.set_exception(error)
        else:
            self.done.set_result(None)


def _train(
    prepared: _Prepared,
    claimed: Callable[[Job], AbstractContextManager[Job]],
    follower: _Follower,
    in_cluster: bool,
    workers: int,
) -> _EndedTraining:
    """Run the part of the command that needs Ray: claim the folders, start the driver, and follow it to the end.

    claimed: returns the context manager that claims the folders for a job. workers: number of Ray workers of the run. Raises Interrupted if a signal ends the
    run, or if an order to stop arrives before the training begins. Raises Superseded if another attempt has taken
    over a folder.
    """
    import ray

    from qwen35_trainer.runtime.site import connected

    with connected(in_cluster=in_cluster, workers=workers):
        job, data = prepared.take()
        if follower.reporter.stop_ordered:
            raise Interrupted(STOPPED_BEFORE_TRAINING)
        follower.signals.begin()
        with claimed(job) as owned:
            follower.reporter.training(job.updates_total)
            shared = ray.put(data)
            del data
            finish = _drive(owned, shared, follower)
            if finish.reason == FailureReason.SUPERSEDED:
                raise _superseded(owned, finish.message)
            assert owned.epoch is not None, "the folder is claimed"
            return _EndedTraining(owned.manifest, finish, owned.epoch)


def _workers(spec: TrainingSpec) -> int:
    """Return the number of Ray workers of a run: the driver, the train workers and the rollout replicas."""
    return 1 + spec.world_size + spec.rollout_replicas + spec.lane_replicas


def _superseded(job: Job, message: str) -> Superseded:
    """Return the exception that ends the command after the driver ended because another attempt owns a folder.

    message: the message of the driver's error.
    """
    later = False
    for epoch in (job.epoch, job.checkpoint_epoch):
        try:
            if epoch is not None:
                epoch.check()
        except Superseded as error:
            later |= error.by_later_attempt
        except (OSError, FolderRefused):  # then it is not known whose the folder is, and the operator gets a report
            continue
    return Superseded(message, by_later_attempt=later)


@contextmanager
def _claimed(job: Job, start: RunStart, *, resume: bool) -> Iterator[Job]:
    """Context manager: claim the output folder and the folder of the checkpoints. Yields the job with both epochs.

    start: the states of the folders as read before. When the body ends, the epoch of the checkpoints ends. The epoch
    of the output folder ends only if the body raises an exception, because otherwise the results are still written
    into that folder.

    Raises FolderRefused if another run uses or has changed a folder, and Superseded if another attempt of this run has.
    """
    manifest, folder, in_cluster = job.manifest, job.folder, job.in_cluster
    with ExitStack() as stack:
        if not in_cluster:  # there a network disk may keep the lock of a lost node
            stack.enter_context(folder.held())
        identity = folder.next_identity(manifest, resume=resume)
        run = run_of(manifest, folder, in_cluster=True) if in_cluster else identity
        assert run is not None, "a run of a cluster always has one"
        owner = owner_of(run, job.attempt, folder, in_cluster=in_cluster)
        epoch = start.output.take(owner)
        try:
            folder.claim(manifest, epoch, identity, resume=resume)
            owned = replace(job, epoch=epoch)
            if start.claim is not None:
                owner = replace(owner, start=start_name(job.resume, start.claim.folder))
                owned = replace(owned, checkpoint_epoch=stack.enter_context(start.claim.held(owner)))
            yield owned
        except BaseException:
            epoch.end()
            raise


def _check(manifest: Manifest, file: Path) -> None:
    """Raise ManifestError if functions, paths or names in the manifest cannot be used."""
    if problems := problems_of(manifest.spec, file.resolve().parent):
        raise ManifestError(file, problems)


def _report(ended: _EndedTraining, folder: RunFolder, bound: int | None, peak_rss_mib: float | None) -> Summary:
    """Write summary.json and report.html, and return the summary.

    bound: the maximum lag; None in SFT. peak_rss_mib: peak memory of the run's processes in MiB; None: not measured.
    Raises ReportFailed if the files cannot be written, and Superseded if another attempt has taken over the folder.
    """
    try:
        run = RunFold.of(read_records(folder.metrics))
        summary = summary_of(run.totals, max_version_lag=bound, peak_rss_mib=peak_rss_mib)
        ended.epoch.write(folder.summary, json.dumps(summary, indent=2) + "\n")
        write_report(folder.root, run, dump_manifest(ended.manifest), summary, write=ended.epoch.write)
    except (OSError, ValueError) as error:
        finish = ended.finish
        outcome = f"{finish.outcome}: {finish.message}" if finish.message else finish.outcome
        raise ReportFailed(f"{outcome}\nThe report was not written: {error}") from error
    return summary


def _release_prepared() -> None:
    """Return the memory of the prepared data to the system, because only the driver needs the data from now on.

    A tokenizer alone takes hundreds of megabytes. Releasing the memory takes a third of a second, while the driver's
    process starts.
    """
    gc.unfreeze()  # `starting` froze these objects
    gc.collect()
    trim()


def _drive(job: Job, data: ray.ObjectRef[RunData], follower: _Follower) -> FinishRecord:
    """Start the driver, and pass its records to the view and the reporter until the run ends. Returns the final record.

    data: the data of the run in Ray's object store. If the driver's process ends or hangs, this process writes the
    final record. Raises Interrupted at a signal that leaves no time to save, even if the driver hangs.
    """
    import ray
    from ray.exceptions import RayActorError

    from qwen35_trainer.runtime.calls import Stalled, loss_text
    from qwen35_trainer.runtime.driver import Driver
    from qwen35_trainer.runtime.site import driver_options

    driver: Any = ray.remote(**driver_options())(Driver).remote(job, [data])
    _release_prepared()
    try:
        return follower.follow(driver)
    except Interrupted:
        ray.kill(driver)  # it must not write after the folder is released
        raise
    except (RayActorError, Stalled) as error:
        ray.kill(driver)  # it may hang, and must not write records after this
        if follower.signals_end_run:  # the process is about to end, and may have ended the driver already
            raise Interrupted(SECOND_SIGNAL) from error
        message, reason = str(error), FailureReason.STALLED
        if isinstance(error, RayActorError):
            message, reason = f"the driver was lost: {loss_text(error)}", FailureReason.DRIVER_LOST
        message = f"{message} Continue with --resume auto"
        finish = FinishRecord(outcome="Failed", message=message, time=time.time() - job.started, reason=reason)
        with Recorder(job.folder.metrics, [follower.view, follower.reporter], job.writer) as recorder:
            recorder.append(finish)
        return finish


@dataclass
class _Follower:
    """Passes records and phases from the driver to the view and the reporter, and signals and orders to the driver."""

    view: View
    reporter: Reporter
    signals: Signals
    _stop_sent: bool = False
    _sent_control: Control | None = None
    _phase: str = ""

    @property
    def signals_end_run(self) -> bool:
        """Whether enough signals have arrived to end the run within seconds, without saving."""
        return limit(self.signals.count, begun=True) is not None

    def follow(self, driver: Any) -> FinishRecord:  # noqa: ANN401  # Ray's handles are untyped
        self._send_orders(driver)  # a signal may have arrived since the run began
        result = driver.run.remote()
        seen = 0
        while True:
            state: DriverState = self._answer(driver.follow.remote(seen, FOLLOW_WAIT_SECONDS))
            seen += len(state.records)
            self._pass_on(state)
            self._send_orders(driver)
            if state.over:
                finish: FinishRecord = self._answer(result)
                self.reporter.write(finish)  # needed if the records could not be written
                return finish

    def phase(self, text: str) -> None:
        if text != self._phase:
            self._phase = text
            self.view.phase(text)
            self.reporter.phase(text)

    def _pass_on(self, state: DriverState) -> None:
        self.reporter.replicas(state.hosts, state.drained)
        for record in state.records:
            self.view.write(record)
            self.reporter.write(record)
        self.phase(state.phase)

    def _send_orders(self, driver: Any) -> None:  # noqa: ANN401  # as above
        control = self.reporter.control
        if control is not None and control != self._sent_control:
            self._sent_control = control
            self._answer(driver.obey.remote(control))
        # An acknowledged order to stop is carried out even if it is withdrawn.
        if (self.signals.count or self.reporter.stop_ordered) and not self._stop_sent:
            self._stop_sent = True
            self.reporter.stopping()
            self._answer(driver.stop.remote())

    def _answer(self, call: ray.ObjectRef[Any]) -> Any:  # noqa: ANN401  # as above
        """Wait for the answer of a call to the driver, and return it.

        Raises Stalled after DRIVER_ANSWER_SECONDS, and Interrupted at a signal that leaves no time to save.
        """
        import ray

        from qwen35_trainer.runtime.calls import Stalled

        deadline = time.monotonic() + DRIVER_ANSWER_SECONDS
        while not ray.wait([call], timeout=SIGNAL_POLL_SECONDS)[0]:
            if self.signals_end_run:
                raise Interrupted(SECOND_SIGNAL)
            if time.monotonic() >= deadline:
                raise Stalled(
                    f"the driver did not answer within {DRIVER_ANSWER_SECONDS:g} s; its log in the run folder shows what it did last."
                )
        return ray.get(call)

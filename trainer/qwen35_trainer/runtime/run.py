"""`qwen35 run`: from a manifest to a finished run, on this machine or, as the command of a head pod, in a cluster.

    manifest ─► refuse what needs a cluster, what is not there ─► Ray, data ─► folder ─► driver ─► view … ─► summary.json, report.html

The first Ctrl-C or SIGTERM lets the current update finish and saves; a second one ends at once. Before the folder is
claimed, the first one ends the command: nothing is written yet (signals.py). With --link, an operator's order to stop does
what the first signal does.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Any

from rich.console import Console

from qwen35_trainer.contract import Control
from qwen35_trainer.progress.live import View, make_view
from qwen35_trainer.progress.recorder import Recorder
from qwen35_trainer.progress.records import FinishRecord, read_records
from qwen35_trainer.progress.report import write_report
from qwen35_trainer.progress.summary import Summary, summarise
from qwen35_trainer.runtime.beside import beside
from qwen35_trainer.runtime.environment import share_cores
from qwen35_trainer.runtime.folder import RunFolder, write_whole
from qwen35_trainer.runtime.interrupted import Interrupted
from qwen35_trainer.runtime.job import Data, Job
from qwen35_trainer.runtime.link.reporter import Reporter
from qwen35_trainer.runtime.machine import devices_here, too_few_devices
from qwen35_trainer.runtime.memory import MemoryWatch
from qwen35_trainer.runtime.news import News
from qwen35_trainer.runtime.owner import Claim, Owner, run_of
from qwen35_trainer.runtime.preflight import problems_of
from qwen35_trainer.runtime.prepare import prepare
from qwen35_trainer.runtime.process import trim
from qwen35_trainer.runtime.resuming import find_start
from qwen35_trainer.runtime.signals import Signals
from qwen35_trainer.runtime.support import unsupported
from qwen35_trainer.spec import Manifest, ManifestError, dump_manifest

if TYPE_CHECKING:  # Ray takes a second to import, and what can be refused without it is refused before
    import ray

FOLLOW_SECONDS = 1.0
"""Longest wait for the driver's news: signals are passed on to it at this interval."""

SILENT_SECONDS = 600.0
"""Deadline of an answer of the driver, which comes every FOLLOW_SECONDS unless its process hangs or still starts."""

ORDERED_EARLY = "stopped by the operator before the training began; nothing was written"


class ReportFailed(RuntimeError):
    """The run is over, but its summary or report could not be written; says how the run itself ended."""


@dataclass(frozen=True)
class Finished:
    """How a run ended."""

    finish: FinishRecord
    summary: Summary
    folder: RunFolder

    @property
    def saved_nothing(self) -> bool:
        """Whether it was stopped before there was anything to save."""
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
) -> Finished:
    """Train, and tell `reporter` how it goes. in_cluster: on the Ray of the operator's pods, of which this is the head.
    how_to_resume: the command that continues this run, for messages.

    Raises ManifestError, DataError, FolderRefused or CheckpointError, and has written nothing then; Interrupted for an
    end that leaves no time to save, and ReportFailed.
    """
    problems = unsupported(manifest)
    if manifest.spec.accelerator.profile != "cpu" and not in_cluster:
        problems += too_few_devices(manifest.spec, devices_here(manifest.spec.accelerator.profile))
    if problems:
        raise ManifestError(file, problems)
    if not in_cluster:
        share_cores(manifest.spec)
    base = file.resolve().parent
    folder = RunFolder((output or Path("runs") / manifest.metadata.name).resolve())
    folder.check(manifest, resume=resume is not None, how_to_resume=how_to_resume, in_cluster=in_cluster)
    start = find_start(resume, folder, manifest, base, in_cluster=in_cluster)
    reporter.begin(manifest=manifest, metrics=folder.metrics, checkpoint=start.checkpoint, started=started)
    bound = None if manifest.spec.mode == "SFT" else manifest.spec.effective_async.maxVersionLag
    name = manifest.metadata.name
    memory = None if in_cluster else MemoryWatch()  # which sees the processes of this machine
    with make_view(console, name=name, folder=folder.root, updates_total=None, max_version_lag=bound) as view:
        follower = _Follower(view, reporter, signals or Signals())
        follower.phase("checking what the manifest names")
        follower.signals.attend(partial(_check, manifest, file))
        follower.phase("starting Ray, reading the data")
        preparing = partial(
            prepare, manifest, base, folder, resume=start.checkpoint, started=started, in_cluster=in_cluster
        )
        prepared = _Prepared(beside("data", preparing))  # beside Ray's start, because both take seconds
        claimed = partial(_claimed, claim=start.claim, resume=resume is not None)
        finish = follower.signals.attend(partial(_train, prepared, claimed, follower, in_cluster), needs=prepared.done)
        follower.phase("writing the report")
        return Finished(finish, _report(manifest, folder, finish, bound, memory.stop() if memory else None), folder)


class _Prepared:
    """What is prepared on another thread. The caller of `take` holds the only reference to it."""

    def __init__(self, preparing: Future[tuple[Job, Data]]) -> None:
        self._preparing: list[Future[tuple[Job, Data]]] = [preparing]
        self.done: Future[None] = Future()
        """Fails with the reason why it cannot be prepared."""
        preparing.add_done_callback(self._end)

    def take(self) -> tuple[Job, Data]:
        """Wait for it. Once only. Raises why it cannot be prepared."""
        return self._preparing.pop().result()

    def _end(self, preparing: Future[tuple[Job, Data]]) -> None:
        if error := preparing.exception():
            self.done.set_exception(error)
        else:
            self.done.set_result(None)


def _train(
    prepared: _Prepared,
    claimed: Callable[[Job], AbstractContextManager[Job]],
    follower: _Follower,
    in_cluster: bool,
) -> FinishRecord:
    """All of the run that needs Ray."""
    import ray

    from qwen35_trainer.runtime.site import connected

    with connected(in_cluster=in_cluster):
        job, data = prepared.take()
        if follower.reporter.stop_ordered:
            raise Interrupted(ORDERED_EARLY)
        follower.signals.begin()
        with claimed(job) as owned:
            follower.reporter.training(job.updates_total)
            shared = ray.put(data)
            del data
            return _drive(owned, shared, follower)


@contextmanager
def _claimed(job: Job, claim: Claim | None, *, resume: bool) -> Iterator[Job]:
    """The job, while the output folder and the folder of the checkpoints are its own. Raises FolderRefused."""
    manifest, folder = job.manifest, job.folder
    # In a cluster the operator runs one attempt at a time, and a network disk may keep the lock of a lost node.
    with folder.claimed(manifest, resume=resume, locked=not job.in_cluster):
        if claim is None:
            yield job
            return
        run = run_of(manifest, folder, in_cluster=job.in_cluster)
        assert run is not None, "the output folder is claimed"
        owner = Owner(run, job.attempt, gethostname(), str(folder.root))
        with claim.held(owner):
            yield replace(job, owner=owner)


def _check(manifest: Manifest, file: Path) -> None:
    """Raises ManifestError when something that the manifest names is not there, or not what it should be."""
    if problems := problems_of(manifest.spec, file.resolve().parent):
        raise ManifestError(file, problems)


def _report(
    manifest: Manifest, folder: RunFolder, finish: FinishRecord, bound: int | None, peak_rss_mib: float | None
) -> Summary:
    """Write summary.json and report.html. Raises ReportFailed."""
    try:
        records = read_records(folder.metrics)
        summary = summarise(records, max_version_lag=bound, peak_rss_mib=peak_rss_mib)
        write_whole(folder.summary, json.dumps(summary, indent=2) + "\n")
        write_report(folder.root, records, dump_manifest(manifest), summary)
    except (OSError, ValueError) as error:
        ended = f"{finish.outcome}: {finish.message}" if finish.message else finish.outcome
        raise ReportFailed(f"{ended}\nThe report was not written: {error}") from error
    return summary


def _forget_what_is_prepared() -> None:
    """Return its memory to the system: a tokenizer takes hundreds of megabytes, and the driver has its own.

    Takes a third of a second, in which the driver's process starts.
    """
    gc.unfreeze()  # `starting` has set it aside
    gc.collect()
    trim()


def _drive(job: Job, data: ray.ObjectRef[Data], follower: _Follower) -> FinishRecord:
    """Run the driver, and pass on what it says. Should its process end, or hang, say that in its place."""
    import ray
    from ray.exceptions import RayActorError

    from qwen35_trainer.runtime.calls import Stalled
    from qwen35_trainer.runtime.driver import Driver
    from qwen35_trainer.runtime.site import driver_options

    driver: Any = ray.remote(**driver_options())(Driver).remote(job, [data])
    _forget_what_is_prepared()
    try:
        return follower.follow(driver)
    except (RayActorError, Stalled) as error:
        ray.kill(driver)  # it may hang, and must not write to the records any more
        message, reason = str(error), "Stalled"
        if isinstance(error, RayActorError):
            message, reason = f"the driver was lost: {' '.join(message.split())[:400]}", "DriverLost"
        message = f"{message} Continue with --resume auto"
        finish = FinishRecord(outcome="Failed", message=message, time=time.time() - job.started, reason=reason)
        with Recorder(job.folder.metrics, [follower.view, follower.reporter]) as recorder:
            recorder.append(finish)
        return finish


@dataclass
class _Follower:
    """Between the driver and everybody else: news to the view and the reporter; signals and orders to the driver."""

    view: View
    reporter: Reporter
    signals: Signals
    _told: bool = False
    _obeyed: Control | None = None
    _phase: str = ""

    def follow(self, driver: Any) -> FinishRecord:  # noqa: ANN401  # Ray's handles are untyped
        self._command(driver)  # a signal may have come since the run began
        result = driver.run.remote()
        seen = 0
        while True:
            news: News = self._answer(driver.follow.remote(seen, FOLLOW_SECONDS))
            seen += len(news.records)
            self._pass_on(news)
            self._command(driver)
            if news.over:
                finish: FinishRecord = self._answer(result)
                self.reporter.write(finish)  # again, where the records could not be written
                return finish

    def phase(self, text: str) -> None:
        if text != self._phase:
            self._phase = text
            self.view.phase(text)
            self.reporter.phase(text)

    def _pass_on(self, news: News) -> None:
        self.reporter.hosts(news.hosts)
        for record in news.records:
            self.view.write(record)
            self.reporter.write(record)
        self.phase(news.phase)

    def _command(self, driver: Any) -> None:  # noqa: ANN401  # as above
        control = self.reporter.control
        if control is not None and control != self._obeyed:
            self._obeyed = control
            self._answer(driver.obey.remote(control))
        # Acknowledged is acknowledged: an order to stop that is taken back meanwhile is carried out all the same.
        if (self.signals.count or self.reporter.stop_ordered) and not self._told:
            self._told = True
            self.reporter.stopping()
            self._answer(driver.stop.remote())

    def _answer(self, call: ray.ObjectRef[Any]) -> Any:  # noqa: ANN401  # as above
        """What the driver answers. Raises Stalled."""
        import ray
        from ray.exceptions import GetTimeoutError

        from qwen35_trainer.runtime.calls import Stalled

        try:
            return ray.get(call, timeout=SILENT_SECONDS)
        except GetTimeoutError as error:
            raise Stalled(
                f"the driver did not answer within {SILENT_SECONDS:g} s; its log in the run folder says what it did last."
            ) from error

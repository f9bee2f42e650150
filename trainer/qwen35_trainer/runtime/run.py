"""`qwen35 run`: from a manifest to a finished run, on this machine or, as the command of a head pod, in a cluster.

    manifest ─► refuse what needs a cluster ─► data ─► folder ─► Ray ─► driver ─► view … ─► summary.json, report.html

The first Ctrl-C or SIGTERM lets the current update finish and saves; a second one ends at once. Before the driver
is there, the first one ends the command: nothing is written yet. With --link, an operator's order to stop does what the
first signal does.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import ray
from ray.exceptions import RayActorError
from rich.console import Console

from qwen35_trainer.contract import Control
from qwen35_trainer.progress.live import View, make_view
from qwen35_trainer.progress.recorder import Recorder
from qwen35_trainer.progress.records import FinishRecord, read_records
from qwen35_trainer.progress.report import write_report
from qwen35_trainer.progress.summary import Summary, summarise
from qwen35_trainer.runtime.driver import Driver
from qwen35_trainer.runtime.folder import RunFolder, write_whole
from qwen35_trainer.runtime.interrupted import Interrupted
from qwen35_trainer.runtime.job import Data, Job
from qwen35_trainer.runtime.link.reporter import Reporter
from qwen35_trainer.runtime.memory import MemoryWatch
from qwen35_trainer.runtime.news import News
from qwen35_trainer.runtime.prepare import find_checkpoint, prepare
from qwen35_trainer.runtime.site import TOO_EARLY, connected, driver_options
from qwen35_trainer.runtime.support import unsupported
from qwen35_trainer.spec import Manifest, ManifestError, dump_manifest

FOLLOW_SECONDS = 1.0
"""Longest wait for the driver's news: signals are looked at this often."""

ORDERED_EARLY = "stopped by the operator before the training began; nothing was written"


class ReportFailed(RuntimeError):
    """The run is over, but its summary or report could not be written; says how the run itself ended."""


@dataclass(frozen=True)
class Finished:
    """How a run ended."""

    finish: FinishRecord
    summary: Summary
    folder: RunFolder


def run(
    manifest: Manifest,
    *,
    file: Path,
    output: Path | None,
    resume: str | None,
    console: Console,
    started: float,
    reporter: Reporter,
    in_cluster: bool = False,
) -> Finished:
    """Train, and tell `reporter` how it goes. in_cluster: on the Ray of the operator's pods, of which this is the head.

    Raises ManifestError, DataError, FolderRefused or CheckpointError, and has written nothing then; Interrupted for an
    end that leaves no time to save, and ReportFailed.
    """
    if problems := unsupported(manifest, in_cluster=in_cluster):
        raise ManifestError(file, problems)
    base = file.resolve().parent
    folder = RunFolder((output or Path("runs") / manifest.metadata.name).resolve())
    folder.check(manifest, resume=resume is not None)
    checkpoint = find_checkpoint(resume, folder, manifest.spec, base)
    reporter.begin(manifest=manifest, metrics=folder.metrics, checkpoint=checkpoint, started=started)
    bound = None if manifest.spec.mode == "SFT" else manifest.spec.effective_async.maxVersionLag
    name = manifest.metadata.name
    memory = None if in_cluster else MemoryWatch()  # which sees the processes of this machine
    with (
        make_view(console, name=name, folder=folder.root, updates_total=None, max_version_lag=bound) as view,
        _Signals() as signals,
    ):
        follower = _Follower(view, reporter, signals)
        follower.phase("starting Ray, reading the data")
        # Beside each other, because both take seconds.
        with ThreadPoolExecutor(1) as aside:
            preparing = aside.submit(
                prepare, manifest, base, folder, resume=checkpoint, started=started, in_cluster=in_cluster
            )
            with connected(manifest.spec, in_cluster=in_cluster):
                signals.catch()  # again: Ray has put its own handler of SIGTERM there
                job, data = preparing.result()
                if signals.count:
                    raise Interrupted(TOO_EARLY)
                if reporter.stop_ordered:
                    raise Interrupted(ORDERED_EARLY)
                folder.claim(manifest)
                reporter.training(job.updates_total)
                finish = _drive(job, data, follower)
        follower.phase("writing the report")
        return Finished(finish, _report(manifest, folder, finish, bound, memory.stop() if memory else None), folder)


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


def _drive(job: Job, data: Data, follower: _Follower) -> FinishRecord:
    """Run the driver, and pass on what it says. Should its process end, say that in its place."""
    driver = ray.remote(**driver_options())(Driver).remote(job, [ray.put(data)])
    try:
        return follower.follow(driver)
    except RayActorError as error:
        message = f"the driver was lost: {' '.join(str(error).split())[:400]} Continue with --resume auto"
        finish = FinishRecord(outcome="Failed", message=message, time=time.time() - job.started, reason="DriverLost")
        with Recorder(job.folder.metrics, [follower.view, follower.reporter]) as recorder:
            recorder.append(finish)
        return finish


@dataclass
class _Follower:
    """Between the driver and everybody else: news to the view and the reporter; signals and orders to the driver."""

    view: View
    reporter: Reporter
    signals: _Signals
    _told: bool = False
    _obeyed: Control | None = None
    _phase: str = ""

    def follow(self, driver: Any) -> FinishRecord:  # noqa: ANN401  # Ray's handles are untyped
        result = driver.run.remote()
        seen = 0
        while True:
            news: News = ray.get(driver.follow.remote(seen, FOLLOW_SECONDS))
            seen += len(news.records)
            self._pass_on(news)
            self._command(driver)
            if self.signals.count > 1:
                raise Interrupted("ended by a second signal; nothing since the last checkpoint was kept")
            if news.over:
                finish: FinishRecord = ray.get(result)
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
            ray.get(driver.obey.remote(control))
        # Acknowledged is acknowledged: an order to stop that is taken back meanwhile is carried out all the same.
        if (self.signals.count or self.reporter.stop_ordered) and not self._told:
            self._told = True
            self.reporter.stopping()
            ray.get(driver.stop.remote())


class _Signals:
    """Counts SIGINT and SIGTERM instead of dying of them."""

    def __init__(self) -> None:
        self.count = 0
        self._earlier: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        self.catch()
        return self

    def catch(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._earlier.setdefault(number, signal.signal(number, self._caught))

    def __exit__(self, *_: object) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)

    def _caught(self, number: int, frame: FrameType | None) -> None:
        self.count += 1

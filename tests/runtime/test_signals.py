"""Signals of `qwen35 run`, above all during its start: each ends the run in time, with its exit code, and nothing half written.

    limit          the table of runtime/signals.py
    the child      `Signals` on one end of a socket pair, a test on the other: no process
    the parent     `attended` in a Python of its own, with something small in the place of the run: a tenth of a second each
    the start      the real command, at four moments; `make soak` at SOAK_SIGNALS random ones (200), from SOAK_SEED if it is given

A real command is started as a real Python here: one that is forked from the fork server has imported everything already.
"""

import contextlib
import itertools
import os
import pty
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import psutil
import pytest
from typer.testing import CliRunner

from qwen35_trainer.commands import app
from qwen35_trainer.contract import parse_progress
from qwen35_trainer.data.data_errors import DataError
from qwen35_trainer.exits import FAILED, INTERRUPTED, Interrupted
from qwen35_trainer.manifest import load_manifest
from qwen35_trainer.progress.records import FinishRecord, UpdateRecord
from qwen35_trainer.runtime import run_command, signals
from qwen35_trainer.runtime.folder import RunFolder
from qwen35_trainer.runtime.link import reporter
from qwen35_trainer.runtime.results import NOTHING_SAVED
from qwen35_trainer.runtime.resuming import find_start
from qwen35_trainer.runtime.signals import (
    BEGUN,
    END_SECONDS,
    REPEAT_SECONDS,
    SECOND_SIGNAL,
    TOO_EARLY,
    Signals,
    _Parent,
    _received,
    limit,
)
from tests.patience import PATIENCE

from .conftest import Running, start_python

SECONDS, LOADED_SECONDS = 10.0, 20.0
"""What is promised of an end before the first update; the latter next to two processes that take all of two cores."""


# limit


@pytest.mark.parametrize(
    ("begun", "signals", "seconds"),
    [
        (False, 0, None), (False, 1, END_SECONDS), (False, 2, 0.0), (False, 3, 0.0),
        (True, 0, None), (True, 1, None), (True, 2, END_SECONDS), (True, 3, 0.0), (True, 4, 0.0),
    ],
)  # fmt: skip
def test_how_long_a_run_has_after_a_number_of_signals(begun, signals, seconds):
    assert limit(signals, begun=begun) == seconds


def test_a_run_that_is_killed_at_its_limit_ends_in_time():
    assert END_SECONDS < SECONDS - 2


# the child


class Child:
    """`attend` on a thread, as it is on the main thread of a child, and its parent's end of the connection."""

    def __init__(self) -> None:
        self.parent, end = socket.socketpair()
        self.signals = Signals(end)
        self._attending: threading.Thread | None = None
        self.ended: list[object] = []

    def attend(self, work, needs: Future[Any] | None = None) -> None:
        def run() -> None:
            try:
                self.ended.append(self.signals.attend(work, needs))
            except Exception as error:  # noqa: BLE001  # it is what the test is about
                self.ended.append(error)

        self._attending = threading.Thread(target=run, daemon=True)
        self._attending.start()

    def signal(self) -> None:
        self.parent.send(b"\0")

    def end(self) -> object:
        """What `attend` returned or raised."""
        assert self._attending is not None
        self._attending.join(PATIENCE)
        (ended,) = self.ended
        return ended


@pytest.fixture
def child():
    return Child()


@pytest.fixture
def never():
    """An event for work that lasts as long as the test."""
    event = threading.Event()
    yield event
    event.set()


def test_the_result_of_what_is_attended(child):
    child.attend(lambda: 7)
    assert child.end() == 7


def test_an_error_of_what_is_attended(child):
    child.attend(lambda: int("seven"))
    assert isinstance(child.end(), ValueError)


def test_what_the_work_needs_ends_it_by_failing_though_its_thread_continues(child, never):
    """Data that are wrong are refused without waiting for Ray."""
    needs: Future[int] = Future()
    child.attend(never.wait, needs)
    needs.set_exception(DataError(["no rows"]))
    assert isinstance(child.end(), DataError)


def test_what_the_work_needs_lets_it_continue_by_succeeding(child):
    needs: Future[int] = Future()
    child.attend(lambda: needs.result() + 1, needs)
    needs.set_result(6)
    assert child.end() == 7


def test_a_signal_before_the_run_has_begun_ends_it_though_its_thread_continues(child, never):
    child.attend(never.wait)
    child.signal()
    assert (type(ended := child.end()), str(ended)) == (Interrupted, TOO_EARLY)


def test_a_signal_that_came_before_is_found_immediately(child, never):
    child.signal()
    child.attend(never.wait)
    assert str(child.end()) == TOO_EARLY


def test_after_a_signal_a_run_cannot_begin(child):
    child.signal()
    with pytest.raises(Interrupted, match=TOO_EARLY):
        child.signals.begin()
    child.parent.setblocking(False)
    with pytest.raises(BlockingIOError):
        child.parent.recv(64)  # the parent was not notified that files are written


def test_the_parent_is_notified_before_a_run_begins(child):
    child.signals.begin()
    assert child.parent.recv(64) == BEGUN


def test_a_first_signal_lets_a_run_that_has_begun_end_on_its_own(child, eventually):
    def work() -> int:
        child.signals.begin()
        child.signal()
        eventually(lambda: child.signals.count == 1, "signal in the run's own thread")
        return 7

    child.attend(work)
    assert child.end() == 7


def test_a_second_signal_ends_a_run_that_has_begun(child, never, eventually):
    def work() -> None:
        child.signals.begin()
        never.wait()

    child.attend(work)
    assert child.parent.recv(64) == BEGUN
    child.signal()
    eventually(lambda: child.signals.count == 1, "first signal")
    assert child.ended == []
    child.signal()
    assert str(child.end()) == SECOND_SIGNAL


def test_counting_signals_in_the_thread_of_the_run_hides_none_from_the_main_thread(child, never):
    def work() -> None:
        while not never.wait(0):
            assert child.signals.count <= 1

    child.attend(work)
    child.signal()
    assert str(child.end()) == TOO_EARLY


def test_what_a_signal_breaks_in_the_start_is_not_the_error_that_counts(child):
    """As when it went to Ray's processes too."""

    def work() -> None:
        child.signal()
        raise ConnectionError("Ray is gone")

    child.attend(work)
    assert str(child.end()) == TOO_EARLY


def test_a_run_that_was_through_when_the_signal_came_is_through(child, monkeypatch):
    def send(connection: socket.socket, message: bytes) -> None:
        """Called once the result is there: the signal comes before the main thread hears of it."""
        child.signal()
        connection.send(message)

    monkeypatch.setattr(signals, "_send", send)
    child.attend(lambda: 7)
    assert child.end() == 7


def test_without_a_parent_there_are_no_signals():
    signals = Signals()
    signals.begin()
    assert (signals.attend(threading.current_thread), signals.count) == (threading.main_thread(), 0)


def test_an_operator_that_is_away_delays_no_end_by_a_signal(write, tmp_path, monkeypatch, eventually):
    link = tmp_path / "link"

    def interrupted(*_: object, **__: object) -> None:
        eventually((link / "progress.json").is_file, "first report")
        (link / "progress.json").unlink()
        link.rmdir()
        raise Interrupted(TOO_EARLY)

    monkeypatch.setattr(run_command, "run", interrupted)
    monkeypatch.setattr(reporter, "INTERRUPTED_REPORT_SECONDS", 0.2)
    with patch.dict(os.environ):  # it sets variables for its processes
        result = CliRunner().invoke(app, ["run", str(write(tmp_path)), "--link", str(link)])
    assert result.exit_code == 130
    assert result.stderr.startswith(f"Failed: {TOO_EARLY}\nThis could not be reported to the operator within 0.2 s: ")


def test_the_operator_is_given_up_before_the_run_is_killed():
    assert reporter.INTERRUPTED_REPORT_SECONDS < END_SECONDS - 2


# the parent


ATTENDED = """
import os, signal, subprocess, sys, threading, time
from qwen35_trainer.runtime import signals
signals.END_SECONDS = {limit}
signals.REPEAT_SECONDS = 0.0

def say(*words):
    print(*words, flush=True)

def forever():
    while True:
        time.sleep(1)

def work(run):
{body}

sys.exit(signals.attended(work))
"""
STUBBORN = "subprocess.Popen(['sleep', '1000'], start_new_session=True)\nsay('ready')\nforever()"
"""As a library that does not come back, with a process in a group of its own."""


@pytest.fixture
def attended(tmp_path):
    """attended(body, limit=1000) is a command whose run is `body`, once that has printed "ready" or is over."""
    started = []

    def start(body: str, *, limit: float = 1000.0) -> Running:
        home = tmp_path / str(len(started))
        home.mkdir()
        body = "\n".join(f"    {line}" for line in body.splitlines())
        running = _started(home, ["-c", ATTENDED.format(limit=limit, body=body)], folder=home)
        started.append(running)
        deadline = time.monotonic() + PATIENCE
        while "ready" not in running.out.read_text() and running.process.poll() is None:
            assert time.monotonic() < deadline, running.err.read_text()
            time.sleep(0.01)
        return running

    yield start
    for running in started:
        running.kill()


def _started(home: Path, arguments: list[str], *, folder: Path) -> Running:
    running = Running(home=home, folder=folder)
    with running.out.open("wb") as out, running.err.open("wb") as err:
        running.process = start_python(arguments, cwd=home, stdout=out, stderr=err, forked=False)
    return running


def _end(running: Running) -> tuple[int, str]:
    """Exit code and output on stderr. No process is left when it is over."""
    code = running.process.wait(PATIENCE)
    assert running.processes() == []
    return code, running.err.read_text()


@pytest.mark.parametrize(
    ("body", "code", "output"),
    [
        ("say('done')", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('wrong')", 1, ""),
        ("int('seven')", 1, "ValueError: invalid literal for int() with base 10: 'seven'\n"),
        ("os.abort()", 1, "the run was ended by SIGABRT\n"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 1, "the run was ended by SIGKILL\n"),
    ],
)
def test_the_exit_code_is_that_of_the_run(attended, body, code, output):
    ended, err = _end(attended(body))
    assert (ended, err.endswith(output)) == (code, True), err


def test_what_the_run_printed_last_is_not_lost(attended):
    running = attended("print('last words', end='')")
    _end(running)
    assert running.out.read_text() == "last words"


def test_a_run_that_does_not_end_is_killed_at_its_limit_and_all_its_processes_with_it(attended):
    running = attended(STUBBORN, limit=0.2)
    running.signal(signal.SIGTERM)
    assert _end(running) == (130, f"{TOO_EARLY}\n")


def test_a_second_signal_in_the_start_does_not_wait_for_the_limit(attended):
    running = attended(STUBBORN)
    running.signal(signal.SIGINT)
    running.signal(signal.SIGTERM)  # another one: of two alike that come together the kernel delivers one
    assert _end(running) == (130, f"{TOO_EARLY}\n")


def test_a_third_signal_kills_a_run_that_has_begun(attended):
    running = attended(
        "run.begin()\nsay('ready')\nwhile run.count < 2:\n    time.sleep(0.01)\nsay('second')\nforever()"
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        running.signal(number)
    running.wait_for("second")
    running.signal(signal.SIGINT)
    assert _end(running) == (130, f"{SECOND_SIGNAL}\n")


@pytest.fixture
def pipe():
    """Of a parent's signals."""
    ends = os.pipe()
    for end in ends:
        os.set_blocking(end, False)
    yield ends
    for end in ends:
        os.close(end)


def test_a_signal_that_is_sent_twice_in_a_row_is_one_signal(pipe, monkeypatch):
    """As `timeout` does: to the process, and to its group."""
    now = 100.0
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: now))
    run, end = socket.socketpair()
    caught, sent = pipe
    parent = _Parent(0, end, caught)
    delivered = []
    for seconds, numbers in (
        (0.0, [signal.SIGTERM, signal.SIGTERM]),
        (0.2, [signal.SIGTERM]),
        (0.2, [signal.SIGINT]),  # another one
        (0.3, [signal.SIGTERM, signal.SIGINT]),  # again, since nobody does that immediately; the other once more
        (0.5, [signal.SIGINT]),
    ):
        now = 100.0 + seconds
        os.write(sent, bytes(numbers))
        parent._receive()
        delivered.append(len(_received(run) or b""))
    assert delivered == [1, 0, 1, 1, 1]


def test_a_process_that_cannot_be_killed_is_not_waited_for(pipe, monkeypatch):
    """It waits for a hanging disk. Its number and its process group are those of one that lives on here."""
    monkeypatch.setattr(signals, "_end_orphans", lambda: None)
    monkeypatch.setattr(signals, "END_SECONDS", 0.01)
    monkeypatch.setattr(signals, "REAP_SECONDS", 0.01)
    monkeypatch.setattr(os, "kill", lambda *_: None)
    monkeypatch.setattr(os, "waitpid", lambda *_: (0, 0))
    _, end = socket.socketpair()
    caught, sent = pipe
    os.write(sent, bytes([signal.SIGTERM]))
    assert _Parent(0, end, caught).wait() == INTERRUPTED


def test_a_run_that_begins_while_a_signal_is_on_its_way_is_not_cut_short(pipe):
    """The parent knows of the signal first and sets a limit, which is lifted when it hears that the run has begun."""
    run, end = socket.socketpair()
    caught, signals = pipe
    parent = _Parent(0, end, caught)
    os.write(signals, bytes([signal.SIGCHLD, signal.SIGTERM]))
    parent._receive()
    assert parent._deadline is not None
    assert run.recv(64) == b"\0"
    run.send(BEGUN)
    parent._receive()
    assert parent._deadline is None


def test_a_run_that_begins_and_breaks_immediately_was_not_ended_by_the_signal_before(pipe, monkeypatch):
    """It has written files by then, so its end may not say that nothing was written."""
    monkeypatch.setattr(
        signals, "_end_orphans", lambda: None
    )  # of this process, whose other children are not the run's
    run, end = socket.socketpair()
    caught, sent = pipe
    child = os.fork()
    if child == 0:
        run.recv(64)
        run.send(BEGUN)
        os.kill(os.getpid(), signal.SIGKILL)
    parent = _Parent(child, end, caught)
    os.write(sent, bytes([signal.SIGTERM]))
    parent._receive()
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert parent.wait() == FAILED


def test_a_signal_that_is_blocked_at_the_start_arrives(tmp_path):
    """As SIGINT is in the jobs of a Ray cluster."""
    body = "    say('ready')\n    run.attend(forever)"
    command = ATTENDED.format(limit=1000, body=body).replace(
        "sys.exit", "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGCHLD})\nsys.exit"
    )
    running = _started(tmp_path, ["-c", command], folder=tmp_path)
    try:
        running.wait_for("ready")
        running.signal(signal.SIGINT)
        assert _end(running)[0] == 130
    finally:
        running.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_for_the_whole_group_reach_no_process_of_the_run(attended, number):
    body = (
        "run.begin()\nother = subprocess.Popen(['sleep', '1000'])\nsay('ready')\n"
        "while not run.count:\n    time.sleep(0.01)\nsay('ended, and the other', other.poll())"
    )
    running = attended(body)
    running.signal(number, group=True)
    assert _end(running) == (0, "")
    assert running.out.read_text() == "ready\nended, and the other None\n"


def test_signals_for_every_single_process_count_once(attended):
    """As Ray's job agent sends them."""
    body = (
        "run.begin()\nsay('ready')\ndef work():\n    while not run.count:\n        time.sleep(0.01)\n"
        "    time.sleep(0.2)\n    return run.count\nsay(run.attend(work))"
    )
    running = attended(body)
    for process in running.processes():
        process.send_signal(signal.SIGTERM)
    assert _end(running) == (0, "")
    assert running.out.read_text() == "ready\n1\n"


def test_a_start_that_breaks_because_of_the_signal_ends_with_the_code_of_the_signal(attended):
    running = attended("say('ready')\nwhile not run.count:\n    time.sleep(0.01)\nos.abort()")
    running.signal(signal.SIGTERM)
    assert _end(running) == (130, f"{TOO_EARLY}\n")


def test_a_refusal_after_a_signal_is_a_refusal(attended):
    running = attended("say('ready')\nwhile not run.count:\n    time.sleep(0.01)\nsys.exit(2)")
    running.signal(signal.SIGTERM)
    assert _end(running) == (2, "")


@pytest.mark.parametrize("waits", ["run.attend(forever)", "forever()"])
def test_a_parent_that_is_killed_takes_the_run_with_it(attended, eventually, waits):
    running = attended(f"say('ready')\n{waits}")
    assert len(running.processes()) == 2
    running.signal(signal.SIGKILL)
    eventually(lambda: not running.processes(), "end of the run")


def test_the_cursor_is_there_again_after_a_run_that_was_killed(tmp_path):
    reading, terminal = pty.openpty()
    body = "    say('\\x1b[?25l')\n    os.abort()"
    done = subprocess.run(
        [sys.executable, "-c", ATTENDED.format(limit=1000, body=body)],
        stdout=terminal,
        cwd=tmp_path,
        timeout=PATIENCE,
        check=False,
    )
    os.close(terminal)
    screen = b""
    with contextlib.suppress(OSError):  # how a terminal ends
        while part := os.read(reading, 4096):
            screen += part
    os.close(reading)
    assert (done.returncode, screen) == (FAILED, b"\x1b[?25l\r\n\x1b[?25h")


def test_orphans_of_a_run_that_is_over_are_ended(attended):
    body = "subprocess.Popen(['sh', '-c', 'sleep 1000 & sleep 1000'], start_new_session=True)"
    assert _end(attended(body)) == (0, "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_command_itself_is_imported_is_held(number):
    script = (
        "import os, signal, sys\nfrom qwen35_trainer import cli\n"
        "block = signal.pthread_sigmask\n"
        "def then_signalled(how, numbers):\n"
        "    signal.pthread_sigmask = block\n"
        f"    block(how, numbers)\n    os.kill(os.getpid(), {number:d})\n"
        "signal.pthread_sigmask = then_signalled\n"
        "cli._commands = lambda run: run.attend(lambda: signal.pause())\n"
        "sys.argv = ['qwen35', 'run']\ncli.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stderr.endswith(f"{TOO_EARLY}\n")) == (130, True), done.stderr


def test_a_signal_is_held_until_there_is_a_run_to_deliver_it_to():
    script = (
        "import os, signal, sys\nfrom qwen35_trainer.runtime import signals\nsignals.END_SECONDS = 0.2\n"
        "caught = signals._catch\n"
        "def then_signalled():\n    ends = caught()\n    os.kill(os.getpid(), signal.SIGTERM)\n    return ends\n"
        "signals._catch = then_signalled\n"
        "sys.exit(signals.attended(lambda run: run.attend(lambda: signal.pause())))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stderr.endswith(f"{TOO_EARLY}\n")) == (130, True), done.stderr


# the start


@pytest.fixture
def start(tmp_path):
    """start(FILE, …) is `qwen35 run FILE …` that has come to its first line. Its folder is next to the manifest."""
    numbers, started = itertools.count(), []

    def run(file: Path, *options: object) -> Running:
        home = tmp_path / f"home-{next(numbers)}"
        home.mkdir()
        output = home / "output"
        command = ["-m", "qwen35_trainer.cli", "run", file, "--output", output, *options]
        running = _started(home, [str(word) for word in command], folder=output)
        started.append(running)
        running.wait_until(lambda: _catches(running.process.pid, signal.SIGTERM), "first line")
        return running

    yield run
    for running in started:
        running.kill()


def _catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for that signal: Python's own start is over."""
    status = Path(f"/proc/{pid}/status").read_text()
    (mask,) = re.findall(r"^SigCgt:\s+([0-9a-f]+)$", status, re.MULTILINE)
    return bool(int(mask, 16) >> number - 1 & 1)


def _seconds_to_end(running: Running, number: int, *, group: bool = False) -> float:
    sent = time.monotonic()
    running.signal(number, group=group)
    running.process.wait(PATIENCE)
    return time.monotonic() - sent


def _wrote_nothing(running: Running) -> None:
    ended = running.end()
    assert (ended.code, ended.err) == (130, f"{TOO_EARLY}\n")
    assert not running.folder.exists()


def _stopped_whole(running: Running, file: Path) -> None:
    """As a run that was stopped, with a folder that can be resumed and nothing in it that is half written."""
    ended = running.end()
    saved = ended.summary["checkpoint"] is not None
    assert (ended.code, ended.err) == ((0, "") if saved else (130, f"{NOTHING_SAVED}\n")), ended.err
    assert ended.of(FinishRecord)[-1].outcome == "Stopped"
    assert ended.summary["outcome"] == "Stopped"
    assert ("--resume auto" in ended.out) == saved
    assert (running.folder / "report.html").is_file()
    manifest = load_manifest(file)
    folder = RunFolder(running.folder)
    folder.check(manifest, resume=True)
    checkpoint = find_start("auto", folder, manifest, file.parent).checkpoint
    updates = [record.update for record in ended.of(UpdateRecord)]
    assert (checkpoint.progress.update if checkpoint else 0) == max(updates, default=0)
    assert folder.identity
    assert [path for path in running.folder.rglob("*") if "partial" in path.name] == []


@pytest.mark.quiet
def test_a_signal_during_the_first_imports(start, write, tmp_path):
    running = start(write(tmp_path))
    assert _seconds_to_end(running, signal.SIGTERM) < SECONDS
    assert running.processes() == []
    _wrote_nothing(running)


@pytest.mark.quiet
def test_ctrl_c_while_ray_starts_is_reported_to_the_operator(start, write, tmp_path):
    running = start(write(tmp_path), "--link", tmp_path / "link")
    running.wait_until(lambda: running.processes("gcs_server"), "Ray's first process")
    assert _seconds_to_end(running, signal.SIGINT, group=True) < SECONDS
    assert running.processes() == []
    _wrote_nothing(running)
    report = parse_progress((tmp_path / "link" / "progress.json").read_text())
    assert (report.state, report.reason, report.message) == ("Failed", "Interrupted", TOO_EARLY)


@pytest.mark.quiet
def test_a_signal_while_data_are_read_that_never_come(start, write, tmp_path):
    """Ray is there, the driver is not."""
    file = write(tmp_path)
    (tmp_path / "train.jsonl").unlink()
    os.mkfifo(tmp_path / "train.jsonl")
    running = start(file)
    running.wait_until(lambda: running.processes("ray::"), "Ray's first worker")
    assert _seconds_to_end(running, signal.SIGTERM) < SECONDS
    assert running.processes() == []
    _wrote_nothing(running)


@pytest.mark.quiet
def test_a_signal_for_the_whole_group_while_the_model_loads(start, write, tmp_path):
    file = write(tmp_path)
    running = start(file)
    running.wait_for("phase=loading the model")
    assert _seconds_to_end(running, signal.SIGTERM, group=True) < SECONDS
    assert running.processes() == []
    _stopped_whole(running, file)


@contextlib.contextmanager
def _busy(processes: int):
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"], cwd="/") for _ in range(processes)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def _seconds_to_first_update(start, file: Path) -> float:
    began = time.monotonic()
    running = start(file)
    running.wait_for("update=1/")
    seconds = time.monotonic() - began
    running.kill()
    return seconds


@pytest.mark.soak
def test_a_signal_for_both_processes_of_a_run_lets_it_finish_a_long_update(start, write, tmp_path):
    """Ray's own handler would abort the child after three seconds. The update's last batch takes twice as long."""
    slow = "import asyncio\n\nasync def score(*_):\n    await asyncio.sleep(6)\n    return 1.0\n"
    file = write(tmp_path, {"train.updates": 20, "evaluation.everyUpdates": 20}, reward=slow)
    running = start(file)
    running.wait_for("update=1/")
    children = psutil.Process(running.process.pid).children()
    for process in (
        psutil.Process(running.process.pid),
        *(process for process in children if "qwen35" in " ".join(process.cmdline())),
    ):
        process.send_signal(signal.SIGTERM)
    assert running.process.wait(PATIENCE) == 0, running.err.read_text()
    _stopped_whole(running, file)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_signals_at_random_moments_of_the_start(start, write, tmp_path, capsys):
    count, seed = int(os.environ.get("SOAK_SIGNALS", "200")), int(os.environ.get("SOAK_SEED", time.time()))
    choice = random.Random(seed)
    file = write(tmp_path, {"train.updates": 500}, prompts=2100)
    wrong, kinds, slowest = [], Counter(), Counter()
    with capsys.disabled():
        print(f"\n{count} signals at random moments of the start, SOAK_SEED={seed}")
        for beside in (0, 2):
            with _busy(beside):
                start_seconds = _seconds_to_first_update(start, file)
                print(f"next to {beside} busy loops the first update comes after {start_seconds:.1f} s")
                for number in range(count // 2):
                    case = _One.draw(choice, number, beside, start_seconds)
                    running = start(file)
                    time.sleep(case.delay)  # the moment that was drawn
                    try:
                        seconds, code = case.send_and_check(running, file)
                    except AssertionError as error:
                        wrong.append(case)
                        print(f"{case}: {error}", flush=True)
                        continue
                    print(f"{case}: exit code {code} after {seconds:.1f} s", flush=True)
                    kinds.update(case.kinds(code))
                    slowest[beside] = max(slowest[beside], seconds)
        print("; ".join(f"{kind}: {done}" for kind, done in sorted(kinds.items())), f"wrong: {len(wrong)}", sep="; ")
        print(
            *(f"next to {beside} busy loops the slowest end took {slowest[beside]:.1f} s" for beside in (0, 2)),
            sep="; ",
        )
    assert wrong == []
    assert min(kinds[kind] for kind in ("SIGINT", "SIGTERM", "next to 0 busy loops", "next to 2 busy loops")) > 0


@dataclass(frozen=True)
class _One:
    """A signal of the soak test."""

    signal: signal.Signals
    group: bool
    twice: bool
    beside: int
    delay: float

    @classmethod
    def draw(cls, choice: random.Random, number: int, beside: int, start_seconds: float) -> "_One":
        group, twice, delay = choice.random() < 0.3, choice.random() < 0.1, choice.uniform(0, start_seconds)
        return cls((signal.SIGINT, signal.SIGTERM)[number % 2], group, twice, beside, delay)

    def kinds(self, code: int) -> list[str]:
        return [
            self.signal.name,
            "to the group" if self.group else "to the process",
            "twice" if self.twice else "once",
            f"next to {self.beside} busy loops",
            f"exit code {code}",
        ]

    def send_and_check(self, running: Running, file: Path) -> tuple[float, int]:
        """The seconds to its end, and the exit code. Raises AssertionError for anything that is not promised."""
        assert running.process.poll() is None, f"over before its signal: {running.err.read_text()[-300:]}"
        sent = time.monotonic()
        running.signal(self.signal, group=self.group)
        if self.twice:
            time.sleep(2 * REPEAT_SECONDS)  # else it would be the same signal once more
            with contextlib.suppress(ProcessLookupError):  # it may come too late
                running.signal(self.signal, group=self.group)
        code = running.process.wait(PATIENCE)
        seconds = time.monotonic() - sent
        output = f"{running.out.read_text()}\n{running.err.read_text()}"
        assert "Traceback" not in output, output
        assert running.processes() == [], output
        if code == 0 or NOTHING_SAVED in output:
            _stopped_whole(running, file)
        elif self.twice and running.folder.exists():
            assert (code, running.err.read_text()) == (130, f"{SECOND_SIGNAL}\n"), output
            # What it holds can be resumed, or is nothing.
            RunFolder(running.folder).check(load_manifest(file), resume=(running.folder / "run.yaml").exists())
        else:
            _wrote_nothing(running)
        assert seconds < (LOADED_SECONDS if self.beside else SECONDS), f"{seconds:.1f} s: {output}"
        return seconds, code

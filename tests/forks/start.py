"""Starts processes that import torch, by the fork server; or as real ones where FORKED is off (tests/profiles.py).

    with start(["-m", "qwen35_trainer.cli", "run", …], …) as process: …

A fork is a process like one that `subprocess.Popen` started: its pid is its own, signals go to it, and with a new session it leads
a process group that its own processes are in. Only its parent is the server, which reports its exit code.

What tests *imports* must not start this way: a forked process has imported everything already.
"""

from __future__ import annotations

import os
import select
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from tests.forks import shim
from tests.profiles import FORKED

REPOSITORY = Path(__file__).parents[2]
MODULES = [
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "qwen35_trainer.light_transformers",
    "transformers.models.qwen3_5.modeling_qwen3_5",
    "transformers.models.qwen3_5_moe.modeling_qwen3_5_moe",
    "transformers.tokenization_utils_fast",
    "aiohttp",
    "fsspec",
    "google.protobuf.internal.builder",
    "google.protobuf.text_format",
    "jsonschema",
    "plotly.graph_objects",
    "pydantic.v1.dataclasses",
    "requests",
    "rich.console",
    "typer",
    "qwen35_trainer.commands",
    "qwen35_trainer.data.prompt_set",
    "qwen35_trainer.engines.create_engine",
    "qwen35_trainer.engines.fsdp.engine",
    "qwen35_trainer.engines.origin",
    "qwen35_trainer.models.qwen3_5.build_model",
    "qwen35_trainer.pipeline.coordinator",
    "qwen35_trainer.pipeline.replay",
    "qwen35_trainer.progress.html_report",
    "qwen35_trainer.progress.sinks",
    "qwen35_trainer.rewards.scorer",
    "qwen35_trainer.rewards.scoring",
    "qwen35_trainer.rollout.torch",
    "qwen35_trainer.runtime.device_turns",
    "qwen35_trainer.runtime.exporting",
    "qwen35_trainer.runtime.journal_file",
    "qwen35_trainer.runtime.link.operator_link",
    "qwen35_trainer.runtime.probe_schedule",
    "qwen35_trainer.runtime.refusals",
    "qwen35_trainer.runtime.reported_tokens",
    "qwen35_trainer.runtime.response_samples",
    "qwen35_trainer.runtime.results",
    "qwen35_trainer.runtime.run_command",
    "qwen35_trainer.runtime.step_times",
    "qwen35_trainer.runtime.suspects",
    "qwen35_trainer.runtime.worker_connection",
    "qwen35_trainer.simulate.simulate_commands",
    "qwen35_trainer.weights.rank_weights",
    "qwen35_trainer.weights.relay",
    "qwen35_trainer.weights.transports.shared_memory",
]
"""What takes long to import of all that a run's processes and the ranks of tests import, and does not import Ray.

The packages that Ray imports are among them: they take longer than Ray itself. No module that is run by `-m`: runpy warns
when it was imported before.
"""


class Fork:
    """The part of subprocess.Popen that tests use."""

    def __init__(self, arguments: Sequence[str], connection: Any, pid: int, stdin: IO[bytes] | None) -> None:
        self.args = arguments
        self.pid = pid
        self.stdin = stdin
        self.returncode: int | None = None
        self._connection = connection

    def poll(self) -> int | None:
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._ended(timeout)
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return code

    def send_signal(self, number: int) -> None:
        """A fork that ended stays a zombie until its exit code has been asked for: its pid is never another process'."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _ended(self, seconds: float | None) -> int | None:
        ready = select.poll()  # not select.select, which takes no file number above 1023
        if self.returncode is None:
            ready.register(self._connection, select.POLLIN)
        if self.returncode is None and ready.poll(None if seconds is None else 1000 * seconds):
            code = shim.receive(self._connection)
            self._connection.close()
            # Where the server was killed, its forks were too.
            self.returncode = -signal.SIGKILL if code is None else code
        return self.returncode

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.stdin is not None:
            self.stdin.close()
        self.wait()


type Process = subprocess.Popen[bytes] | Fork
type Output = IO[bytes] | int | None


class ForkServer:
    """The server's process, and the folder of its socket and of what its forks start as Python."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="forks-")
        self.socket = Path(self._folder.name) / "socket"
        self.python = self.socket.with_name("python")
        command = [sys.executable, "-IS", shim.__file__, str(self.socket)]
        self.python.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
        self.python.chmod(0o755)
        command = [sys.executable, "-m", "tests.forks.server", str(self.socket), str(os.getpid()), *modules]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, cwd=REPOSITORY)
        self.pid = self._process.pid
        assert self._process.stdout is not None
        with self._process.stdout as output:
            ready = output.readline() == b"ready\n"
        if not ready:
            self.stop()
            raise AssertionError("the fork server did not start: see what it wrote to stderr")

    def start(
        self,
        arguments: Sequence[str],
        *,
        stdin: Output = None,
        stdout: Output = None,
        stderr: Output = None,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        start_new_session: bool = False,
    ) -> Fork:
        """`python ARGUMENTS …`, which are `-m MODULE …` or `SCRIPT …`; options as of subprocess.Popen.

        Of the pipes only one to stdin: write what a process says to a file.
        """
        assert subprocess.PIPE not in (stdout, stderr), "to a file"
        reading, pipe = None, None
        if stdin == subprocess.PIPE:
            reading, writing = os.pipe()
            stdin, pipe = reading, os.fdopen(writing, "wb")
        with Path(os.devnull).open("r+b", buffering=0) as nothing:
            files = [nothing if file == subprocess.DEVNULL else file for file in (stdin, stdout, stderr)]
            descriptors = [(_number(file, own=number), number) for number, file in enumerate(files)]
            connection, pid = shim.ask(
                str(self.socket),
                arguments,
                descriptors=[*descriptors, *((number, number) for number in pass_fds)],
                environment=dict(os.environ if env is None else env),
                folder=str(cwd or Path.cwd()),
                new_session=start_new_session,
            )
        if reading is not None:
            os.close(reading)
        return Fork(arguments, connection, pid, pipe)

    def stop(self) -> None:
        """All forks end with it."""
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


_servers: dict[tuple[str, ...], ForkServer] = {}


def start(arguments: Sequence[str], *, forked: bool = FORKED, imported: Sequence[str] = (), **options: Any) -> Process:
    """A Python with `ARGUMENTS …`: a fork of a server of this session, which the first one starts, or a real process.

    imported: what its server has imported after MODULES. options: of `ForkServer.start`, which are of subprocess.Popen too.
    """
    if not forked:
        return subprocess.Popen([sys.executable, *arguments], **options)
    return _server(imported).start(arguments, **options)


def python() -> str:
    """A Python for commands that the product starts: it forks `qwen35 export`, which imports torch (shim.py)."""
    return str(_server().python) if FORKED else sys.executable


def _server(imported: Sequence[str] = ()) -> ForkServer:
    modules = (*MODULES, *imported)
    if modules not in _servers:
        _servers[modules] = ForkServer(modules)
    return _servers[modules]


def stop() -> None:
    """End the session's servers, if there are some, and with them all forks."""
    while _servers:
        _servers.popitem()[1].stop()


def _number(file: Output, *, own: int) -> int:
    """Of an open file, as subprocess takes them; None is our own."""
    return own if file is None else file if isinstance(file, int) else file.fileno()

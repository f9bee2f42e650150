"""Processes that form a process group over gloo and carry out one job after another: starting them costs seconds.

    Group.run("train", …) ──(job to every rank's stdin)──► rank.py ──(result or traceback on a pipe)──► results by rank

A job that fails on one rank may leave others in a collective: the group is then ended, and started anew when needed.
"""

from __future__ import annotations

import os
import pickle
import selectors
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.patience import PATIENCE

REPOSITORY = Path(__file__).parents[2]


class Group:
    """`ranks` processes; started by the first job."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.processes: list[subprocess.Popen[bytes]] = []
        self._results: list[int] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, job: str, **arguments: Any) -> list[Any]:
        """What function `job` of rank.py returned on each rank. Fails with the traceback of the first rank that raised."""
        self.begin(job, **arguments)
        return self.results()

    def begin(self, job: str, **arguments: Any) -> None:
        if not self.processes:
            self._start()
        for process in self.processes:
            assert process.stdin is not None
            pickle.dump((job, arguments), process.stdin)
            process.stdin.flush()

    def results(self) -> list[Any]:
        found: dict[int, Any] = {}
        until = time.monotonic() + PATIENCE
        with selectors.DefaultSelector() as selector:
            for rank, pipe in enumerate(self._results):
                selector.register(pipe, selectors.EVENT_READ, rank)
            while len(found) < self.ranks:
                ready = selector.select(until - time.monotonic())
                if not ready:
                    self.stop()
                    raise AssertionError(f"ranks {sorted(set(range(self.ranks)) - found.keys())} did not answer")
                for key, _ in ready:
                    status, value = self._read(key.fd)
                    if status != "done":
                        self.stop()
                        raise AssertionError(f"rank {key.data}: {value}")
                    found[key.data] = value
                    selector.unregister(key.fd)
        return [found[rank] for rank in range(self.ranks)]

    def stop(self) -> None:
        """End the processes. SIGKILL: one of them may be in a collective."""
        for process in self.processes:
            process.kill()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
        for pipe in self._results:
            os.close(pipe)
        if self._folder is not None:
            self._folder.cleanup()
        self.processes, self._results, self._folder = [], [], None

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="group-")
        for rank in range(self.ranks):
            reading, writing = os.pipe()
            command = [
                sys.executable,
                "-m",
                "tests.distributed.rank",
                str(rank),
                str(self.ranks),
                self._folder.name,
                str(writing),
            ]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            self.processes.append(
                subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(writing,), env=environment, cwd=REPOSITORY)
            )
            os.close(writing)
            self._results.append(reading)

    def _read(self, pipe: int) -> tuple[str, Any]:
        header = _exactly(pipe, 8)
        if header is None:
            return "lost", "the process ended"
        body = _exactly(pipe, int.from_bytes(header))
        return pickle.loads(body) if body is not None else ("lost", "the process ended")


def _exactly(pipe: int, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        part = os.read(pipe, size - len(parts))
        if not part:
            return None
        parts += part
    return bytes(parts)

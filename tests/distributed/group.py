"""Processes that form a process group over gloo and carry out one job after another: starting them costs seconds.

    Group.run("train", …) ──(job to every rank's stdin)──► rank.py ──(result or traceback on a pipe)──► results by rank
                             all have answered ──(stdin)──► rank.py closes the job's connections

after a job          the group
every rank answered  continues, even if all raised: after an error on all ranks no rank waits in a collective;
                     is ended if the jobs before have left more than MAX_IDLE_THREADS threads in a rank
some raised          waits GRACE_SECONDS for the others; who has not answered then is in a collective, and the group is ended
one has ended        is ended
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from tests.distributed import wire
from tests.forks.start import REPOSITORY, Process, start
from tests.patience import PATIENCE

MAX_IDLE_THREADS = 300
"""Maximum number of threads in a rank that serve connections of earlier jobs. They take a core for each thousand.

An engine of megatron-core that something still holds leaves some fifty.
"""
GRACE_SECONDS = 10.0
"""Seconds between the answers of ranks that refuse the same job."""


class Group:
    """`ranks` processes; started by the first job.

    module: what they run, `rank.py` or a module that calls its `main`. imported: what their fork server has imported for it.
    """

    def __init__(self, ranks: int, module: str = "tests.distributed.rank", imported: Sequence[str] = ()) -> None:
        self.ranks, self._module, self._imported = ranks, module, imported
        self.processes: list[Process] = []
        self._results: list[int] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, job: str, **arguments: Any) -> list[Any]:
        """What function `job` of rank.py returned on each rank. Fails with the traceback of the first rank that raised."""
        self.begin(job, **arguments)
        return self.results()

    def begin(self, job: str, **arguments: Any) -> None:
        if not self.processes:
            self._start()
        self._send((job, arguments))

    def results(self) -> list[Any]:
        answers = self._answers()
        silent = sorted(set(range(self.ranks)) - answers.keys())
        if silent or any(status == "lost" or threads > MAX_IDLE_THREADS for status, _, threads in answers.values()):
            self.stop()
        self._send(None)
        for rank, (status, value, _) in answers.items():
            if status != "done":
                raise AssertionError(f"rank {rank}: {value}")
        assert not silent, f"ranks {silent} did not answer"
        return [answers[rank][1] for rank in range(self.ranks)]

    def _answers(self) -> dict[int, tuple[str, Any, int]]:
        """Status, value and threads of earlier jobs by rank, in the order in which they came; without the ranks that were not waited
        for any longer."""
        answer_of: dict[int, tuple[str, Any, int]] = {}
        until = time.monotonic() + PATIENCE
        with selectors.DefaultSelector() as selector:
            for rank, pipe in enumerate(self._results):
                selector.register(pipe, selectors.EVENT_READ, rank)
            while selector.get_map() and (ready := selector.select(max(0.0, until - time.monotonic()))):
                for key, _ in ready:
                    answer_of[key.data] = status, _, _ = self._read(key.data)
                    selector.unregister(key.fd)
                    if status == "lost":
                        return answer_of
                    if status == "raised":
                        until = min(until, time.monotonic() + GRACE_SECONDS)
        return answer_of

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

    def _send(self, message: object) -> None:
        octets = wire.dumps(message)
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(octets)
            process.stdin.flush()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="group-")
        for rank in range(self.ranks):
            reading, writing = os.pipe()
            arguments = ["-m", self._module, str(rank), str(self.ranks), self._folder.name, str(writing)]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            options = {"stdin": subprocess.PIPE, "pass_fds": (writing,), "env": environment, "cwd": REPOSITORY}
            self.processes.append(start(arguments, imported=self._imported, **options))
            os.close(writing)
            self._results.append(reading)

    def _read(self, rank: int) -> tuple[str, Any, int]:
        pipe = self._results[rank]
        header = _exactly(pipe, 8)
        body = None if header is None else _exactly(pipe, int.from_bytes(header))
        return ("lost", self._ended(rank), 0) if body is None else wire.loads(body)

    def _ended(self, rank: int) -> str:
        """A pipe is closed a moment before its process has an exit code."""
        code = self.processes[rank].wait(PATIENCE)
        return f"the process ended ({f'exit code {code}' if code >= 0 else signal.Signals(-code).name})"


def _exactly(pipe: int, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        part = os.read(pipe, size - len(parts))
        if not part:
            return None
        parts += part
    return bytes(parts)

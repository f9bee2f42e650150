"""The fork server: one process that has imported torch, transformers and the engines, and forks all others that need them.

    a test ── start(["-m", "qwen35_trainer.cli", "run", …]) ──┐                         ┌─► fork: qwen35 run ──► Ray's daemons
                                                              ├─ Unix socket ─► server ─┼─► fork: a rank of a Group    │
    raylet ── shim.py default_worker.py … ────────────────────┘                         └─► fork: a worker of Ray ◄────┘
                                                                                            (asked for by its shim)

Importing costs a process 4 core-seconds, forking it 15 milliseconds. The server has one thread, since only the forking thread continues in a
fork, and never imports Ray, which reads the environment of its process when it is imported.

One connection is one fork: request with open files (SCM_RIGHTS) ─► ◄─ pid ─ … ◄─ exit code ─ … closed by who asked.

waits on                       then
a request                      fork; the fork leaves this loop and becomes what was asked for (fresh.py)
the end of a fork              its exit code is sent; it stays a zombie, as a child does that nobody has waited for
a connection being closed      the fork is killed, if it still runs, and reaped: none outlives who asked for it
the end of who started us      we end. Forks end with us: PR_SET_PDEATHSIG

    python -m tests.forks.server SOCKET PARENT MODULE …          imports the modules; prints "ready" once it listens
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import marshal
import os
import selectors
import shutil
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.forks import fresh
from tests.forks.shim import SIZE
from tests.patience import PATIENCE

SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}
"""Read when torch and transformers are imported; as `runtime/process.py` and the tests set them for their processes."""


@dataclass
class Request:
    """What a fork is to become: sent by `shim.ask`."""

    arguments: list[str]
    """As for Python: `-m MODULE …` or `SCRIPT …`."""
    environment: dict[str, str]
    folder: str
    new_session: bool
    """It leads a session, and so a process group, of its own; else it is in the server's, which are those of pytest."""
    mask: list[int]
    """Signals that the client has blocked: a process that it starts inherits them."""
    numbers: list[int]
    """The number of each received open file."""


@dataclass
class Fork:
    pid: int
    alive: int
    """Process file descriptor: readable once it has ended."""
    connection: socket.socket
    wanted: bool = True
    """Whether who asked for it still has its connection."""
    ended: bool = False

    def close(self) -> None:
        os.close(self.alive)
        self.connection.close()


class Server:
    def __init__(self, path: Path, parent: int) -> None:
        self._forks: list[Fork] = []
        self._parent = os.pidfd_open(parent)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(64)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._parent, selectors.EVENT_READ)

    def serve(self) -> tuple[Request, list[int]] | None:
        """Returns in each fork, with its request and open files; in the server only when its parent has ended."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj == self._parent:
                    return None
                if key.fileobj == self._listener:
                    if (fork_request := self._accept()) is not None:
                        return fork_request
                elif key.fd == key.data.alive:
                    self._end(key.data)
                else:
                    self._abandon(key.data)

    def _accept(self) -> tuple[Request, list[int]] | None:
        connection, _ = self._listener.accept()
        connection.settimeout(PATIENCE)
        try:
            request, files = _receive(connection)
        except (ConnectionError, TimeoutError):  # who asked ended before it had asked
            connection.close()
            return None
        pid = os.fork()
        if pid == 0:
            connection.close()
            self._close()
            return request, files
        for file in files:
            os.close(file)
        fork = Fork(pid, os.pidfd_open(pid), connection)
        self._forks.append(fork)
        self._selector.register(fork.alive, selectors.EVENT_READ, fork)
        self._selector.register(connection, selectors.EVENT_READ, fork)
        _tell(connection, pid)
        return None

    def _end(self, fork: Fork) -> None:
        """A fork has ended."""
        fork.ended = True
        self._selector.unregister(fork.alive)
        status = os.waitid(os.P_PID, fork.pid, os.WEXITED | os.WNOWAIT)
        assert status is not None
        _tell(fork.connection, status.si_status if status.si_code == os.CLD_EXITED else -status.si_status)
        self._forget_if_over(fork)

    def _abandon(self, fork: Fork) -> None:
        """The client of a fork has received its exit code, or has ended."""
        fork.wanted = False
        self._selector.unregister(fork.connection)
        signal.pidfd_send_signal(fork.alive, signal.SIGKILL)
        self._forget_if_over(fork)

    def _forget_if_over(self, fork: Fork) -> None:
        if fork.ended and not fork.wanted:
            os.waitpid(fork.pid, 0)
            fork.close()
            self._forks.remove(fork)

    def _close(self) -> None:
        """In a fork: what is open belongs to the server."""
        self._selector.close()
        self._listener.close()
        os.close(self._parent)
        for fork in self._forks:
            fork.close()


def _receive(connection: socket.socket) -> tuple[Request, list[int]]:
    header, files, *_ = socket.recv_fds(connection, SIZE, 253)  # the most that the kernel lets through at a time
    body = bytearray()
    while header and len(body) < int.from_bytes(header):
        part = connection.recv(1 << 20)
        if not part:
            break
        body += part
    if not header or len(body) < int.from_bytes(header):
        for file in files:
            os.close(file)
        raise ConnectionResetError
    fields: dict[str, Any] = marshal.loads(body)  # from our own tests
    return Request(**fields), list(files)


def _tell(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(ConnectionError):  # it is gone, for which its fork is killed next
        connection.send(number.to_bytes(SIZE, signed=True))


def _check() -> None:
    """That a fork of this process can be like one that has just been started."""
    assert "ray" not in sys.modules, "Ray reads its settings from the environment when it is imported"
    threads = os.listdir("/proc/self/task")  # noqa: PTH208
    assert len(threads) == 1, f"{len(threads)} threads, of which a fork would have one"
    files = {number: os.readlink(f"/proc/self/fd/{number}") for number in fresh.open_files()}  # noqa: PTH115
    assert not files.keys() - {0, 1, 2}, f"a module has opened {files}"


def main(path: Path, parent: int, modules: list[str]) -> None:
    signal_of_a_terminal = signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # it is for pytest, which ends us when it is through
    os.environ |= SETTINGS
    for module in modules:
        importlib.import_module(module)
    _check()
    sys.executable = str(path.with_name("python"))  # what a fork starts: Ray's workers are forks again (shim.py)
    gc.collect()
    gc.freeze()  # a collection in a fork leaves what it shares with the others alone
    server = Server(path, parent)
    if os.getppid() != parent:
        return
    print("ready", flush=True)
    own = os.getpid()
    if (fork_request := server.serve()) is not None:
        signal.signal(signal.SIGINT, signal_of_a_terminal)
        fresh.become(*fork_request, own)
    shutil.rmtree(path.parent)  # who started us was killed, and cannot


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])

"""Started in the place of Python, in no time: has the fork server fork what would have to import torch.

    python -IS shim.py SOCKET ARGUMENTS ...

    a worker of Ray, `qwen35 export` ──► requests a fork from the server on SOCKET (server.py), forwards SIGINT and SIGTERM to it,
                                         ends as it ends
    anything else                    ──► becomes the real Python

For a forked `qwen35 run` and its workers `sys.executable` is a script that runs this file (start.py), because Ray builds the
commands of its processes from `sys.executable`. Ray's daemons do not import torch: they get the Python that they expect.
A worker without a runtime environment, as all of ours are, is started as `default_worker.py` alone; one with would come as
`setup_worker.py`, which is passed on and becomes a real Python.

The shim and the fork are two processes where Ray expects one:

    the fork ends                     the shim ends the same way, by the same signal if it was one
    SIGINT, SIGTERM for the shim      forwarded; a parent that blocked them for the shim, as Ray does, blocked them for the fork
    SIGKILL for the shim              closes its connection, for which the server kills the fork
    a signal for the shim's group     reaches the shim only: no process can join the group of another session

Every import counts here, as each start of a process waits for it: `_socket` and `_signal` are a tenth of `socket` and `signal`,
`marshal` needs no import, and both ends are the same Python.
"""

from __future__ import annotations

import _signal
import _socket
import marshal
import os
import sys

WORKER = "default_worker.py"
EXPORT = ["-m", "qwen35_trainer.cli", "export"]
SIZE = 8
"""Bytes of a number in the protocol."""


TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn


def ask(
    server: str, arguments: Sequence[str], *, descriptors: Sequence[tuple[int, int]], **options: object
) -> tuple[_socket.socket, int]:
    """A fork that runs `arguments` as Python would. Returns the connection, which holds its exit code in the end, and its pid.

    descriptors: pairs of an open file of ours, and its number in the fork.  options: fields of `server.Request`.
    """
    request = options | {
        "arguments": list(arguments),
        "numbers": [number for _, number in descriptors],
        "mask": sorted(map(int, _signal.pthread_sigmask(_signal.SIG_BLOCK, ()))),
    }
    body = marshal.dumps(request)
    open_files = b"".join(own.to_bytes(4, sys.byteorder) for own, _ in descriptors)
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    connection.connect(server)
    connection.sendmsg([len(body).to_bytes(SIZE)], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, open_files)])
    connection.sendall(body)
    pid = receive(connection)
    if pid is None:
        raise ConnectionError("the fork server ended")
    return connection, pid


def receive(connection: _socket.socket) -> int | None:
    """A pid, or an exit code: negative for a signal, as in subprocess. None when the server has ended."""
    number = connection.recv(
        SIZE
    )  # the server sends each message in one call, and a few bytes always arrive together on one machine
    return int.from_bytes(number, signed=True) if number else None


def end_as(code: int) -> NoReturn:
    """End this process with an exit code, or by a signal where it is negative."""
    if code < 0:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump of the shim would help nobody
        if -code not in (_signal.SIGKILL, _signal.SIGSTOP):
            _signal.signal(-code, _signal.SIG_DFL)
            _signal.pthread_sigmask(_signal.SIG_UNBLOCK, [-code])
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def main(server: str, arguments: list[str]) -> None:
    is_worker = bool(arguments) and os.path.basename(arguments[0]) == WORKER  # noqa: PTH119  # pathlib takes longer than all else here
    if not is_worker and arguments[:3] != EXPORT:
        os.execv(sys.executable, [sys.executable, *arguments])
    connection, pid = ask(
        server,
        arguments,
        descriptors=[(0, 0), (1, 1), (2, 2)],
        environment=dict(os.environ),
        folder=os.getcwd(),  # noqa: PTH109
        new_session=True,
    )
    for number in (_signal.SIGINT, _signal.SIGTERM):
        # It exists until our connection is closed, though it may have ended (server.py): this never meets another process.
        _signal.signal(number, lambda number, _: os.kill(pid, number))
    code = receive(connection)
    end_as(-_signal.SIGKILL if code is None else code)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

"""The entry point of the command `qwen35`.

`qwen35 run` handles signals (runtime/signals.py) before it imports slow modules. A run continues after the reader of
its stdout or stderr has ended. For example, Ctrl-C in `qwen35 run … | tee log` ends tee immediately, while the run
finishes its update, saves, and prints to the broken pipe.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from typing import IO, TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from qwen35_trainer.runtime.signals import Signals


_NO_READER = (errno.EPIPE, errno.EIO)
"""Values of errno when the reader of a pipe has ended, or when a terminal is closed."""


def main() -> None:
    """Run the command that `sys.argv` names."""
    if sys.argv[1:2] == ["run"]:
        _run()
    _commands()


def _run() -> NoReturn:
    # Signals stay blocked until `attended` can receive them. It unblocks them.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    from qwen35_trainer.runtime.signals import attended

    survive_readers()
    code = attended(_commands)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # during Python's shutdown a signal would have its default effect


def _commands(signals: Signals | None = None) -> None:
    from qwen35_trainer.commands import app

    app(obj=signals)


def survive_readers() -> None:
    """Replace stdout and stderr by streams that discard their text, without an error, once their reader has ended."""
    sys.stdout, sys.stderr = _surviving(sys.stdout), _surviving(sys.stderr)


class _File(io.FileIO):
    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _NO_READER:
                raise
            return memoryview(data).nbytes


def _surviving(stream: IO[str] | None) -> IO[str]:
    if stream is None:  # closed by the parent process
        return open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123  # pathlib takes long to import
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_File(stream.fileno(), "w", closefd=False)),
        stream.encoding,
        stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


if __name__ == "__main__":
    main()

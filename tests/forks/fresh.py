"""How a fork of the server becomes like a Python that has just been started.

as in a fresh process   environment, folder, open files, signals, time zone, `sys.path`, `sys.argv`, `sys.executable`, `__main__`,
                        random numbers of `random`, numpy and torch; at the end traceback, exit code, threads that are waited for,
                        handlers of atexit
as in the server        all that is decided while Python starts or a module is imported: the seed of `hash` (all forks of a session
                        order a set alike), `-X`, `-W` and PYTHON… variables other than PYTHONPATH; what the
                        server's PYTHONPATH had and the request's has not stays at the end of `sys.path`; the command line that other
                        processes see, until the fork writes a title of its own as Ray's workers do
in no process           the interpreter is not taken apart at the end: to free every object of every module would copy the memory
                        that the fork shares with the server, 0.35 core-seconds for each of them
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import importlib
import os
import runpy
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from tests.forks.shim import end_as

if TYPE_CHECKING:
    from tests.forks.server import Request

PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)


def become(request: Request, files: list[int], server: int) -> NoReturn:
    """Run what was requested, and end as Python ends after it."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != server:
        os.kill(os.getpid(), signal.SIGKILL)  # the server ended before we asked to end with it
    if request.new_session:
        os.setsid()
    _open_as(dict(zip(request.numbers, files, strict=True)))
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    time.tzset()
    tempfile.tempdir = None
    import numpy  # here: imported by this module it would start its threads before the server has set how many

    numpy.random.seed()  # its state comes from the import; `random` takes a new one at each fork
    importlib.invalidate_caches()
    signal.pthread_sigmask(signal.SIG_SETMASK, request.mask)
    try:
        _run(request.arguments)
    except SystemExit as end:
        code = _exit_code(end.code)
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        code = -signal.SIGINT
    except BaseException:  # noqa: BLE001
        sys.excepthook(*sys.exc_info())
        code = 1
    else:
        code = 0
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # nobody reads it any more
            stream.flush()
    end_as(code)


def open_files() -> set[int]:
    """Numbers of the open files of this process."""
    return {int(name) for name in os.listdir("/proc/self/fd") if _is_open(int(name))}  # noqa: PTH208


def _is_open(number: int) -> bool:
    """Not so the folder that has just been listed."""
    try:
        fcntl.fcntl(number, fcntl.F_GETFD)
    except OSError:
        return False
    return True


def _open_as(files: dict[int, int]) -> None:
    """Give each received file (value) its number (key). 0, 1 and 2 replace the server's, whose Python objects continue to use them."""
    highest = max(files)
    above = {number: fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, highest + 1) for number, file in files.items()}
    for file in files.values():
        os.close(file)
    for number, file in above.items():
        os.dup2(file, number)
        os.close(file)


def _run(arguments: list[str]) -> None:
    sys.orig_argv = [sys.executable, *arguments]
    if arguments[0] == "-m":
        _, module, *rest = arguments
        sys.argv = [module, *rest]  # runpy replaces the first by the file
        _set_path(os.getcwd())  # noqa: PTH109
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        script, *_ = sys.argv = list(arguments)
        _set_path(str(Path(script).resolve().parent))
        runpy.run_path(script, run_name="__main__")


def _exit_code(code: object) -> int:
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1


def _set_path(first: str) -> None:
    """Return Python's initial path: the program's folder, PYTHONPATH, then the folders of the installation."""
    entries = [str(Path(entry).absolute()) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = [first, *dict.fromkeys([*entries, *sys.path[1:]])]

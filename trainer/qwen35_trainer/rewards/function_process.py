"""The worker process of a reward function: it loads one function, then answers calls of that function.

    IsolatedFunction                    this process
    ────────────────                    ────────────
    loader, arguments, seconds ──────►  function = loader(*arguments)
                               ◄──────  {"asynchronous": …}, or the error, and the process ends
    arguments of a call        ──────►  function(*arguments)
                               ◄──────  {"score": …}, or the error

waits on             unblocked by                                      deadline
next call            the caller, or its death (the socket closes)      none: the process is idle then
a call of `def`      the function; the caller kills a late process     2 × timeout_seconds + 1: the kernel's timer
a call of `async`    the function, or its cancellation                 timeout_seconds

A plain function (`def`) runs one call at a time, on the main thread. If the caller hangs, the timer ends
this process. A coroutine function (`async def`) runs any number of calls at the same time. Replies are JSON, so that
the caller does not unpickle objects of user code.
"""

import asyncio
import contextlib
import importlib
import inspect
import io
import json
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Final

from qwen35_trainer.rewards.child_process import CallServer, packed, read_frame, signal_when_parent_ends
from qwen35_trainer.rewards.reward import RewardError, as_score

ENTRY: Final = f"{__name__}:serve"
MAX_TEXT_CHARACTERS: Final = 16_000

type Loader = Callable[..., Callable[..., Any]]
type Reply = Mapping[str, object]


def serve(descriptor: int) -> None:
    """Load the function, answer calls until the caller closes the socket, and exit the process.

    descriptor: this process's end of the socket.
    """
    os.set_inheritable(descriptor, False)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # what a killed call has printed is not lost
    signal_when_parent_ends(signal.SIGKILL)
    with contextlib.suppress(EOFError, OSError):
        _serve(socket.socket(fileno=descriptor))
    sys.stdout.flush()
    # Not `sys.exit`, because threads of the function would keep the process alive.
    os._exit(0)


def _serve(connection: socket.socket) -> None:
    stream = connection.makefile("rb")
    number, setup = read_frame(stream)
    loader, arguments, timeout_seconds = pickle.loads(setup)  # noqa: S301  # from our caller
    function, reply = _load(loader, arguments)
    connection.sendall(packed(number, _encoded(reply)))
    if function is None:
        return
    if is_asynchronous(function):
        asyncio.run(_serve_concurrently(function, timeout_seconds, connection))
        return
    process = os.getpid()
    while True:
        number, request = read_frame(stream)
        # The caller kills a late process. If the caller has ended, the kernel does, even if the function never releases
        # the interpreter's lock.
        signal.setitimer(signal.ITIMER_REAL, 2 * timeout_seconds + 1)
        reply = _attempt(function, request)
        _end_if_forked(process)
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.sendall(packed(number, _encoded(reply)))


async def _serve_concurrently(function: Callable[..., Any], timeout_seconds: float, connection: socket.socket) -> None:
    process = os.getpid()

    async def answer(request: bytes) -> bytes:
        reply = await _attempt_asynchronous(function, request, timeout_seconds)
        _end_if_forked(process)
        return _encoded(reply)

    connection.setblocking(False)
    _, server = await asyncio.get_running_loop().create_unix_connection(lambda: CallServer(answer), sock=connection)
    await server.ended
    os._exit(0)  # without waiting for calls under way, which nobody waits for


def _end_if_forked(process: int) -> None:
    """Exit if this process is a copy that the user's function has forked, because a copy must not answer calls.

    process: id of the process that loaded the function.
    """
    if os.getpid() != process:
        os._exit(0)


def _load(loader: str, arguments: tuple[object, ...]) -> tuple[Callable[..., Any] | None, Reply]:
    try:
        module, _, name = loader.partition(":")
        load: Loader = getattr(importlib.import_module(module), name)
        function = load(*arguments)
    except BaseException as error:  # noqa: BLE001  # user code is imported, and the reply contains whatever it raises
        return None, _failure(error)
    return function, {"asynchronous": is_asynchronous(function)}


def _attempt(function: Callable[..., object], request: bytes) -> Reply:
    try:
        return {"score": as_score(function(*pickle.loads(request)))}  # noqa: S301  # from our caller
    except BaseException as error:  # noqa: BLE001  # the reply contains whatever user code raises, SystemExit included
        return _failure(error)


async def _attempt_asynchronous(function: Callable[..., Any], request: bytes, timeout_seconds: float) -> Reply:
    try:
        async with asyncio.timeout(timeout_seconds) as deadline:
            return {"score": as_score(await function(*pickle.loads(request)))}  # noqa: S301  # from our caller
    except BaseException as error:  # noqa: BLE001  # the reply contains whatever user code raises, SystemExit included
        if isinstance(error, TimeoutError) and deadline.expired():
            return {"late": True}
        return _failure(error)


def _failure(error: BaseException) -> Reply:
    if isinstance(error, RewardError):
        return {
            "error": str(error)[:MAX_TEXT_CHARACTERS],
            "kind": error.kind,
            "details": error.details[:MAX_TEXT_CHARACTERS],
        }
    lines = "".join(traceback.format_exception_only(error)).strip()
    details = "".join(traceback.format_exception(error))
    kind = type(error).__name__
    return {
        "error": lines.removeprefix(f"{kind}: ")[:MAX_TEXT_CHARACTERS],
        "kind": kind,
        "details": details[-MAX_TEXT_CHARACTERS:],
    }


def _encoded(reply: Reply) -> bytes:
    return json.dumps(reply).encode()


def is_asynchronous(function: Callable[..., object]) -> bool:
    """Return whether a call of `function` returns a coroutine.

    This is the case for an `async def` function, and for an object whose `__call__` is an `async def` method.
    """
    call = getattr(function, "__call__", None)  # noqa: B004  # its type matters
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)

"""A function that runs in a process of its own, so that a call can be ended whatever it does.

    caller                      thread (one per function)               worker process
    ──────                      ─────────────────────────               ──────────────
    await call(arguments) ───►  start it if there is none  ── spawn ──► load the function
                                wait: LOAD_SECONDS         ◄── ready ── or the error
                                send the arguments         ── pickle ─► function(*arguments)
                                wait: timeout_seconds      ◄── JSON ─── the score, or the error
    float or RewardError  ◄───  late? kill the process group, reap it; the next call starts another

waits on             unblocked by                                   deadline
caller               the thread                                     those of the calls before it
load                 the worker, or its death (the socket closes)   LOAD_SECONDS
call                 the same                                       timeout_seconds
worker: next call    the caller, or its death (the socket closes)   none: it is idle then
worker: its call     the function, or the caller's death (Linux)    the kernel's timer, unless it is killed earlier

The worker is started as a command, not by `multiprocessing`, which would fork a process with threads (Ray), or import
the caller's main script, and torch with it, a second time. Replies are JSON, so that objects of user code are not unpickled
here.
"""

import asyncio
import atexit
import contextlib
import ctypes
import importlib
import inspect
import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection

from qwen35_trainer.rewards.reward import RewardError, RewardTimeoutError, as_score

logger = logging.getLogger(__name__)

LOAD_SECONDS = 120.0
_REAP_SECONDS = 10.0
_ENDED_BY_TIMER = "signal SIGALRM"
_SET_PARENT_DEATH_SIGNAL = 1  # of prctl(2)
MAX_REQUEST_BYTES = 64 * 2**20
MAX_REPLY_BYTES = 2**20
MAX_TEXT_CHARACTERS = 16_000

type Loader = Callable[..., Callable[..., object]]


class IsolatedFunction:
    """Loads a function in a worker process by `loader(*arguments)`, and calls the function there.

    loader: `module:function`, importable. Arguments of the loader and of calls are pickled, and should be plain data.
    One call runs at a time, and others wait in order. The time-out of a call starts when the call runs.
    """

    def __init__(self, loader: str, arguments: tuple[object, ...], timeout_seconds: float) -> None:
        self._setup = (loader, arguments, timeout_seconds)
        self._timeout = timeout_seconds
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"isolated {loader}")
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._lock = threading.Lock()
        self._closed = False
        self.asynchronous = False
        atexit.register(self.close)

    @property
    def process_id(self) -> int | None:
        """Process id of the worker, while there is one."""
        return self._process.pid if self._process else None

    def load(self) -> Future[None]:
        """Start the worker and load the function. The future raises RewardError when that fails.

        Afterwards `asynchronous` says whether the function is a coroutine function, which `call` cannot run.
        """
        return self._thread.submit(self._load)

    async def call(self, *arguments: object) -> float:
        """Call the function in the worker. Returns its score. Raises RewardTimeoutError after timeout_seconds, and
        RewardError for other failures.
        """
        try:
            pending = self._thread.submit(self._call, arguments)
        except RuntimeError as error:
            raise RewardError("the reward is closed", kind="Closed") from error
        return await asyncio.wrap_future(pending)

    def close(self) -> None:
        """End the worker. Running calls fail. May be called again."""
        with self._lock:
            self._closed = True
        self._end()
        self._thread.shutdown(wait=True)
        self._disconnect()
        atexit.unregister(self.close)

    # The methods below run only on the thread, except _end.

    def _load(self) -> None:
        self._connected()

    def _call(self, arguments: tuple[object, ...]) -> float:
        try:
            request = pickle.dumps(arguments)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise RewardError(
                f"the prompt's metadata cannot be sent to the worker: {error}", kind="Unsendable"
            ) from error
        if len(request) > MAX_REQUEST_BYTES:
            raise RewardError(f"arguments of {len(request)} bytes; at most {MAX_REQUEST_BYTES} are sent to a reward")
        connection = self._connected()
        late = f"no score within timeoutSeconds {self._timeout:g}; the call was ended"
        reply = self._exchange(connection, request, self._timeout, RewardTimeoutError(late))
        if "error" in reply:
            raise _received(reply)
        return as_score(reply["score"])

    def _connected(self) -> Connection:
        if self._process is not None and self._process.poll() is not None:
            self._disconnect()
        if self._connection is None:
            self._connection = self._start()
            late = RewardError(f"the function was not loaded within {LOAD_SECONDS:g} s", kind="LoadTimeout")
            reply = self._exchange(self._connection, pickle.dumps(self._setup), LOAD_SECONDS, late)
            if "error" in reply:
                self._disconnect()
                raise _received(reply)
            self.asynchronous = bool(reply["asynchronous"])
        return self._connection

    def _start(self) -> Connection:
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as unless_started:
            unless_started.callback(ours.close)
            command = f"from {__name__} import serve; serve({theirs.fileno()})"
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
            with self._lock:
                if self._closed:
                    raise RewardError("the reward is closed", kind="Closed")
                try:
                    self._process = subprocess.Popen(  # noqa: S603  # this interpreter and this module
                        # -P: without the current folder on sys.path.
                        [sys.executable, "-P", "-c", command],
                        stdin=subprocess.DEVNULL,
                        pass_fds=[theirs.fileno()],
                        env=environment,
                        start_new_session=True,
                    )
                except OSError as error:
                    raise RewardError(f"no worker process could be started: {error}", kind="NoWorker") from error
            unless_started.pop_all()
        return Connection(ours.detach())

    def _exchange(
        self, connection: Connection, request: bytes, seconds: float, late: RewardError
    ) -> Mapping[str, object]:
        try:
            connection.send_bytes(request)
            if not connection.poll(seconds):
                self._disconnect()
                raise late
            reply: Mapping[str, object] = json.loads(connection.recv_bytes(MAX_REPLY_BYTES))
        except (EOFError, OSError, json.JSONDecodeError) as error:
            # The socket closes just before the process ends. Its exit code is more informative than our signal.
            ended = self._disconnect(patience=1.0)
            if ended == _ENDED_BY_TIMER:
                raise late from error
            raise RewardError(f"the worker process died ({ended})", kind="WorkerDied") from error
        return reply

    def _disconnect(self, patience: float = 0.0) -> str:
        """End the worker, if there is one, and close the connection. Returns how the worker ended."""
        code = self._end(patience)
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None
        if code is None:
            return "not reaped"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def _end(self, patience: float = 0.0) -> int | None:
        """Kill the worker's process group after `patience` seconds, and reap the worker. Returns its exit code."""
        with self._lock:
            process = self._process
            if process is None:
                return None
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            try:
                return process.wait(_REAP_SECONDS)
            except subprocess.TimeoutExpired:
                # It hangs in the kernel, for example on a dead network file system, and cannot be killed.
                logger.exception("worker process %d has not ended %g s after SIGKILL", process.pid, _REAP_SECONDS)
                return None


def serve(descriptor: int) -> None:
    """Run the worker: load the function, then answer calls until the caller's end of the socket closes."""
    os.set_inheritable(descriptor, False)
    _end_with_caller()
    connection = Connection(descriptor)
    with contextlib.suppress(EOFError, OSError):
        loader, arguments, timeout_seconds = pickle.loads(connection.recv_bytes())  # noqa: S301  # from our caller
        function, reply = _load(loader, arguments)
        connection.send_bytes(json.dumps(reply).encode())
        while function is not None:
            call = connection.recv_bytes()
            # The caller kills a late worker. If the caller has ended, the kernel does, even if the function never releases
            # the interpreter's lock.
            signal.setitimer(signal.ITIMER_REAL, 2 * timeout_seconds + 1)
            reply = _attempt(function, call)
            signal.setitimer(signal.ITIMER_REAL, 0)
            connection.send_bytes(json.dumps(reply).encode())
    sys.stdout.flush()
    # Not `sys.exit`, because threads of the function would keep the process alive.
    os._exit(0)


def _end_with_caller() -> None:
    """Make Linux kill this process when the thread that started it ends.

    Linux does so even if SIGKILL ended the thread, and even during a call.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def _load(loader: str, arguments: tuple[object, ...]) -> tuple[Callable[..., object] | None, dict[str, object]]:
    try:
        module, _, name = loader.partition(":")
        load: Loader = getattr(importlib.import_module(module), name)
        function = load(*arguments)
    except BaseException as error:  # noqa: BLE001  # user code is imported, and the reply contains whatever it raises
        return None, _failure(error)
    return function, {"asynchronous": is_asynchronous(function)}


def _attempt(function: Callable[..., object], call: bytes) -> dict[str, object]:
    try:
        return {"score": as_score(function(*pickle.loads(call)))}  # noqa: S301  # from our caller
    except BaseException as error:  # noqa: BLE001  # the reply contains whatever user code raises, SystemExit included
        return _failure(error)


def _failure(error: BaseException) -> dict[str, object]:
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


def _received(reply: Mapping[str, object]) -> RewardError:
    return RewardError(str(reply["error"]), kind=str(reply["kind"]), details=str(reply["details"]))


def is_asynchronous(function: Callable[..., object]) -> bool:
    """Return whether calling the function returns a coroutine: `async def`, or an object with an `async def __call__`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004

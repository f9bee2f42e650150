"""The processes of a run: their environment variables, their start, and the memory that they use together.

    `qwen35 run` ─► set_environment, share_cores ─► Ray ─► Process: threads, log file, freed memory
         └─► MemoryWatch: the peak of all processes

Every process inherits the variables. They must be set before the process has threads that read them: glibc's setenv may
free the list of variables while getenv reads it in another thread, which crashes with a segmentation fault. The
tokenizers library calls getenv for each text.

Ray and torch would set further variables when threads exist: Ray in `ray.init`, while another thread reads the data,
and torch when a worker first imports torch's compiler. This module therefore sets these variables too.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import logging
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from qwen35_trainer.contract.shared_names import INLINE_ANSWERS
from qwen35_trainer.rollout.vllm_environment import VARIABLES

if TYPE_CHECKING:
    from qwen35_trainer.manifest import TrainingSpec

COLLECTED_OBJECTS = 10_000
"""Number of new objects after which garbage collection looks at them in a driver. Python's default is 700."""
LOG_BYTES = 64 * 2**20
"""Maximum size, in bytes, of an actor's log file. A run keeps two of them for each actor."""
MMAP_THRESHOLD_BYTES = 2**20
"""Minimum size, in bytes, of an allocation whose memory returns to the system as soon as it is freed."""
_M_MMAP_THRESHOLD = -3
"""Value of M_MMAP_THRESHOLD, a parameter of glibc's function mallopt, from malloc.h."""


def set_environment(*, in_cluster: bool) -> None:
    """Set the environment variables that do not depend on the manifest. Workers inherit these variables.

    in_cluster: whether the process uses the Ray of a cluster; if not, variables of a local Ray are set too. Must be
    called before Ray is imported, because the import reads RAY_AUTH_MODE. Ray could pass the variables in a runtime
    environment instead, but would then start a new process for each worker. In a cluster, the image of the workers sets
    the variables (images/), and the operator sets the variables of Ray.
    """
    # Ray would handle SIGTERM in C++, in addition to Python: it prints a trace, and SIGALRM aborts the process three seconds later.
    os.environ["RAY_DISABLE_FAILURE_SIGNAL_HANDLER"] = "1"
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
    defaults = VARIABLES | {
        "RAY_USAGE_STATS_ENABLED": "0",  # a training sends no usage statistics
        "RAY_CLIENT_MODE": "0",  # Ray sets it to this when it is imported, while another thread reads the data
        "PYTHONBREAKPOINT": "ray.util.rpdb._driver_set_trace",  # Ray sets it to this in any case
        # torch sets it to a folder of this kind in any case (torch/_inductor/runtime/cache_dir_utils.py)
        "TORCHINDUCTOR_CACHE_DIR": str(Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}"),
    }
    if not in_cluster:
        # With Ray's default of 15, workers would yield to every other process on a shared machine.
        os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # Ray spells it so
        # Under `uv run`, Ray would start each worker by `uv run` in a copy of the folder. Workers use this Python instead.
        os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
        defaults |= {"RAY_AUTH_MODE": "token"} | INLINE_ANSWERS  # the first is Ray's default for a local Ray
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def share_cores(spec: TrainingSpec) -> None:
    """Set environment variables that divide the cores of this machine among the workers of a run."""
    from qwen35_trainer.runtime.prepare import threads, workers_at_a_time

    os.environ["OMP_NUM_THREADS"] = str(threads(spec))
    if workers_at_a_time(spec) > 1:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # a thread that spins while it waits takes another's core


def return_freed_tensors() -> None:
    """Make the C library return the memory of a tensor to the system when the tensor is freed.

    By default, glibc returns only allocations above a threshold. When a larger allocation is freed, glibc raises the
    threshold to the size of that allocation, up to 32 MiB. The freed gradients of a layer then leave unused holes
    between optimizer states: 1.5 GB of 13 GB for a model of 0.8B parameters.
    """
    _glibc("mallopt", _M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)


def trim() -> None:
    """Return the memory of freed objects, which glibc still keeps, to the operating system.

    For example, reading a tokenizer of 248 thousand tokens takes 0.29 GB, of which only 0.1 GB is needed afterwards.
    """
    _glibc("malloc_trim", 0)


def _glibc(function: str, *arguments: int) -> None:
    """Call a function of glibc; do nothing with another C library."""
    if implementation := getattr(ctypes.CDLL(None), function, None):
        implementation(*arguments)


@contextmanager
def starting() -> Iterator[None]:
    """Context manager: run the body, which imports modules or builds a model, without garbage collection.

    Objects that are created in the body live as long as the process. Garbage collection would take a fifth of a
    worker's start. At the end the objects are frozen, so that later collections, which pause the process, skip them.
    Unused memory returns to the system.
    """
    outermost = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if outermost:
            gc.freeze()
            gc.enable()
            trim()


def collect_seldom() -> None:
    """Let garbage collection wait until there are COLLECTED_OBJECTS new objects.

    A driver has many objects for each sequence, and nearly all of them are freed without garbage collection when the
    sequence has trained. Seldom means that most of them are gone before a collection looks at them.
    """
    gc.set_threshold(COLLECTED_OBJECTS, *gc.get_threshold()[1:])


def own_address() -> str:
    """Return the address at which other processes of the run reach this process.

    In a pod, this is the pod's address, of IPv4 if the pod has both kinds, otherwise 127.0.0.1. Raises OSError if the
    pod's name has no address.
    """
    if "KUBERNETES_SERVICE_HOST" not in os.environ:
        return "127.0.0.1"
    entries = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    first = min(entries, key=lambda entry: entry[0] != socket.AF_INET)
    return str(first[4][0])


class Process:
    """Base class of the Ray actors: sets up the log file, torch's threads and the C library.

    name: the actor's name in logs, metrics and errors. logs: folder of the log files. threads: number of torch's
    threads; 0: torch is not imported. final: whether the name stays. An actor with a temporary name calls `rename`
    later; a log file with the temporary name exists only if the actor logs something before that call.
    """

    @starting()
    def __init__(self, name: str, logs: Path, threads: int = 0, *, final: bool = True) -> None:
        return_freed_tensors()
        logs.mkdir(parents=True, exist_ok=True)
        self._logs = logs
        self.rename(name, final=final)
        if threads:
            self.use_threads(threads)

    def use_threads(self, threads: int) -> None:
        """Set the number of torch's threads. This imports torch, which takes seconds."""
        import torch  # not in the driver

        torch.set_num_threads(threads)

    def rename(self, name: str, *, final: bool = True) -> None:
        """Set the actor's name, and write its log messages to the file `<name>.log` from now on.

        When the file has LOG_BYTES, it becomes `<name>.log.1`, in place of an earlier one, and a new file begins. final:
        whether the name stays. The log file of a temporary name is created with the first message.
        """
        self.name = name
        path = self._logs / f"{name}.log"
        handler = RotatingFileHandler(path, maxBytes=LOG_BYTES, backupCount=1, delay=not final)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


class MemoryWatch:
    """Measures the resident memory of this process and all its descendants every `every_seconds` seconds, until `stop`.

    Memory that several processes share counts once for each process. Descendants are listed only at every
    `search_every`-th sample, because listing them reads all of /proc, which slows a training on two cores.
    """

    def __init__(self, every_seconds: float = 2.0, search_every: int = 5) -> None:
        self._every = every_seconds
        self._search_every = search_every
        self._peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)
        self._thread.start()

    @property
    def peak(self) -> float:
        """The maximum resident memory so far, in MiB."""
        return self._peak / 2**20

    def stop(self) -> float:
        """Stop measuring, and return the maximum resident memory, in MiB."""
        self._stop.set()
        self._thread.join()
        return self.peak

    def _watch(self) -> None:
        me = psutil.Process()
        family: list[psutil.Process] = []
        for sample in itertools.count():
            if self._stop.wait(self._every):
                return
            if sample % self._search_every == 0:
                family = [me, *me.children(recursive=True)]
            total = 0
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    total += process.memory_info().rss
            self._peak = max(self._peak, total)

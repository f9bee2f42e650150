"""The start of every process of a training: imports, log file, threads, memory settings."""

from __future__ import annotations

import ctypes
import gc
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MMAP_THRESHOLD_BYTES = 2**20
"""Memory of at least this size returns to the system as soon as it is freed."""
_M_MMAP_THRESHOLD = -3
"""glibc's number of the setting, from malloc.h."""


def return_freed_tensors() -> None:
    """Make the C library return the memory of a tensor to the system when the tensor is freed.

    By default, glibc raises its threshold for that to 32 MiB when something of that size is freed. The gradients of a layer
    then leave holes between the optimizer states that nothing else fills: 1.5 GB of 13 GB for a model of 0.8B.
    """
    _glibc("mallopt", _M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)


def trim() -> None:
    """Return the free memory between small objects to the system.

    A tokenizer of 248 thousand tokens takes 0.29 GB while it is read, and 0.1 GB afterwards.
    """
    _glibc("malloc_trim", 0)


def _glibc(function: str, *arguments: int) -> None:
    """Call a function of glibc; do nothing with another C library."""
    if implementation := getattr(ctypes.CDLL(None), function, None):
        implementation(*arguments)


@contextmanager
def starting() -> Iterator[None]:
    """Context manager: import modules and build the model without garbage collection.

    What is imported and built here lives as long as the process, and repeated collections would take a fifth of a worker's
    start. At the end these objects are frozen, so that later collections, which pause the process, skip them; unused memory
    returns to the system.
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


class Process:
    """Base of the actors.

    name: the actor's name in logs, metrics and errors. threads: the number of torch's threads; 0 does not import torch.
    final: whether the name stays. An actor whose name does not stay has a log file only if it writes to it, and calls `rename`.
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
        """Set the number of torch's threads. It imports torch, which takes seconds."""
        import torch  # not in the driver

        torch.set_num_threads(threads)

    def rename(self, name: str, *, final: bool = True) -> None:
        """Set the actor's name, and write to the log file of that name from now on."""
        self.name = name
        handler = logging.FileHandler(self._logs / f"{name}.log", delay=not final)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)

    def ready(self) -> str:
        """Return the name of the host, or of the pod in a cluster. An answer means that the actor is constructed."""
        return socket.gethostname()

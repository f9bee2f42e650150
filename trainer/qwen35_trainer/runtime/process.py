"""What every process of a training does first: its imports, its log file, its threads."""

from __future__ import annotations

import ctypes
import gc
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

GIVEN_BACK_BYTES = 2**20
"""Memory of at least this size goes back to the system as soon as it is freed."""
_M_MMAP_THRESHOLD = -3
"""glibc's number of the setting, from malloc.h."""


def give_tensors_back() -> None:
    """Have the C library return the memory of a tensor to the system when the tensor is freed.

    By default, glibc raises its threshold for that to 32 MiB as soon as something of that size is freed. Gradients of a layer
    then leave holes between the optimizer's states that nothing else of that size fills: 1.5 GB of 13 for a model of 0.8B.
    """
    _glibc("mallopt", _M_MMAP_THRESHOLD, GIVEN_BACK_BYTES)


def trim() -> None:
    """Return the free memory between small objects to the system.

    A tokenizer of 248 thousand tokens takes 0.29 GB while it is read, and 0.1 GB afterwards.
    """
    _glibc("malloc_trim", 0)


def _glibc(function: str, *arguments: int) -> None:
    """Call a function that only this C library has."""
    if found := getattr(ctypes.CDLL(None), function, None):
        found(*arguments)


@contextmanager
def starting() -> Iterator[None]:
    """Around imports and the building of a model, without garbage collection.

    What they make lives as long as the process, and to look through it again and again takes a fifth of a worker's start. At
    the end it is set aside for good: later collections, which pause the process, look at what came after. Free memory is returned.
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
    """Base of the actors. `name` is the actor's in logs, metrics and errors; `threads` of 0 leaves torch alone."""

    @starting()
    def __init__(self, name: str, logs: Path, threads: int = 0) -> None:
        give_tensors_back()
        self.name = name
        logs.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(logs / f"{name}.log")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
        if threads:
            import torch  # the driver, which asks for none, never imports it

            torch.set_num_threads(threads)

    def ready(self) -> str:
        """The host that it runs on, in a cluster the pod's name. Answers once construction is over."""
        return socket.gethostname()

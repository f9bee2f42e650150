"""What every process of a training does first: its imports, its log file, its threads."""

from __future__ import annotations

import gc
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def starting() -> Iterator[None]:
    """Around imports and the building of a model, without garbage collection.

    What they make lives as long as the process, and to look through it again and again takes a fifth of a worker's start. At
    the end it is set aside for good: later collections, which pause the process, look at what came after.
    """
    outermost = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if outermost:
            gc.freeze()
            gc.enable()


class Process:
    """Base of the actors. `name` is the actor's in logs, metrics and errors; `threads` of 0 leaves torch alone."""

    @starting()
    def __init__(self, name: str, logs: Path, threads: int = 0) -> None:
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

"""What every process of a training does first: its log file, its threads."""

from __future__ import annotations

import logging
import socket
from pathlib import Path


class Process:
    """Base of the actors. `name` is the actor's in logs, metrics and errors; `threads` of 0 leaves torch alone."""

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

"""Where fake pods get their addresses from."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.testbed.processes import Processes

NAME = "addresses"


@dataclass(frozen=True)
class PodNetwork:
    """A network of this bed alone."""

    network: str
    unreachable: str | None
    """Why nothing on this machine can answer for a pod; None: who listens on 0.0.0.0 answers for all of them."""


def start(processes: Processes, folder: Path) -> PodNetwork:
    """Holds the network until the process ends, see addresses.py."""
    file = folder / "pods.json"
    command = [sys.executable, "-IS", str(Path(__file__).with_name("addresses.py")), str(file)]
    processes.start(NAME, command, grace=5)
    processes.wait(NAME, file.exists)
    return PodNetwork(**json.loads(file.read_text()))

"""A real Ray on this machine that stands in for the head pod of every RayCluster.

    KubeRay ─► API server ─► <pod address>:8265 ─► 0.0.0.0:8265, this Ray's dashboard
                             (local, addresses.py)

The Ray is its own: other ports, its own folder, no address file that `ray.init()` elsewhere would find.
"""

import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os import environ, pathsep
from pathlib import Path

from qwen35_trainer.runtime.site import MAX_RAY_STARTS, RAY_TIMEOUT_TEXT
from tests.patience import PATIENCE
from tests.testbed.processes import NotReady, Processes, answers, claim, free_ports

NAME = "ray"
# The operator's manifests name it, so it is the one port that cannot be chosen.
PORT = 8265


class PortTaken(Exception):
    """Somebody else listens on the dashboard's port."""


@dataclass(frozen=True)
class RayHead:
    url: str
    """The dashboard, with its jobs."""
    commands: Path
    """First in the PATH of every job."""

    def command(self, name: str, script: str) -> Path:
        """Puts an executable before all others of its name; `script` begins with `#!`."""
        file = self.commands / name
        aside = file.with_suffix(".writing")
        aside.write_text(script)
        aside.chmod(0o755)
        # A job may be reading the script of before.
        return aside.rename(file)


@contextmanager
def ray_head(folder: Path) -> Iterator[RayHead]:
    """Starts the Ray in an empty folder. Raises PortTaken and NotReady."""
    claimed = _wait_for_port()
    commands = folder / "commands"
    commands.mkdir()
    processes = Processes(folder)
    # Ray's sockets lie in its folder, and a socket's path has at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as own:
        try:
            for start in range(1, MAX_RAY_STARTS + 1):
                try:
                    _bring_up(processes, commands, own)
                    break
                except NotReady as problem:
                    if RAY_TIMEOUT_TEXT not in str(problem) or start == MAX_RAY_STARTS:
                        raise
                    processes.stop(NAME)
                    processes.log(NAME).unlink()  # what the next start says is judged alone
            claimed.close()
            yield RayHead(f"http://127.0.0.1:{PORT}", commands)
        finally:
            claimed.close()
            processes.stop_all()


def _wait_for_port() -> socket.socket:
    """Claim the port, which another lane may use for a while. Close the returned lock once Ray listens. Raises PortTaken."""
    until = time.monotonic() + PATIENCE
    while True:
        claimed = claim(PORT)
        problem = _taken() if claimed is not None else "another test run has claimed it"
        if claimed is not None:
            if not problem:
                return claimed
            claimed.close()
        if time.monotonic() > until:
            raise PortTaken(f"port {PORT} is taken ({problem}): end the Ray or the test bed that has it")
        time.sleep(0.5)


def _taken() -> OSError | None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", PORT))
        except OSError as problem:
            return problem
    return None


def _bring_up(processes: Processes, commands: Path, folder: str) -> None:
    """Raises NotReady: a busy machine may exceed Ray's own 30 seconds (qwen35_trainer.runtime.site)."""
    agent = _start(processes, commands, folder)
    processes.wait(NAME, answers(f"http://127.0.0.1:{PORT}/api/jobs/"))
    processes.wait(NAME, answers(f"http://127.0.0.1:{agent}/api/local_raylet_healthz"))


def _start(processes: Processes, commands: Path, folder: str) -> int:
    """Returns the port of the agent, which starts the jobs."""
    names = ("port", "node-manager-port", "object-manager-port", "ray-client-server-port", "metrics-export-port")
    agent_names = ("dashboard-agent-grpc-port", "runtime-env-agent-port", "dashboard-agent-listen-port")
    ports = dict(zip((*names, *agent_names), free_ports(len(names) + len(agent_names)), strict=True))
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
        "--dashboard-host=0.0.0.0",
        f"--dashboard-port={PORT}",
        *(f"--{name}={port}" for name, port in ports.items()),
        *("--min-worker-port=0", "--max-worker-port=0"),
        # As in a head pod: Ray starts a spare worker for each CPU.
        *("--num-cpus=0", "--num-gpus=0", "--object-store-memory=100000000"),
        f"--temp-dir={folder}",
        "--disable-usage-stats",
        # Tests do not use nodes or logs of drivers, and the processes that serve them poll.
        *("--no-monitor", "--include-log-monitor=false"),
    ]
    path = pathsep.join([str(commands), str(Path(sys.executable).parent), environ["PATH"]])
    # A token in the home folder would switch authentication on, and KubeRay has that token not.
    processes.start(NAME, command, environment={"PATH": path, "RAY_AUTH_MODE": "disabled"})
    return ports["dashboard-agent-listen-port"]

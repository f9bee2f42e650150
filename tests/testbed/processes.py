"""The bed's processes: each under its own supervisor, with its own log."""

import random
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from os import environ, getpid
from pathlib import Path

from tests.patience import PATIENCE

SUPERVISOR = Path(__file__).with_name("supervisor.py")
# What this machine's proxies and clusters are is none of the bed's business.
ENVIRONMENT = {name: environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in environ}


class NotReady(Exception):
    """A process ended, or did not come up in time; the message ends with its log."""


@dataclass
class Processes:
    """Named processes, ended in reverse order of their start."""

    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of every process, besides its own."""
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        grace: float = 0,
    ) -> None:
        """Starts a command; `grace` seconds lie between SIGTERM and SIGKILL at its end, 0 for SIGKILL immediately."""
        if name in self.running:
            raise ValueError(f"{name} is running already: stop it first")
        with self.log(name).open("ab") as log:
            self.running[name] = subprocess.Popen(
                [sys.executable, "-IS", SUPERVISOR, str(getpid()), str(grace), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**ENVIRONMENT, **self.environment, **(environment or {})},
                # Ctrl-C in a terminal goes to the whole foreground group; the bed ends in its own order.
                start_new_session=True,
            )

    def stop(self, name: str) -> None:
        """Ends a process and everything it started; nothing happens when it does not run."""
        if process := self.running.pop(name, None):
            process.send_signal(signal.SIGTERM)
            process.wait()

    def stop_all(self) -> None:
        for name in reversed(list(self.running)):
            self.stop(name)

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def wait(self, name: str, ready: Callable[[], bool]) -> None:
        """Until the process is ready. Raises NotReady when it ends before, or when PATIENCE is over."""
        until = time.monotonic() + PATIENCE
        while not ready():
            ended = self.running[name].poll() is not None
            if ended or time.monotonic() > until:
                tail = self.log(name).read_text(errors="replace")[-3000:]
                raise NotReady(f"{name} {'ended' if ended else f'is not ready after {PATIENCE:.0f} s'}:\n{tail}")
            time.sleep(0.05)


_reserved: dict[int, socket.socket] = {}
"""Ports of this process, by the locks that keep other processes from choosing them."""


def free_ports(count: int) -> list[int]:
    """Ports that are this process's until it ends, whether or not somebody listens: no other one is given them here.

    They lie below those that outgoing connections take, so that a server finds its port free again when restarted. The lock
    is an abstract socket: it belongs to the network namespace, as ports do, and ends with its process.
    """
    ports: list[int] = []
    while len(ports) < count:
        port = random.randrange(20_000, 32_000)
        if port not in _reserved and _reserve(port):
            ports.append(port)
    return ports


def _reserve(port: int) -> bool:
    lock = claim(port)
    if lock is None:
        return False
    try:
        with socket.socket() as probe:
            # On all addresses: some servers listen there.
            probe.bind(("0.0.0.0", port))
    except OSError:
        lock.close()
        return False
    _reserved[port] = lock
    return True


def claim(port: int) -> socket.socket | None:
    """Lock a port against other callers of `claim` and `free_ports` until the returned socket is closed. None if it is locked."""
    lock = socket.socket(socket.AF_UNIX)
    try:
        lock.bind(f"\0qwen35-port-{port}")
    except OSError:
        lock.close()
        return None
    return lock


def answers(url: str) -> Callable[[], bool]:
    """Whether a GET of the URL answers 200 by now; whose certificate it shows does not matter."""
    trusting = ssl.create_default_context()
    trusting.check_hostname = False
    trusting.verify_mode = ssl.CERT_NONE
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=trusting))

    def ask() -> bool:
        try:
            with opener.open(url, timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    return ask

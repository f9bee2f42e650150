"""Defines a link to an operator, opens the link that `--link` names, and implements the link through a folder.

    --link cluster   ConfigMaps of the cluster (config_maps.py), with the pod's service account
    --link FOLDER    progress.json and history.json.gz, which the trainer writes, and control.json, which it polls

The files of a folder contain the same text as the keys of the ConfigMaps. A folder replaces the ConfigMaps where there
is no cluster.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from qwen35_trainer.atomic_files import write_atomically
from qwen35_trainer.contract import ContractError, Control, ProgressReport, parse_control
from qwen35_trainer.contract.shared_names import (
    ATTEMPT_VARIABLE,
    CONTROL_KEY,
    HISTORY_KEY,
    NAMESPACE_VARIABLE,
    PROGRESS_KEY,
    TRAINING_VARIABLE,
)

logger = logging.getLogger(__name__)

CLUSTER = "cluster"
"""The value of --link for the ConfigMaps of a cluster; any other value is a folder."""
FIRST_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 15.0
"""Maximum pause, in seconds, between two tries to reach the operator. After an outage, a report is delayed by at
most this time."""
POLL_SECONDS = 0.5
"""Time between two reads of control.json, in seconds."""

MOUNT_PATH = Path("/var/run/secrets/kubernetes.io/serviceaccount")
HOST_VARIABLE, PORT_VARIABLE = "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"
_POD_VARIABLES = (TRAINING_VARIABLE, NAMESPACE_VARIABLE, ATTEMPT_VARIABLE, HOST_VARIABLE, PORT_VARIABLE)


class LinkDown(Exception):
    """A report or a history was not delivered. A later delivery may succeed.

    The message contains the name of the ConfigMap or the file, and the reason.
    """


class LinkRefused(ValueError):
    """The value of --link cannot be used. The message lists everything that is missing."""

    failure = None  # without a link there is no operator to report to


class Link(Protocol):
    """A connection to the operator. All methods are called on one event loop."""

    async def report(self, progress: ProgressReport) -> None:
        """Replace the previous report by `progress`. Raises LinkDown if that fails or takes too long."""

    async def history(self, packed: bytes) -> None:
        """Replace the stored history by `packed`, made by `progress.packed_history`.

        Raises LinkDown if that fails or takes too long.
        """

    def orders(self) -> AsyncIterator[Control]:
        """Yield the operator's current orders, then the new orders after each change.

        The iterator never ends. It waits while the operator is unreachable, and skips orders that cannot be read.
        """

    async def close(self) -> None:
        """Close all connections."""


@dataclass(frozen=True)
class ServiceAccount:
    """The credentials of a pod for the API server: address, namespace, token and certificate authority."""

    server: str
    """Address of the API server, in the form https://host:port."""
    folder: Path
    """The folder that contains the files `token` and `ca.crt`."""

    @classmethod
    def of_pod(cls, environment: Mapping[str, str] = os.environ, folder: Path = MOUNT_PATH) -> ServiceAccount:
        """Return the service account of this pod.

        Raises KeyError if the variables that Kubernetes sets in pods are missing.
        """
        host, port = environment[HOST_VARIABLE], environment[PORT_VARIABLE]
        return cls(f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}", folder)

    @property
    def token(self) -> str:
        """The bearer token, read from its file at each use, because the kubelet replaces the file.

        Raises OSError if the file cannot be read.
        """
        return (self.folder / "token").read_text().strip()

    def context(self) -> ssl.SSLContext:
        """Return a TLS context that trusts only the cluster's certificate authority.

        Raises OSError if the certificate of the authority cannot be read.
        """
        return ssl.create_default_context(cafile=self.folder / "ca.crt")


class FolderLink:
    """A link to the operator through files in a folder, for use without a cluster.

    The folder is created if it does not exist. Raises LinkRefused if that fails.
    """

    def __init__(self, folder: Path) -> None:
        self._progress, self._control = folder / PROGRESS_KEY, folder / CONTROL_KEY
        self._history = folder / HISTORY_KEY
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LinkRefused(f"--link {folder}: {error.strerror}; name a folder, or cluster") from error

    async def report(self, progress: ProgressReport) -> None:
        try:
            await asyncio.to_thread(write_atomically, self._progress, progress.text())
        except OSError as error:
            raise LinkDown(f"{self._progress} was not written: {error.strerror}") from error

    async def history(self, packed: bytes) -> None:
        try:
            await asyncio.to_thread(write_atomically, self._history, packed)
        except OSError as error:
            raise LinkDown(f"{self._history} was not written: {error.strerror}") from error

    async def orders(self) -> AsyncIterator[Control]:
        latest_stamp: tuple[int, ...] | None = None
        while True:
            stamp, text = await asyncio.to_thread(self._read_changed, latest_stamp)
            if stamp != latest_stamp and text is not None:
                try:
                    yield parse_control(text)
                except ContractError as error:
                    logger.warning("%s: %s; the previous orders stay in force", self._control, error)
            latest_stamp = stamp
            await asyncio.sleep(POLL_SECONDS)

    async def close(self) -> None:
        """Do nothing, because no file stays open."""

    def _read_changed(self, latest_stamp: tuple[int, ...] | None) -> tuple[tuple[int, ...] | None, str | None]:
        """Return (stamp, text) of control.json.

        stamp: identifies a version of the file; None if the file does not exist. text: None if the file does not exist,
        if it still has the stamp `latest_stamp`, or if it cannot be read, which is logged.
        """
        try:
            stat = self._control.stat()
            stamp = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            return stamp, None if stamp == latest_stamp else self._control.read_text()
        except FileNotFoundError:
            return None, None
        except (OSError, UnicodeDecodeError) as error:
            logger.warning("%s cannot be read: %s; the previous orders stay in force", self._control, error)
            return latest_stamp, None


def open_link(option: str, environment: Mapping[str, str] = os.environ, account: Path = MOUNT_PATH) -> tuple[Link, int]:
    """Return (link, number of this attempt). option: the value of --link, which is `cluster` or a folder.

    Raises LinkRefused if `option` is `cluster` outside of a pod that the operator has created, if the folder cannot be
    created, or if the environment variable with the attempt's number does not contain a number.
    """
    problems = [] if option != CLUSTER else _missing(environment, account)
    number = environment.get(ATTEMPT_VARIABLE, "1")
    if not (number.isascii() and number.isdecimal() and int(number) >= 1):
        problems.append(f"{ATTEMPT_VARIABLE} is {number!r}; it is a number from 1")
    if problems:
        raise LinkRefused(f"--link {option}: {'; '.join(problems)}")
    if option != CLUSTER:
        return FolderLink(Path(option).resolve()), int(number)
    from qwen35_trainer.runtime.link.config_maps import ConfigMapLink  # imports aiohttp, which a folder does not need

    link = ConfigMapLink(
        ServiceAccount.of_pod(environment, account),
        namespace=environment[NAMESPACE_VARIABLE],
        training=environment[TRAINING_VARIABLE],
    )
    return link, int(number)


def _missing(environment: Mapping[str, str], account: Path) -> list[str]:
    """Check that this process has the environment variables and files of a pod that the operator has created.

    Returns a list with one text that names everything that is missing; empty if nothing is missing.
    """
    unset = [name for name in _POD_VARIABLES if not environment.get(name)]
    absent = [str(account / name) for name in ("token", "ca.crt") if not (account / name).is_file()]
    problems = []
    if unset:
        problems.append(f"{', '.join(unset)} not set")
    if absent:
        problems.append(f"{', '.join(absent)} not there")
    return problems and ["; ".join(problems) + ". Outside the operator's pods, name a folder instead"]

"""The interface of a link to an operator, and the choice of one by `--link`."""

import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Protocol

from qwen35_trainer.contract import Control, ProgressReport
from qwen35_trainer.contract.shared_names import ATTEMPT_VARIABLE, NAMESPACE_VARIABLE, TRAINING_VARIABLE
from qwen35_trainer.runtime.link.service_account import HOST_VARIABLE, MOUNT_PATH, PORT_VARIABLE, ServiceAccount

CLUSTER = "cluster"
"""The value of --link for the ConfigMaps of a cluster; any other value is a folder."""
FIRST_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 15.0
"""Maximum pause between two tries to reach the operator. After an outage, a report is delayed by at most this time."""

_POD_VARIABLES = (TRAINING_VARIABLE, NAMESPACE_VARIABLE, ATTEMPT_VARIABLE, HOST_VARIABLE, PORT_VARIABLE)


class LinkDown(Exception):
    """A report or a history was not delivered.

    A later delivery may succeed. The message has the target and the reason.
    """


class LinkRefused(ValueError):
    """The value of --link cannot be used. The message lists everything that is missing."""

    failure = None  # without a link there is no operator to report to


class Link(Protocol):
    """A connection to one operator. All methods are used from one event loop."""

    async def report(self, progress: ProgressReport) -> None:
        """Replace the previous report by `progress`. Raises LinkDown if that fails or takes too long."""

    async def history(self, packed: bytes) -> None:
        """Replace the stored history by `packed`, made by `progress.packed_history`.

        Raises LinkDown if that fails or takes too long.
        """

    def orders(self) -> AsyncIterator[Control]:
        """Yield the operator's current orders, then the new orders after each change.

        The iteration never ends. It waits while the operator is unreachable, and skips orders that cannot be read.
        """

    async def close(self) -> None:
        """Close all connections."""


def open_link(option: str, environment: Mapping[str, str] = os.environ, account: Path = MOUNT_PATH) -> tuple[Link, int]:
    """Return the link for `option`, which is `cluster` or a folder, and the number of this attempt.

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
        from qwen35_trainer.runtime.link.folder_link import FolderLink

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

    Returns a list with one text that names everything that is missing, or an empty list if nothing is missing.
    """
    unset = [name for name in _POD_VARIABLES if not environment.get(name)]
    absent = [str(account / name) for name in ("token", "ca.crt") if not (account / name).is_file()]
    problems = []
    if unset:
        problems.append(f"{', '.join(unset)} not set")
    if absent:
        problems.append(f"{', '.join(absent)} not there")
    return problems and ["; ".join(problems) + ". Outside the operator's pods, name a folder instead"]

"""--link: which operator is meant, and which attempt this is."""

import os
from collections.abc import Mapping
from pathlib import Path

from qwen35_trainer.contract.names import ATTEMPT_VARIABLE, NAMESPACE_VARIABLE, TRAINING_VARIABLE
from qwen35_trainer.runtime.link.account import HOST_VARIABLE, MOUNT, PORT_VARIABLE, Account
from qwen35_trainer.runtime.link.base import Link, LinkRefused
from qwen35_trainer.runtime.link.files import FileLink

CLUSTER = "cluster"

_OF_POD = (TRAINING_VARIABLE, NAMESPACE_VARIABLE, ATTEMPT_VARIABLE, HOST_VARIABLE, PORT_VARIABLE)


def open_link(option: str, environment: Mapping[str, str] = os.environ, account: Path = MOUNT) -> tuple[Link, int]:
    """The link that the option names, `cluster` or a folder, and the attempt's number. Raises LinkRefused."""
    problems = [] if option != CLUSTER else _missing(environment, account)
    number = environment.get(ATTEMPT_VARIABLE, "1")
    if not (number.isascii() and number.isdecimal() and int(number) >= 1):
        problems.append(f"{ATTEMPT_VARIABLE} is {number!r}; it is a number from 1")
    if problems:
        raise LinkRefused(f"--link {option}: {'; '.join(problems)}")
    if option != CLUSTER:
        return FileLink(Path(option).resolve()), int(number)
    from qwen35_trainer.runtime.link.config_maps import ConfigMapLink  # aiohttp, which files do without

    link = ConfigMapLink(
        Account.of_pod(environment, account),
        namespace=environment[NAMESPACE_VARIABLE],
        training=environment[TRAINING_VARIABLE],
    )
    return link, int(number)


def _missing(environment: Mapping[str, str], account: Path) -> list[str]:
    """What a pod of the operator has, and this process lacks."""
    unset = [name for name in _OF_POD if not environment.get(name)]
    absent = [str(account / name) for name in ("token", "ca.crt") if not (account / name).is_file()]
    problems = []
    if unset:
        problems.append(f"{', '.join(unset)} not set")
    if absent:
        problems.append(f"{', '.join(absent)} not there")
    return problems and ["; ".join(problems) + ". Outside the operator's pods, name a folder instead"]

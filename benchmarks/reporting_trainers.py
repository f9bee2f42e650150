"""Plays the drivers of many trainings: each reports its numbers again and again, and sometimes a new checkpoint.

A process of its own, so that the one that measures does not wait for it. A driver waits for the answer to a report before it
sends the next one, as the real one does, and does not catch up: if the API server is slow, there are fewer reports. A line is
written for each answered report: name, number of the update, 1 if its checkpoint is new, and the monotonic time of the answer.

    python -m benchmarks.reporting_trainers ORDER.json REPORTS.txt
"""

from __future__ import annotations

import asyncio
import json
import math
import ssl
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import aiohttp

from benchmarks.observer import MERGE_PATCH
from qwen35_operator.kube.kinds import CONFIG_MAP
from qwen35_trainer.contract import ProgressReport
from qwen35_trainer.contract.progress_report import CheckpointReport, ReplicaReport
from qwen35_trainer.contract.shared_names import PROGRESS_KEY, progress_name

CHECKPOINT_EVERY = 12
"""Reports of a training between two of its checkpoints."""
CONNECTIONS = 64
START_SECONDS = 120.0
"""Time over which the drivers begin, one after the other, as their clusters become ready one after the other. If all began at the
same time, every training would become Running and all copies of numbers would be due at the same moments."""


@dataclass(frozen=True)
class Driver:
    """The driver of the first attempt of a training. cluster, head, replica: names of its RayCluster, its head pod and its rollout pod."""

    training: str
    cluster: str
    head: str
    replica: str


@dataclass(frozen=True)
class Order:
    """The drivers, the namespace and API server that they report to, and the time between and of their reports."""

    server: str
    ca: str
    token: str
    namespace: str
    drivers: tuple[Driver, ...]
    seconds: float
    report_seconds: float

    def first(self, number: int) -> float:
        """Return the seconds after which a driver sends its first report."""
        return min(START_SECONDS, self.seconds / 2) * number / len(self.drivers)

    @property
    def expected(self) -> int:
        """The number of reports that the drivers send if the API server answers each before the next is due."""
        return sum(
            math.ceil((self.seconds - self.first(number)) / self.report_seconds) for number in range(len(self.drivers))
        )

    def save(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, file: Path) -> Order:
        fields = json.loads(file.read_text())
        return cls(**fields | {"drivers": tuple(Driver(**driver) for driver in fields["drivers"])})


@dataclass(frozen=True)
class Answered:
    """A report that the API server has answered. at: monotonic time of the answer."""

    training: str
    update: int
    checkpoint: bool
    at: float


def read(file: Path) -> Iterator[Answered]:
    """Yield the reports that were noted in a file."""
    for line in file.read_text().splitlines():
        training, update, checkpoint, at = line.split()
        yield Answered(training, int(update), checkpoint == "1", float(at))


def main() -> None:
    order, file = Order.load(Path(sys.argv[1])), Path(sys.argv[2])
    with file.open("w", buffering=1) as reports:
        asyncio.run(_report_all(order, reports))


async def _report_all(order: Order, reports: TextIO) -> None:
    headers = {"Authorization": f"Bearer {order.token}", "Content-Type": MERGE_PATCH}
    connector = aiohttp.TCPConnector(limit=CONNECTIONS, ssl=ssl.create_default_context(cafile=order.ca))
    limit = aiohttp.ClientTimeout(total=60)
    began = time.monotonic()
    async with (
        aiohttp.ClientSession(order.server, connector=connector, headers=headers, timeout=limit) as session,
        asyncio.TaskGroup() as drivers,
    ):
        for number, driver in enumerate(order.drivers):
            first = began + order.first(number)
            drivers.create_task(_report(session, order, driver, number, first, began + order.seconds, reports))


async def _report(
    session: aiohttp.ClientSession, order: Order, driver: Driver, number: int, due: float, end: float, reports: TextIO
) -> None:
    """Report until the end. The checkpoints of different drivers are at different times, by the driver's number."""
    path = CONFIG_MAP.path(order.namespace, progress_name(driver.training))
    update, checkpoint = 0, None
    while due < end:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        update += 1
        is_new = (update + number) % CHECKPOINT_EVERY == 0
        if is_new:
            checkpoint = CheckpointReport(uri=f"/run/checkpoints/{update}", update=update, time=time.time())
        text = report(driver, update, checkpoint, order.report_seconds).model_dump_json(exclude_none=True)
        try:
            async with session.patch(path, data=json.dumps({"data": {PROGRESS_KEY: text}})) as answer:
                answer.raise_for_status()
                await answer.read()
        except (aiohttp.ClientError, TimeoutError) as problem:
            print(f"{driver.training}, update {update}: {problem!r}", flush=True)
        else:
            reports.write(f"{driver.training} {update} {is_new:d} {time.monotonic():.4f}\n")
        due = max(due + order.report_seconds, time.monotonic())


def report(driver: Driver, update: int, checkpoint: CheckpointReport | None, seconds: float) -> ProgressReport:
    """Return a report with all numbers that a driver has after this update. seconds: for an update."""
    now = time.time()
    return ProgressReport(
        attempt=1,
        state="Running",
        time=now,
        head=driver.head,
        cluster=driver.cluster,
        phase="training",
        update=update,
        updates=10_000,
        version=update,
        versionTime=now,
        versionSeconds=seconds,
        prompts=16 * update,
        samples=256 * update,
        tokens=100_000 * update,
        secondsPerUpdate=seconds,
        reward=update % 97 / 97,
        accuracy=update % 89 / 89,
        lagMean=1.0 + update % 7 / 7,
        lagMax=3,
        rolloutIdle=update % 13 / 130,
        trainIdle=update % 11 / 110,
        tokensPerSecond=20_000.0 + update % 1000,
        checkpoint=checkpoint,
        replicas=(ReplicaReport(pods=(driver.replica,), idle=update % 13 / 130),),
    )


if __name__ == "__main__":
    main()

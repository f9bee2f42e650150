"""Trainings and RayJobs as somebody else than the operator sees them: own connections, own watches, own clock."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from http import HTTPStatus
from typing import Any, NamedTuple

import aiohttp

from tests.testbed.api import Api

MERGE_PATCH = "application/merge-patch+json"
MARK = "qwen35.example/mark"
"""Annotation by which a write of a training is recognised in the watch."""
MAX_EVENT_BYTES = 2**24
"""Maximum size of one line of a watch."""
PATIENCE_SECONDS = 1800.0

type Json = dict[str, Any]


class Copy(NamedTuple):
    """A trainer's numbers as a status shows them. Monotonic times.

    at: when the watch brought them first. update: the number of the update. written: when the shown report had been written,
    in whole seconds, as `status.progress.time` says.
    """

    at: float
    update: int
    written: float


@dataclass
class Observer:
    """Sends requests, and notes when its watches bring what."""

    session: aiohttp.ClientSession
    server: str
    api: Api
    trainings: str
    """Path of the trainings' collection; so is `jobs` of the RayJobs'."""
    jobs: str
    states: dict[str, str] = field(default_factory=dict)
    """status.state of each training that has one."""
    saved: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    """Per training: when status.lastCheckpoint.update was first seen at which value."""
    copies: dict[str, list[Copy]] = field(default_factory=dict)
    """Per training: all numbers that its status has shown, oldest first."""
    ready_pods: dict[str, int] = field(default_factory=dict)
    """Number of ready pods of each training, by its status."""
    added: dict[str, float] = field(default_factory=dict)
    """When each RayJob was first seen."""
    marked: dict[str, float] = field(default_factory=dict)
    """When each value of the annotation MARK was first seen."""

    async def request(self, method: str, path: str, body: object = None, content: str = "application/json") -> Json:
        """Return the answer. Raises aiohttp.ClientResponseError for a refusal, with the API server's words."""
        sent = None if body is None else json.dumps(body)
        headers = {"Content-Type": content, "Accept": "application/json"}
        url = self.server + path
        async with self.session.request(method, url, data=sent, headers=headers, ssl=self.api.context) as answer:
            text = await answer.text()
            if answer.status >= 300:
                raise aiohttp.ClientResponseError(
                    answer.request_info, answer.history, status=answer.status, message=text
                )
            made: Json = json.loads(text)
            return made

    async def watch(self, path: str, take: Callable[[Json], None]) -> None:
        """Pass every existing object and every change to `take`, until cancelled.

        The API server ends a watch when its definition changes or its client is slow, and requests a pause while it opens the
        storage of a new definition. The watch then continues at its last version.
        """
        version = ""
        limit = aiohttp.ClientTimeout(total=None)
        while True:
            url = f"{self.server}{path}?watch=true&resourceVersion={version}"
            async with self.session.get(
                url, ssl=self.api.context, timeout=limit, read_bufsize=MAX_EVENT_BYTES
            ) as answer:
                if answer.status == HTTPStatus.TOO_MANY_REQUESTS:
                    await asyncio.sleep(0.1)
                    continue
                answer.raise_for_status()
                async for line in answer.content:
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        version = ""
                        break
                    version = event["object"]["metadata"]["resourceVersion"]
                    if event["type"] != "DELETED":
                        take(event["object"])

    async def write_latency(self, training: str, mark: str) -> float:
        """Write an annotation of a training. Returns the seconds until the watch shows it, in which no operator takes part."""
        sent = time.monotonic()
        change = {"metadata": {"annotations": {MARK: mark}}}
        await self.request("PATCH", f"{self.trainings}/{training}", change, MERGE_PATCH)
        await until(lambda: mark in self.marked, f"mark {mark}", every=0.005)
        return self.marked[mark] - sent

    def take_training(self, raw: Json) -> None:
        name, status = raw["metadata"]["name"], raw.get("status") or {}
        if (mark := raw["metadata"].get("annotations", {}).get(MARK)) is not None:
            self.marked.setdefault(mark, time.monotonic())
        if "state" in status:
            self.states[name] = status["state"]
        update = (status.get("lastCheckpoint") or {}).get("update")
        saved = self.saved.setdefault(name, [])
        if update is not None and (not saved or saved[-1][1] != update):
            saved.append((time.monotonic(), update))
        self.ready_pods[name] = sum(pool.get("ready", 0) for pool in status.get("pools", []))
        self._take_numbers(name, status.get("progress") or {})

    def _take_numbers(self, name: str, progress: Json) -> None:
        copies, update = self.copies.setdefault(name, []), progress.get("update")
        if update is None or "time" not in progress or (copies and copies[-1].update == update):
            return
        now = time.monotonic()
        age = time.time() - datetime.fromisoformat(progress["time"]).timestamp()
        copies.append(Copy(now, update, now - age))

    def take_job(self, raw: Json) -> None:
        self.added.setdefault(raw["metadata"]["name"], time.monotonic())


@asynccontextmanager
async def observing(api: Api, trainings: str, jobs: str) -> AsyncIterator[Observer]:
    """An observer whose watches run."""
    connector = aiohttp.TCPConnector(limit=64)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=60)) as session:
        seen = Observer(session, api.server, api, trainings, jobs)
        # A watch that ends cancels the body: what is waited for would never come.
        async with asyncio.TaskGroup() as tasks:
            watches = [
                tasks.create_task(seen.watch(trainings, seen.take_training)),
                tasks.create_task(seen.watch(jobs, seen.take_job)),
            ]
            yield seen
            for watch in watches:
                watch.cancel()


async def each(count: int, work: Callable[[int], Awaitable[object]], at_once: int = 16) -> None:
    """Do the work for 0 … count - 1, `at_once` of them at a time."""
    hands = asyncio.Semaphore(at_once)

    async def one(number: int) -> None:
        async with hands:
            await work(number)

    async with asyncio.TaskGroup() as tasks:
        for number in range(count):
            tasks.create_task(one(number))


async def paced(count: int, per_second: float, work: Callable[[int], Coroutine[Any, Any, None]]) -> None:
    """The same, each begun at its time, whether the earlier ones have ended or not."""
    began = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        for number in range(count):
            await asyncio.sleep(max(0.0, began + number / per_second - time.monotonic()))
            tasks.create_task(work(number))


async def until(
    holds: Callable[[], bool], what: str, *, every: float = 0.02, seconds: float = PATIENCE_SECONDS
) -> None:
    """Raises TimeoutError, saying what was waited for."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:.0f} s: {what}")
        await asyncio.sleep(every)


def spread(seconds: Sequence[float]) -> Json:
    """Return percentiles by nearest rank."""
    ordered = sorted(seconds)
    ranks = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    percentiles = {name: round(ordered[math.ceil(rank * len(ordered)) - 1], 4) for name, rank in ranks.items()}
    return {"count": len(ordered), **percentiles}

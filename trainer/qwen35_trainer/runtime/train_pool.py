"""The train pool as the loop sees it: M ranks that act as one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from qwen35_trainer.engines.base import UpdateMetrics
from qwen35_trainer.engines.batch import TrainBatch
from qwen35_trainer.runtime.calls import Stalled, answer, answers
from qwen35_trainer.weights.publication import Publication

SAVED_EVERY_SECONDS = 0.02
"""How often a pool that writes a checkpoint is asked whether it has."""


class TrainPool:
    """Ranks are called alike and in one order."""

    def __init__(self, workers: Sequence[Any], deadline: float) -> None:
        self._workers, self._deadline = workers, deadline
        self._names = [f"train-{rank}" for rank in range(len(workers))]

    async def start(self, seconds: float) -> tuple[float, float]:
        """Form the process group and build the engines. Returns the wall-clock seconds at which rank 0 was up and
        all were told to join, and at which the last engine was built. Raises Stalled and WorkerLost.
        """
        ranks = len(self._workers)
        host, port = await answer(
            self._workers[0].listen.remote(ranks), of=self._names[0], act="opening the rendezvous", seconds=seconds
        )
        began = time.time()
        joined = [worker.join.remote(host, port, ranks) for worker in self._workers]
        await answers(joined, of="the train pool", act="loading the model", seconds=seconds, names=self._names)
        return began, time.time()

    async def train(self, batch: TrainBatch, learning_rates: Sequence[float]) -> list[UpdateMetrics]:
        """Train a batch on all ranks. Returns one entry per update."""
        shared = ray.put(batch)
        results = await self._all("train", "training a batch", shared, tuple(learning_rates))
        metrics: list[UpdateMetrics] = results[0]
        return metrics

    async def negative_log_likelihood(self, batch: TrainBatch) -> float:
        loss: float = (await self._all("negative_log_likelihood", "evaluating", ray.put(batch)))[0]
        return loss

    async def publication(self, version: int) -> Publication:
        """A copy of the weights as `version`, in the object store."""
        copied: Publication = (await self._all("publication", "copying the weights", version))[0]
        return copied

    async def save(self, folder: Path, copied: asyncio.Event) -> None:
        """Write a checkpoint; returns when every rank has written its share. `copied` is set when ranks may train again."""
        act = "saving a checkpoint"
        until = time.monotonic() + self._deadline
        await self._all("save", act, folder)
        copied.set()
        while not all(await self._all("saved", act)):
            if time.monotonic() > until:
                raise Stalled(f"the train pool: {act} took more than {self._deadline:g} s; use faster storage")
            await asyncio.sleep(SAVED_EVERY_SECONDS)

    async def restore(self, folder: Path) -> None:
        await self._all("restore", "reading a checkpoint", folder)

    async def _all(self, method: str, act: str, *arguments: object) -> list[Any]:
        calls = [getattr(worker, method).remote(*arguments) for worker in self._workers]
        return await answers(calls, of="the train pool", act=act, seconds=self._deadline, names=self._names)

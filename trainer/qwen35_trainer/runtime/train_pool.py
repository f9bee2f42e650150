"""The train pool as one object for the loop: each call goes to all ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from qwen35_trainer.engines.train_batch import TrainBatch
from qwen35_trainer.engines.train_engine import UpdateMetrics
from qwen35_trainer.runtime.calls import answer, answers
from qwen35_trainer.weights.published import PublishedWeights


class TrainPool:
    """All train workers. Every call goes to all of them with the same arguments and in the same order."""

    def __init__(self, workers: Sequence[Any], deadline: float) -> None:
        self._workers, self._deadline = workers, deadline
        self._names = [f"train-{rank}" for rank in range(len(workers))]

    async def start(self, seconds: float) -> tuple[float, float]:
        """Form the process group and build the engines. Raises Stalled and ActorLost.

        Returns the wall-clock seconds at which the ranks began to join, and at which the last engine was built.
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

    async def publication(self, version: int) -> PublishedWeights:
        """Copy the weights to the object store as `version`."""
        copied: PublishedWeights = (await self._all("publication", "copying the weights", version))[0]
        return copied

    async def save(self, folder: Path) -> None:
        """Begin to write a checkpoint. Returns when the ranks have copied their state and may train again; `saved` follows."""
        await self._all("save", "copying the state for a checkpoint", folder)

    async def saved(self) -> None:
        """Wait until every rank has written its part of the checkpoint. The ranks may train meanwhile."""
        await self._all("saved", "writing a checkpoint")

    async def restore(self, folder: Path) -> None:
        await self._all("restore", "reading a checkpoint", folder)

    async def _all(self, method: str, act: str, *arguments: object) -> list[Any]:
        calls = [getattr(worker, method).remote(*arguments) for worker in self._workers]
        return await answers(calls, of="the train pool", act=act, seconds=self._deadline, names=self._names)

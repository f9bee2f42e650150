"""The train pool as the loop sees it: M ranks that act as one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from qwen35_trainer.engines.base import UpdateMetrics
from qwen35_trainer.engines.batch import TrainBatch
from qwen35_trainer.runtime.calls import answer, answers
from qwen35_trainer.weights.publication import Publication


class TrainPool:
    """Ranks are called alike and in one order."""

    def __init__(self, workers: Sequence[Any], deadline: float) -> None:
        self._workers, self._deadline = workers, deadline

    async def start(self, seconds: float) -> None:
        """Form the process group and build the engines."""
        ranks = len(self._workers)
        host, port = await answer(
            self._workers[0].listen.remote(ranks), of="train-0", act="opening the rendezvous", seconds=seconds
        )
        joined = [worker.join.remote(host, port, ranks) for worker in self._workers]
        await answers(joined, of="the train pool", act="loading the model", seconds=seconds)

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

    async def save(self, folder: Path) -> None:
        await self._all("save", "saving a checkpoint", folder)

    async def restore(self, folder: Path) -> None:
        await self._all("restore", "reading a checkpoint", folder)

    async def _all(self, method: str, act: str, *arguments: object) -> list[Any]:
        calls = [getattr(worker, method).remote(*arguments) for worker in self._workers]
        return await answers(calls, of="the train pool", act=act, seconds=self._deadline)

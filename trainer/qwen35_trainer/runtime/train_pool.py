"""The train pool: all train workers (ranks) as one object, whose methods call every rank."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from qwen35_trainer.engines.batch_division import ONE_SHARE, BatchDivision
from qwen35_trainer.engines.train_batch import TrainBatch
from qwen35_trainer.engines.train_engine import UpdateMetrics
from qwen35_trainer.runtime.calls import Stalled, answer, answers
from qwen35_trainer.runtime.site import WorkerLocation, rank_order
from qwen35_trainer.weights.memory_change import MemoryChange
from qwen35_trainer.weights.published import PublishedWeights, joined

DEADLINE_FIELD = "spec.async.stallSeconds"
"""The field of the manifest with the maximum time of a call."""


class TrainPool:
    """All train workers. Every worker gets the same calls, in the same order and with the same arguments.

    Only batches are divided: each worker gets one part (share) of a batch. deadline: maximum time for each call, in
    seconds, after which the call raises Stalled. division: how a batch is divided into shares. groups: sizes of the
    groups of neighbouring ranks that should share a node (`site.rank_order`).
    """

    def __init__(
        self,
        workers: Sequence[Any],
        deadline: float,
        division: BatchDivision = ONE_SHARE,
        groups: Sequence[int] = (),
    ) -> None:
        self._workers, self._deadline = list(workers), deadline
        self._division, self._groups = division, groups
        self._names = [f"train-{rank}" for rank in range(len(workers))]
        self.locations: list[WorkerLocation] = []
        """Node and device of each worker, in the order in which the workers were started. Empty before `start`."""

    async def start(self, seconds: float) -> tuple[float, float]:
        """Give each worker its rank, form the process group, and build the engines.

        seconds: maximum time for each of these steps. Returns two times in Unix seconds: when the ranks began to join
        the process group, and when the last engine was built. Raises Stalled if a step takes longer, and ActorLost if a
        worker's process ends.
        """
        ranks = len(self._workers)
        self._workers = await self._in_order_of_ranks(seconds)
        host, port = await answer(
            self._workers[0].listen.remote(ranks), of=self._names[0], act="opening the rendezvous", seconds=seconds
        )
        began = time.time()
        joined = [worker.join.remote(rank, ranks, host, port) for rank, worker in enumerate(self._workers)]
        await answers(
            joined,
            of="the train pool",
            act="loading the model",
            seconds=seconds,
            names=self._names,
            field=DEADLINE_FIELD,
        )
        return began, time.time()

    async def _in_order_of_ranks(self, seconds: float) -> list[Any]:
        """Return the workers in the order of their ranks. Ranks are numbered by node and device (`site.rank_order`).

        seconds: maximum time for the workers' answers, after which Stalled is raised.
        """
        names = [f"train-worker-{number}" for number in range(len(self._workers))]
        calls = [worker.location.remote() for worker in self._workers]
        act = "finding its node and device"
        locations = await answers(calls, of="the train pool", act=act, seconds=seconds, names=names)
        self.locations = locations
        return [self._workers[number] for number in rank_order(locations, self._groups)]

    async def train(self, batch: TrainBatch, learning_rates: Sequence[float]) -> list[UpdateMetrics]:
        """Train a batch, of which each rank gets only its share. Returns the metrics of each update.

        learning_rates: the learning rate of each update of the batch. Raises Stalled after the deadline, and ActorLost
        if a worker's process ends.
        """
        metrics: list[UpdateMetrics] = await self._on_shares("train", "training a batch", batch, tuple(learning_rates))
        return metrics

    async def negative_log_likelihood(self, batch: TrainBatch) -> float:
        loss: float = await self._on_shares("negative_log_likelihood", "evaluating", batch)
        return loss

    async def _on_shares(self, method: str, act: str, batch: TrainBatch, *arguments: object) -> Any:  # noqa: ANN401  # an actor's result
        """Call `method` of each rank with its share of `batch` and `arguments`. Returns the answer of rank 0.

        act: description of the call, for errors. Raises Stalled if storing the shares or a call takes longer than the
        deadline.
        """
        try:
            # In a thread: the tokens of the whole batch are copied twice, into shares and into the object store.
            shares = await asyncio.wait_for(asyncio.to_thread(self._put_shares, batch), self._deadline)
        except TimeoutError as error:
            raise Stalled(f"{act}: the object store did not take the batch within {self._deadline:g} s") from error
        ranks = len(self._workers)
        calls = [
            getattr(worker, method).remote(shares[self._division.share_of(rank, ranks)], *arguments)
            for rank, worker in enumerate(self._workers)
        ]
        return (await self._answers(calls, act))[0]

    def _put_shares(self, batch: TrainBatch) -> list[ray.ObjectRef[TrainBatch]]:
        """Copy the shares of a batch to the object store. Neighbouring ranks with the same share read the same object."""
        return [ray.put(share) for share in self._division.shares_of(batch)]

    async def log_probs(self, sequences: Sequence[NDArray[np.int32]]) -> NDArray[np.float32]:
        """Compute the log-probs of all tokens but the first of each sequence, at temperature 1, without training.

        sequences: (T,) token ids each, T ≥ 2. Returns the log-probs of all sequences concatenated: T - 1 for each.
        """
        log_probs: NDArray[np.float32] = await self._on_shares(
            "log_probs", "computing a probe", _without_first_tokens(sequences)
        )
        return log_probs

    async def publication(self, version: int, needed: frozenset[int] = frozenset()) -> PublishedWeights:
        """Copy the weights as `version`, and return the description by which replicas fetch the copy.

        needed: earlier versions that replicas have or may still fetch, and whose copies must stay. Raises
        WeightsDamaged, with the names of the tensors, if the ranks copied tensors incompletely or twice.
        """
        staged = await self._all("publication", "copying the weights", version, needed)
        return joined(staged, version)

    async def save(self, folder: Path) -> None:
        """Copy the state of all ranks for a checkpoint, and begin to write it into `folder`.

        Returns when the copy is complete. The ranks may then train again. Call `saved` afterwards, which waits until
        the files are written.
        """
        await self._all("save", "copying the state for a checkpoint", folder)

    async def saved(self) -> None:
        """Wait until every rank has written its part of the last checkpoint. The ranks may train during the wait."""
        await self._all("saved", "writing a checkpoint")

    async def restore(self, folder: Path) -> None:
        await self._all("restore", "reading a checkpoint", folder)

    async def sleep(self) -> MemoryChange:
        """Let all ranks move what they hold on their devices to host memory.

        Returns the device memory of all ranks together before and after.
        """
        return MemoryChange.total(await self._all("sleep", "giving its memory back"))

    async def wake(self) -> None:
        """Let all ranks move everything that `sleep` has moved to host memory back to their devices."""
        await self._all("wake", "taking its memory again")

    async def _all(self, method: str, act: str, *arguments: object) -> list[Any]:
        return await self._answers([getattr(worker, method).remote(*arguments) for worker in self._workers], act)

    async def _answers(self, calls: Sequence[ray.ObjectRef[Any]], act: str) -> list[Any]:
        return await answers(
            calls, of="the train pool", act=act, seconds=self._deadline, names=self._names, field=DEADLINE_FIELD
        )


def _without_first_tokens(sequences: Sequence[NDArray[np.int32]]) -> TrainBatch:
    """Return a batch in which the first token of each sequence is the prompt, and all other tokens are the response."""
    responses = [sequence[1:] for sequence in sequences]
    return TrainBatch(
        prompts=np.array([sequence[0] for sequence in sequences], np.int32),
        prompt_lengths=np.ones(len(sequences), np.int64),
        responses=np.concatenate(responses),
        response_lengths=np.array([len(response) for response in responses], np.int64),
        trainable=np.ones(sum(map(len, responses)), np.bool_),
    )

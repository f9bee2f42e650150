"""Which worker becomes which rank, and what each rank is sent of a batch."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray

from qwen35_trainer.engines.batch_division import BatchDivision
from qwen35_trainer.engines.train_batch import TrainBatch
from qwen35_trainer.runtime.calls import Stalled
from qwen35_trainer.runtime.site import WorkerLocation
from qwen35_trainer.runtime.train_pool import TrainPool


@dataclass
class Worker:
    """Answers each call with its own location, and records the arguments."""

    node: str
    device: str
    silent: str = ""
    """A method that never answers."""
    calls: dict[str, tuple[Any, ...]] = field(default_factory=dict)

    def __getattr__(self, method: str) -> Any:
        def remote(*arguments: Any) -> asyncio.Future[Any]:
            self.calls[method] = arguments
            answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            if method != self.silent:
                answer.set_result(
                    ("here", 1) if method == "listen" else WorkerLocation(self.node, self.node, self.device)
                )
            return answer

        return SimpleNamespace(remote=remote)


@pytest.fixture
def objects(monkeypatch) -> list[object]:
    """What the pool has put into the object store; a reference is the object itself."""
    put: list[object] = []

    def store(value: object) -> object:
        put.append(value)
        return value

    monkeypatch.setattr(ray, "put", store)
    return put


@pytest.fixture
def four() -> list[Worker]:
    """Ray has started them on any device of two nodes."""
    return [Worker(node, device) for node, device in (("b", "1"), ("a", "0"), ("b", "0"), ("a", "1"))]


def four_samples() -> TrainBatch:
    """Responses of 40, 30, 20 and 10 tokens."""
    lengths = np.array([40, 30, 20, 10])
    tokens = np.repeat(np.arange(4, dtype=np.int32), lengths)
    return TrainBatch(
        np.arange(4, dtype=np.int32), np.ones(4, dtype=np.int64), tokens, lengths, np.ones(100, dtype=np.bool_)
    )


async def test_ranks_follow_nodes_and_devices(four):
    await TrainPool(four, deadline=1.0, groups=(2,)).start(1.0)
    assert [worker.calls["join"] for worker in four] == [(rank, 4, "here", 1) for rank in (3, 0, 2, 1)]
    assert [worker for worker in four if "listen" in worker.calls] == [four[1]]


async def test_before_workers_have_ranks_errors_name_them_by_their_numbers_and_then_by_their_ranks(four):
    four[2].silent = "location"
    with pytest.raises(Stalled, match=r"\(train-worker-2\) did not finish finding its node and device within"):
        await TrainPool(four, deadline=1.0).start(0.01)
    four[2].silent, four[0].silent = "", "restore"
    pool = TrainPool(four, deadline=0.01)
    await pool.start(1.0)
    with pytest.raises(Stalled, match=r"the train pool \(train-3\) did not finish reading a checkpoint"):
        await pool.restore(None)


async def test_each_rank_gets_the_tokens_of_its_share_and_the_numbers_of_all_samples(four, objects):
    pool = TrainPool(four, deadline=1.0, division=BatchDivision(shares=4))
    await pool.start(1.0)
    await pool.train(four_samples(), [1e-3])
    by_rank = [four[worker].calls["train"] for worker in (1, 3, 2, 0)]
    assert [batch.responses.tolist() for batch, _ in by_rank] == [[0] * 40, [1] * 30, [2] * 20, [3] * 10]
    assert all(batch.response_lengths.tolist() == [40, 30, 20, 10] for batch, _ in by_rank)
    assert all(rates == (1e-3,) for _, rates in by_rank)
    assert len(objects) == 4


async def test_ranks_that_share_their_sequences_read_one_object(four, objects):
    pool = TrainPool(four, deadline=1.0, division=BatchDivision(shares=2))
    await pool.start(1.0)
    await pool.negative_log_likelihood(four_samples())
    first, second, third, fourth = (four[worker].calls["negative_log_likelihood"][0] for worker in (1, 3, 2, 0))
    assert first is second
    assert third is fourth
    assert len(objects) == 2
    assert sorted({*first.responses.tolist(), *third.responses.tolist()}) == [0, 1, 2, 3]

"""The train pool with ranks that are futures: how many calls a checkpoint takes, and what each of them waits for."""

import asyncio
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from qwen35_trainer.runtime.calls import Stalled
from qwen35_trainer.runtime.train_pool import TrainPool
from qwen35_trainer.runtime.train_worker import SAVING, TrainWorker

FOLDER = Path("update-000020")


class Rank:
    """A train worker whose calls a test answers."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.answers: dict[str, asyncio.Future[None]] = {}

    def __getattr__(self, method: str) -> SimpleNamespace:
        def remote(*_: object) -> asyncio.Future[None]:
            self.calls[method] += 1
            self.answers[method] = asyncio.get_running_loop().create_future()
            return self.answers[method]

        return SimpleNamespace(remote=remote)


async def _turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_checkpoint_takes_one_call_per_rank_to_copy_and_one_to_write_however_long_that_takes():
    async def play() -> None:
        ranks = [Rank() for _ in range(8)]
        pool = TrainPool(ranks, deadline=60.0)
        saving = asyncio.ensure_future(pool.save(FOLDER))
        await _turns()
        for rank in ranks:
            rank.answers["save"].set_result(None)
        await saving
        writing = asyncio.ensure_future(pool.saved())
        await asyncio.sleep(0.05)
        assert not writing.done()
        for rank in ranks[:-1]:
            rank.answers["saved"].set_result(None)
        await asyncio.sleep(0.05)
        assert not writing.done(), "the last rank still writes"
        ranks[-1].answers["saved"].set_result(None)
        await writing
        assert all(rank.calls == {"save": 1, "saved": 1} for rank in ranks)

    asyncio.run(play())


def test_a_rank_that_does_not_finish_writing_is_named_at_the_deadline():
    async def play() -> None:
        ranks = [Rank(), Rank()]
        writing = asyncio.ensure_future(TrainPool(ranks, deadline=0.01).saved())
        await _turns()
        ranks[0].answers["saved"].set_result(None)
        with pytest.raises(Stalled, match=r"the train pool \(train-1\) did not finish writing a checkpoint") as raised:
            await writing
        assert str(raised.value).endswith("If it was only slow, raise spec.async.stallSeconds")

    asyncio.run(play())


def test_a_rank_waits_for_its_files_while_it_trains():
    assert TrainWorker.saved.__ray_concurrency_group__ == SAVING
    assert not hasattr(TrainWorker.save, "__ray_concurrency_group__"), "the copy excludes training"

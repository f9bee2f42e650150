"""Waiting for work that a stop request may cancel, and for threads that may never end."""

import asyncio
import subprocess
import sys
import threading

import pytest

from qwen35_trainer.runtime.background import Unfinished, done_before, done_within
from tests.patience import PATIENCE


async def test_work_that_is_done_first_counts():
    assert await done_before(asyncio.Event(), asyncio.ensure_future(asyncio.sleep(0)))


async def test_a_stop_cancels_the_work():
    stop, work = asyncio.Event(), asyncio.ensure_future(asyncio.Event().wait())
    asyncio.get_running_loop().call_soon(stop.set)
    assert not await done_before(stop, work)
    with pytest.raises(asyncio.CancelledError):
        await work


async def test_what_the_work_raises_is_raised():
    async def fails() -> None:
        raise ValueError("no weights")

    with pytest.raises(ValueError, match="no weights"):
        await done_before(asyncio.Event(), asyncio.ensure_future(fails()))


async def test_work_in_a_thread_has_its_result_or_its_error():
    assert await done_within(None, lambda: 3) == 3
    with pytest.raises(OSError, match="no such server"):
        await done_within(PATIENCE, lambda: _fail(TimeoutError("no such server")))


def _fail(error: Exception) -> None:
    raise error


async def test_work_that_takes_too_long_continues_and_nobody_waits_for_it():
    may_end, ended = threading.Event(), threading.Event()

    def work() -> None:
        may_end.wait(PATIENCE)
        ended.set()

    with pytest.raises(Unfinished):
        await done_within(0.01, work)
    may_end.set()
    assert await asyncio.to_thread(ended.wait, PATIENCE)


STUCK = """
import asyncio, pathlib, sys, threading
from qwen35_trainer.runtime import checkpoint_store
from qwen35_trainer.runtime.checkpoint_store import CheckpointMeta, CheckpointStore, StorageFailed

checkpoint_store.sync = lambda path: threading.Event().wait()

async def write(folder):
    (folder / "state").touch()

async def main():
    try:
        await CheckpointStore(pathlib.Path(sys.argv[1]), 1, stall_seconds=0.1).save(CheckpointMeta(20, 20, 0, (), 1.0), write)
    except StorageFailed as error:
        print(error)

asyncio.run(main())
"""


async def test_a_process_ends_although_its_storage_never_answers(tmp_path):
    ended = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", STUCK, str(tmp_path)],
        timeout=PATIENCE,
        check=True,
        capture_output=True,
        text=True,
    )
    assert f"the storage of {tmp_path} did not answer within spec.async.stallSeconds 0.1 s" in ended.stdout

"""Shared memory: who may write, and that nothing of it remains."""

import gc
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from qwen35_trainer.free_memory import free_memory
from qwen35_trainer.weights import segment as segments
from qwen35_trainer.weights.segment import MemorySegment, SegmentPool, SegmentUnavailable, TooLittleMemory
from tests.patience import PATIENCE

SIZE = 100


def filled(version: int, pool: SegmentPool, needed: frozenset[int] = frozenset()) -> MemorySegment:
    """Write a version."""
    segment = pool.claim(version, SIZE, needed)
    segment.data[:] = version
    segment.unlock()
    return segment


def reading(segment: MemorySegment) -> np.ndarray:
    """What a reader holds: bytes, without the object that it opened."""
    data = MemorySegment.open(segment.handle).read()
    assert data is not None
    return data[10:20]


def test_another_process_has_the_same_memory_and_none_is_left_when_both_are_killed() -> None:
    segment = filled(7, SegmentPool())
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import pickle, sys, time\n"
            "from qwen35_trainer.weights.segment import MemorySegment\n"
            "segment = MemorySegment.open(pickle.load(sys.stdin.buffer), writable=True)\n"
            "print(segment.version, segment.data.sum(), flush=True)\n"
            "segment.data[3] = 9\n"
            "data = segment.read()\n"
            "print('locked', flush=True)\n"
            "time.sleep(600)",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    with child:
        child.stdin.write(pickle.dumps(segment.handle))
        child.stdin.close()
        assert child.stdout.readline() == b"7 700\n"
        assert child.stdout.readline() == b"locked\n"
        assert segment.data[3] == 9
        assert not segment.lock_for_writing()
        child.kill()
        child.wait(PATIENCE)
    assert segment.lock_for_writing(), "a process that is killed reads no more"
    name = segment.handle.name
    assert not [file for file in Path("/dev/shm").iterdir() if name in file.name]
    assert _holds(name)
    del segment
    gc.collect()
    assert not _holds(name)


def _holds(name: str) -> bool:
    """Whether this process maps the segment, or has it open."""
    opened = [str(Path(os.path.realpath(file))) for file in Path("/proc/self/fd").iterdir()]
    return name in Path("/proc/self/maps").read_text() or any(name in each for each in opened)


def test_two_segments_take_turns() -> None:
    pool = SegmentPool()
    names = []
    for version in range(6):
        needed = frozenset({version - 1} if version else ())
        names.append(filled(version, pool, needed).handle.name)
    assert names[0::2] == [names[0]] * 3
    assert names[1::2] == [names[1]] * 3
    assert names[0] != names[1]


def test_a_segment_that_is_read_is_not_written_and_the_next_one_is_another() -> None:
    pool = SegmentPool()
    held = reading(filled(1, pool))
    second = filled(2, pool)
    gc.collect()
    assert held.tolist() == [1] * 10
    del held
    gc.collect()
    third = filled(3, pool, needed=frozenset({2}))
    assert third.handle.name != second.handle.name
    assert len(pool.handles) == 2, "the segment of version 1 is used again"


def test_a_version_that_somebody_may_still_fetch_is_not_written_although_nobody_reads_it() -> None:
    pool = SegmentPool()
    first = filled(1, pool)
    filled(2, pool, needed=frozenset({1}))
    filled(3, pool, needed=frozenset({1, 2}))
    assert reading(first).tolist() == [1] * 10
    filled(4, pool, needed=frozenset({3}))
    assert len(pool.handles) == 2, "one of the two free segments is given back"


def test_a_segment_cannot_be_read_while_it_is_written() -> None:
    segment = SegmentPool().claim(1, SIZE)
    opened = MemorySegment.open(segment.handle)
    assert opened.read() is None
    segment.unlock()
    assert opened.read() is not None


def test_any_holder_is_enough_and_the_number_of_an_ended_process_is_not_trusted() -> None:
    segment = filled(1, SegmentPool())
    other = filled(2, SegmentPool())
    wrong = (os.getpid(), other.handle.holders[0][1])  # a process with the number of one that has ended
    handle = segments.SegmentHandle(segment.handle.name, SIZE, (wrong, (0, 3), *segment.handle.holders))
    assert MemorySegment.open(handle).version == 1
    with pytest.raises(SegmentUnavailable, match="no process holds the weights"):
        MemorySegment.open(segments.SegmentHandle(segment.handle.name, SIZE, (wrong,)))


def test_too_little_memory_is_named_with_what_is_needed(monkeypatch, tmp_path) -> None:
    (tmp_path / "memory.max").write_text("3000000000\n")
    (tmp_path / "memory.current").write_text("2500000000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 500000000\n")
    assert free_memory(tmp_path) == 1_000_000_000
    monkeypatch.setattr(segments, "free_memory", lambda: free_memory(tmp_path))
    with pytest.raises(
        TooLittleMemory, match=r"a copy of the weights needs 2 GB of shared memory, and 1 GB are available"
    ):
        MemorySegment.create(2_000_000_000)


def test_segments_that_take_turns_are_created_only_if_memory_suffices_for_all_of_them(monkeypatch) -> None:
    """Memory that was created and not written counts as free, so that one after the other would be too late."""
    monkeypatch.setattr(segments, "free_memory", lambda: 3 * SIZE // 2)
    pool = SegmentPool(turns=2)
    with pytest.raises(TooLittleMemory, match=r"2 copies of the weights need .* GB of shared memory"):
        pool.claim(1, SIZE)
    assert pool.segments == ()
    monkeypatch.setattr(segments, "free_memory", lambda: 2 * SIZE)
    pool.claim(1, SIZE).unlock()
    monkeypatch.setattr(segments, "free_memory", lambda: 0)
    pool.claim(2, SIZE).unlock()
    assert len(pool.segments) == 2

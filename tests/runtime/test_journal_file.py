"""What is flushed is on disk, whole and in order; what cannot be written raises, and nothing follows it."""

import asyncio
import os
import resource
import signal
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35_trainer.pipeline.commands import SchedulingSnapshot, TrainGroups
from qwen35_trainer.pipeline.journal import JournalBase, JournalDamaged, encode, recover
from qwen35_trainer.pipeline.notices import GroupDispatched, GroupLeft, LeaveReason
from qwen35_trainer.runtime.journal_file import JournalFile, JournalNotWritten
from tests.patience import PATIENCE

START = SchedulingSnapshot(2, 6, (3, 5), 7)
RECORDS = (
    GroupDispatched(7, 3),
    GroupDispatched(8, 5),
    GroupDispatched(9, 6),
    GroupLeft(8, 5, LeaveReason.FILTERED),
    TrainGroups(2, 2, (7,)),
    GroupDispatched(10, 7),
)


def text(*records):
    return b"".join(encode(record) for record in records)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
async def journal(tmp_path):
    journal = JournalFile(tmp_path / "journal")
    await journal.begin(START)
    yield journal
    await journal.close()


@pytest.fixture
def disk_full_at():
    """disk_full_at(100): no file of this process grows beyond this number of bytes. None: there is space again."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (soft if size is None else size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_what_is_flushed_is_on_disk(journal):
    assert journal.path.read_bytes() == text(JournalBase(START))
    for record in RECORDS:
        journal.add(record)
    assert journal.path.read_bytes() == text(JournalBase(START)), "nothing is written before the flush"
    await journal.flush()
    assert journal.path.read_bytes() == text(JournalBase(START), *RECORDS)
    assert recover(journal.path.read_bytes(), 3) == SchedulingSnapshot(3, 8, (6, 7), 11)


async def test_each_flush_returns_only_when_its_records_are_on_disk_and_all_come_in_order(journal):
    records = [GroupDispatched(7 + each, each) for each in range(200)]

    async def write(record):
        journal.add(record)
        await journal.flush()
        assert encode(record) in journal.path.read_bytes()

    await asyncio.gather(*(write(record) for record in records))
    assert journal.path.read_bytes() == text(JournalBase(START), *records)


async def test_flushes_that_wait_for_one_another_share_a_write(journal, monkeypatch):
    syncs, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (syncs.append(descriptor), fsync(descriptor)))
    for each in range(100):
        journal.add(GroupDispatched(7 + each, each))
    await asyncio.gather(*(journal.flush() for _ in range(20)))
    assert len(syncs) == 1


async def test_a_cancelled_flush_still_happens_and_the_next_one_follows_it(journal):
    records = [GroupDispatched(7 + each, each) for each in range(20)]
    for record in records:
        journal.add(record)
        flushing = asyncio.create_task(journal.flush())
        await asyncio.sleep(0)
        flushing.cancel()
    await journal.flush()
    assert journal.path.read_bytes() == text(JournalBase(START), *records)


async def test_a_new_beginning_replaces_the_old_journal(journal):
    journal.add(RECORDS[0])
    await journal.flush()
    second = JournalFile(journal.path)
    await second.begin(SchedulingSnapshot(9, 40, (), 50))
    second.add(GroupDispatched(50, 40))
    await second.flush()
    await second.close()
    assert journal.path.read_bytes() == text(JournalBase(SchedulingSnapshot(9, 40, (), 50)), GroupDispatched(50, 40))
    assert names(journal.path.parent) == ["journal"]


async def test_compaction_keeps_the_meaning_and_records_continue_after_it(journal):
    for record in RECORDS[:4]:
        journal.add(record)
    await journal.compact(2)
    assert journal.path.read_bytes() == text(JournalBase(SchedulingSnapshot(2, 7, (3, 6), 10), held=(7, 9)))
    for record in RECORDS[4:]:
        journal.add(record)
    await journal.flush()
    assert recover(journal.path.read_bytes(), 3) == recover(text(JournalBase(START), *RECORDS), 3)
    assert names(journal.path.parent) == ["journal"]


@given(acts=st.lists(st.sampled_from(["add", "flush", "compact"]), max_size=12))
async def test_whatever_runs_at_the_same_time_the_records_come_in_order(acts, tmp_path_factory):
    journal = JournalFile(tmp_path_factory.mktemp("run") / "journal")
    await journal.begin(SchedulingSnapshot())
    added, running = [], []
    for act in acts:
        if act == "add":
            added.append(GroupDispatched(len(added), len(added)))
            journal.add(added[-1])
        else:
            running.append(asyncio.ensure_future(journal.flush() if act == "flush" else journal.compact(0)))
            await asyncio.sleep(0)
    await asyncio.gather(*running)
    await journal.flush()
    await journal.close()
    assert recover(journal.path.read_bytes(), 0) == recover(text(JournalBase(SchedulingSnapshot()), *added), 0)


async def test_a_full_disk_raises_and_nothing_follows_the_torn_line(journal, disk_full_at):
    journal.add(RECORDS[0])
    await journal.flush()
    whole = journal.path.read_bytes()
    disk_full_at(len(whole) + 30)
    for record in RECORDS[1:]:
        journal.add(record)
    with pytest.raises(JournalNotWritten, match=r"journal .*/journal was not written: File too large\. Free space"):
        await journal.flush()
    disk_full_at(None)
    torn = journal.path.read_bytes()
    assert torn == text(JournalBase(START), *RECORDS)[: len(whole) + 30]
    journal.add(RECORDS[-1])
    for act in (journal.flush, lambda: journal.compact(2)):
        with pytest.raises(JournalNotWritten):
            await act()
    assert journal.path.read_bytes() == torn
    assert recover(torn, 2) == recover(text(JournalBase(START), *RECORDS[:2]), 2), "the torn line is cut"


async def test_a_journal_that_cannot_be_compacted_is_written_on(journal, disk_full_at):
    for record in RECORDS[:4]:
        journal.add(record)
    await journal.flush()
    disk_full_at(10)
    with pytest.raises(JournalNotWritten):
        await journal.compact(2)
    disk_full_at(None)
    assert names(journal.path.parent) == ["journal"]
    for record in RECORDS[4:]:
        journal.add(record)
    await journal.flush()
    assert journal.path.read_bytes() == text(JournalBase(START), *RECORDS)


async def test_a_full_device_leaves_the_earlier_journal_whole(journal):
    before = journal.path.read_bytes()
    journal.path.with_name(".journal.partial").symlink_to("/dev/full")
    with pytest.raises(JournalNotWritten, match="No space left on device"):
        await JournalFile(journal.path).begin(SchedulingSnapshot(9, 40, (), 50))
    assert journal.path.read_bytes() == before
    assert names(journal.path.parent) == ["journal"]


async def test_a_folder_that_is_missing_raises(tmp_path):
    with pytest.raises(JournalNotWritten, match=r"nowhere/journal was not written: No such file or directory"):
        await JournalFile(tmp_path / "nowhere" / "journal").begin(START)


async def test_damage_on_disk_stops_a_compaction_and_changes_nothing(journal):
    for record in RECORDS:
        journal.add(record)
    await journal.flush()
    bad = journal.path.read_bytes().replace(b'"d":8', b'"d":9')
    journal.path.write_bytes(bad)
    with pytest.raises(JournalDamaged, match="line 3"):
        await journal.compact(3)
    assert journal.path.read_bytes() == bad


async def test_records_need_a_beginning(tmp_path):
    journal = JournalFile(tmp_path / "journal")
    journal.add(RECORDS[0])
    with pytest.raises(ValueError, match="call begin first"):
        await journal.flush()


CRASH = """
import asyncio, os, pathlib, signal, sys
from qwen35_trainer.pipeline.notices import GroupDispatched
from qwen35_trainer.pipeline.commands import SchedulingSnapshot
from qwen35_trainer.runtime.journal_file import JournalFile

async def main():
    journal = JournalFile(pathlib.Path(sys.argv[1]))
    await journal.begin(SchedulingSnapshot())
    for each in range(5):
        journal.add(GroupDispatched(each, each))
    await journal.flush()
    os.rename = os.replace = pathlib.Path.replace = pathlib.Path.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    await journal.compact(0)

asyncio.run(main())
"""


async def test_a_crash_between_writing_and_renaming_leaves_the_earlier_journal(tmp_path):
    path = tmp_path / "journal"
    died = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", CRASH, str(path)], timeout=PATIENCE, check=False
    )
    assert died.returncode == -signal.SIGKILL
    assert names(tmp_path) == [".journal.partial", "journal"]
    assert path.read_bytes() == text(
        JournalBase(SchedulingSnapshot()), *(GroupDispatched(each, each) for each in range(5))
    )
    journal = JournalFile(path)
    await journal.begin(recover(path.read_bytes(), 0))
    await journal.close()
    assert names(tmp_path) == ["journal"]
    assert recover(path.read_bytes(), 0) == SchedulingSnapshot(0, 5, (0, 1, 2, 3, 4), 5)

"""A checkpoint is whole or absent, whatever happens while it is written."""

import errno
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35_trainer.atomic_files import FolderWriter
from qwen35_trainer.epoch import Epoch, Owner, read_owner, take
from qwen35_trainer.failure_reasons import FailureReason, reason_of
from qwen35_trainer.runtime import checkpoint_store
from qwen35_trainer.runtime.checkpoint_store import (
    CheckpointError,
    CheckpointMeta,
    CheckpointStore,
    StorageFailed,
    load,
)
from qwen35_trainer.runtime.resuming import newest_of_lineage

FILES = {"state/part-0": b"weights" * 9, "state/part-1": b"moments" * 5, "random-0.pt": b"seed"}


def progress(update: int) -> CheckpointMeta:
    return CheckpointMeta(
        update=update, batch=update, position=4 * update + 2, pending=(4 * update, 4 * update + 1), elapsed=1.5
    )


async def write_all(folder: Path) -> None:
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def test_what_is_saved_is_read_back(tmp_path):
    path = await CheckpointStore(tmp_path, 3).save(progress(20), write_all)
    assert path.name == "update-000020"
    assert load(path).progress == progress(20)
    assert (path / "state" / "part-1").read_bytes() == FILES["state/part-1"]


async def test_a_checkpoint_says_which_run_it_is_of(tmp_path):
    path = await CheckpointStore(tmp_path, 3, "kind: Qwen35Training\n").save(progress(20), write_all)
    assert (path / "manifest.yaml").read_text() == "kind: Qwen35Training\n"
    assert "manifest.yaml" in json.loads((path / "contents.json").read_text())


async def test_a_checkpoint_says_on_which_rows_its_run_trains(tmp_path):
    path = await CheckpointStore(tmp_path, 3, rows='{"train": []}').save(progress(20), write_all)
    assert (path / "rows.json").read_text() == '{"train": []}'
    assert "rows.json" in json.loads((path / "contents.json").read_text())


async def test_the_newest_are_kept_and_counted_by_number(tmp_path):
    store = CheckpointStore(tmp_path, 2)
    for update in (8, 999_998, 999_999, 1_000_000):
        await store.save(progress(update), write_all)
    assert names(tmp_path) == ["update-1000000", "update-999999"]
    assert store.latest().progress.update == 1_000_000


async def test_resuming_from_an_earlier_one_abandons_those_after_it(tmp_path):
    store = CheckpointStore(tmp_path, 2)
    for update in (20, 40, 60):
        await store.save(progress(update), write_all)
    await store.save(progress(50), write_all)
    assert store.latest().progress.update == 50
    assert names(tmp_path) == ["update-000040", "update-000050"]


async def test_the_same_update_saved_again_replaces_the_old_one(tmp_path):
    store = CheckpointStore(tmp_path, 2)
    await store.save(progress(20), write_all)

    async def write_less(folder: Path) -> None:
        (folder / "other").write_text("new")

    path = await store.save(progress(20), write_less)
    assert names(path) == ["contents.json", "other", "progress.json"]
    assert names(tmp_path) == ["update-000020"]


def attempt(folder: Path, name: str, start: str = "") -> Epoch:
    return take(folder, Owner("run", name, "host", "/run", start=start), read_owner(folder))


async def saved_by(epoch: Epoch, update: int) -> Path:
    meta = replace(progress(update), journal=epoch.owner.attempt)
    return await CheckpointStore(epoch.folder, 3, epoch=epoch).save(meta, write_all)


@pytest.mark.parametrize("fenced", [False, True])
async def test_a_checkpoint_of_the_same_update_stays_if_the_new_one_cannot_be_renamed(tmp_path, monkeypatch, fenced):
    epoch = attempt(tmp_path, "first") if fenced else None
    store = CheckpointStore(tmp_path, 1, epoch=epoch)
    await store.save(progress(20), write_all)
    writer, renames = type(store.writer), []
    publish = writer.publish

    def fail(self: FolderWriter, made: Path, path: Path) -> None:
        renames.append(path)
        if len(renames) == 1:
            raise OSError(errno.EIO, "Input/output error")
        publish(self, made, path)

    monkeypatch.setattr(writer, "publish", fail)
    with pytest.raises(StorageFailed, match=r"Input/output error; earlier checkpoints are untouched"):
        await store.save(replace(progress(20), position=0), write_all)
    assert store.latest().progress == progress(20)


async def test_a_kill_while_an_old_checkpoint_of_the_same_update_is_deleted_leaves_the_new_one(tmp_path, monkeypatch):
    """Deleting a large folder takes long, so this is where a kill is most likely."""

    class Killed(BaseException):
        """Nothing cleans up."""

    def kill(path: Path, **_: object) -> None:
        if path.name.endswith(".deleted"):
            raise Killed

    first = attempt(tmp_path, "first")
    await saved_by(first, 40)
    second = attempt(tmp_path, "second", start="update-000040")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", kill)
        with pytest.raises(Killed):
            await saved_by(second, 40)
    attempt(tmp_path, "third", start="update-000040")
    assert load(tmp_path / "update-000040").progress.journal == "second"


async def test_a_kill_before_an_abandoned_checkpoint_is_replaced_leaves_the_one_from_which_the_attempt_began(
    tmp_path, monkeypatch
):
    class Killed(BaseException):
        """Nothing cleans up."""

    def kill(self: Epoch, made: Path, path: Path) -> None:
        raise Killed

    first = attempt(tmp_path, "first")
    for update in (20, 40):
        await saved_by(first, update)
    second = attempt(tmp_path, "second", start="update-000020")
    with monkeypatch.context() as patch:
        patch.setattr(Epoch, "publish", kill)
        with pytest.raises(Killed):
            await saved_by(second, 40)
    assert newest_of_lineage(tmp_path, read_owner(tmp_path)) == tmp_path / "update-000020"
    third = attempt(tmp_path, "third", start="update-000020")
    assert newest_of_lineage(tmp_path, third.owner) == tmp_path / "update-000020"
    assert load(tmp_path / "update-000020").progress.update == 20


async def test_a_full_disk_leaves_the_earlier_one_whole_and_no_half_one(tmp_path):
    store = CheckpointStore(tmp_path, 2)
    await store.save(progress(20), write_all)

    async def run_out(folder: Path) -> None:
        await write_all(folder)
        raise OSError(errno.ENOSPC, "No space left on device", str(folder / "state" / "part-1"))

    with pytest.raises(CheckpointError) as raised:
        await store.save(progress(40), run_out)
    assert "update-000040 was not saved: No space left on device" in str(raised.value)
    assert "earlier checkpoints are untouched" in str(raised.value)
    assert names(tmp_path) == ["update-000020"]
    assert store.latest().progress == progress(20)


async def test_a_disk_that_does_not_even_tell_its_free_space_is_a_failure_of_the_storage(tmp_path, monkeypatch):
    def fail(folder: Path) -> None:
        raise OSError(errno.EIO, "Input/output error", str(folder))

    async def write(folder: Path) -> None:
        fail(folder / "state")

    monkeypatch.setattr(shutil, "disk_usage", fail)
    with pytest.raises(StorageFailed, match=r"was not saved: Input/output error \(.*/state\)"):
        await CheckpointStore(tmp_path, 2).save(progress(20), write)
    assert names(tmp_path) == []


async def test_too_little_memory_of_a_rank_is_not_a_failure_of_the_storage(tmp_path):
    """Another disk would not help, and the failure policy treats both differently."""

    class OutOfMemoryError(RuntimeError):
        """As PyTorch's."""

    async def write(folder: Path) -> None:
        (folder / "state").write_text("a part")
        raise OutOfMemoryError("CUDA out of memory")

    with pytest.raises(MemoryError, match=r"update-000020 was not saved: .*CUDA out of memory") as raised:
        await CheckpointStore(tmp_path, 2).save(progress(20), write)
    assert reason_of(raised.value) is FailureReason.OUT_OF_MEMORY
    assert names(tmp_path) == []


async def test_the_message_of_a_first_checkpoint_that_fails_speaks_of_no_earlier_ones(tmp_path):
    async def run_out(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(folder / "state" / "part-1"))

    with pytest.raises(CheckpointError) as raised:
        await CheckpointStore(tmp_path, 2).save(progress(20), run_out)
    assert str(raised.value).endswith(
        "; it would have been the first one. Free space, or point spec.checkpoint.storage elsewhere, then begin again with "
        "--resume auto"
    )


async def test_the_storage_has_failed_if_old_checkpoints_cannot_be_deleted_and_the_new_one_stays(tmp_path):
    store = CheckpointStore(tmp_path, 1)
    await store.save(progress(20), write_all)
    (tmp_path / ".update-000020.deleted").touch()  # a folder cannot be renamed to a file
    with pytest.raises(
        StorageFailed, match=r"update-000040 was saved, but old checkpoints were not deleted: Not a directory"
    ):
        await store.save(progress(40), write_all)
    assert store.latest().progress == progress(40)


@pytest.mark.parametrize("crash_at", ["_seal", "FolderWriter.replace", "FolderWriter.publish", "sync"])
async def test_a_crash_between_two_steps_of_a_save_leaves_a_whole_checkpoint(tmp_path, monkeypatch, crash_at):
    class Crash(BaseException):
        """The process is gone: nothing cleans up."""

    store = CheckpointStore(tmp_path, 3)
    await store.save(progress(20), write_all)

    def crash(*_: object) -> None:
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(f"{checkpoint_store.__name__}.{crash_at}", crash)
        with pytest.raises(Crash):
            await store.save(progress(40), write_all)
    assert CheckpointStore(tmp_path, 3).latest().progress.update == 20
    await store.save(progress(60), write_all)
    assert names(tmp_path) == ["update-000020", "update-000060"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    import asyncio

    return asyncio.run(CheckpointStore(tmp_path_factory.mktemp("store"), 1).save(progress(7), write_all))


DAMAGE = st.dictionaries(
    st.sampled_from([*FILES, "progress.json", "contents.json"]), st.sampled_from(["missing", "shorter"]), min_size=1
)


@given(damage=DAMAGE, cut=st.integers(0, 10_000))
def test_a_checkpoint_with_any_file_missing_or_cut_short_is_never_read(whole, tmp_path_factory, damage, cut):
    copy = tmp_path_factory.mktemp("damaged") / "update-000007"
    shutil.copytree(whole, copy)
    for name, kind in damage.items():
        content = (copy / name).read_bytes()
        (copy / name).unlink()
        if kind == "shorter":
            (copy / name).write_bytes(content[: cut % len(content)])
    with pytest.raises(CheckpointError, match="Delete that folder to resume from the one before it"):
        load(copy)
    shutil.rmtree(copy.parent)


@pytest.mark.parametrize("content", ["", "nonsense", "[]", "{}", '{"update": 1}', "\x00\x01", '{"pending": 3}'])
def test_a_progress_file_that_holds_something_else_is_never_read(whole, tmp_path, content):
    copy = shutil.copytree(whole, tmp_path / "update-000007")
    (copy / "progress.json").write_text(content)
    contents = json.loads((copy / "contents.json").read_text())
    (copy / "contents.json").write_text(json.dumps(contents | {"progress.json": len(content)}))
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(copy)


def test_a_contents_file_that_lists_nothing_is_never_taken_for_a_whole_checkpoint(whole, tmp_path):
    copy = shutil.copytree(whole, tmp_path / "update-000007")
    (copy / "contents.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(copy)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="update-000003 does not exist"):
        load(tmp_path / "update-000003")


def test_a_damaged_newest_checkpoint_is_not_passed_over_in_silence(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "update-000006")
    newest = shutil.copytree(whole, tmp_path / "update-000007")
    (newest / "random-0.pt").unlink()
    with pytest.raises(CheckpointError, match=r"update-000007 cannot be read: random-0\.pt missing"):
        CheckpointStore(tmp_path, 2).latest()


def test_other_folders_are_not_checkpoints(tmp_path):
    for name in ("update-old", ".update-000009.partial", "update-"):
        (tmp_path / name).mkdir()
    assert CheckpointStore(tmp_path, 2).latest() is None

"""Runs that share a folder of checkpoints: one after the other, at the same time, moved, copied, and from earlier releases."""

import asyncio
import json
import shutil
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qwen35_trainer.epoch import FolderRefused, Superseded
from qwen35_trainer.failure_reasons import FailureReason, reason_of
from qwen35_trainer.manifest import load_manifest
from qwen35_trainer.progress.recorder import Recorder
from qwen35_trainer.progress.records import CheckpointRecord
from qwen35_trainer.runtime import checkpoint_store, driver
from qwen35_trainer.runtime.checkpoint_store import CheckpointError, CheckpointMeta, CheckpointStore
from qwen35_trainer.runtime.folder import RunFolder
from qwen35_trainer.runtime.job import Job
from qwen35_trainer.runtime.resuming import RunStart, find_start
from qwen35_trainer.runtime.run_command import _claimed


@dataclass
class Run:
    """A run of a small manifest. Its attempts begin and save as those of `qwen35 run`, without training."""

    file: Path
    output: Path
    in_cluster: bool = False
    stack: ExitStack = field(default_factory=ExitStack)
    job: Job | None = None
    made: Path | None = None
    """The folder that it has written to last, before that was renamed."""

    def find(self, resume: str | Path | None = None) -> RunStart:
        """What the attempt would start from. Raises as `qwen35 run` does before it starts Ray."""
        manifest, folder = load_manifest(self.file), RunFolder(self.output)
        folder.check(manifest, resume=resume is not None, in_cluster=self.in_cluster)
        wanted = None if resume is None else str(resume)
        return find_start(wanted, folder, manifest, self.file.parent, in_cluster=self.in_cluster)

    def start(self, resume: str | Path | None = None) -> "Run":
        """Begin an attempt. It runs until `end`, or is killed."""
        return self.go_on(self.find(resume), resume)

    def go_on(self, start: RunStart, resume: str | Path | None = None) -> "Run":
        """Begin an attempt that has looked what is there."""
        job = Job(
            manifest=load_manifest(self.file),
            base=self.file.parent,
            folder=RunFolder(self.output),
            resume=start.checkpoint,
            started=0.0,
            threads=1,
            updates_total=99,
            vocabulary=9,
            pictures=False,
            end_token=0,
            in_cluster=self.in_cluster,
        )
        self.job = self.stack.enter_context(_claimed(job, start, resume=resume is not None))
        return self

    def save(self, *updates: int) -> "Run":
        async def write(folder: Path) -> None:
            self.made = folder
            (folder / "state").write_text(self.file.parent.name)

        assert self.job is not None
        store = self.job.checkpoints
        assert store is not None
        for update in updates:
            meta = CheckpointMeta(update, update, 4 * update, (), 1.0, journal=self.job.attempt)
            asyncio.run(store.save(meta, write))
        return self

    def end(self) -> "Run":
        self.stack.close()
        return self


@pytest.fixture
def shared(tmp_path) -> Path:
    return tmp_path / "shared"


@pytest.fixture
def run(write, tmp_path, shared):
    """run("a", seed=1) is a run in the folder a, which saves in `shared`."""
    begun: list[Run] = []

    def build(name: str, *, title: str = "tiny", in_cluster: bool = False, **changes) -> Run:
        storage = {"checkpoint": {"keep": 2, "storage": {"path": str(shared)}}}
        file = write(tmp_path / "manifests" / name, storage | changes, name=title)
        begun.append(Run(file, tmp_path / name, in_cluster))
        return begun[-1]

    yield build
    for attempt in begun:
        attempt.end()


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("update-*"))


def test_a_run_continues_its_own_checkpoints(run, shared):
    run("a").start().save(20, 40, 60).end()
    start = run("a").find("auto")
    assert start.checkpoint.progress.update == 60
    assert saved(shared) == ["update-000040", "update-000060"]


@pytest.mark.parametrize("resume", [None, "auto"])
def test_one_run_after_another_is_kept_out_and_gets_advice(run, shared, resume):
    run("a").start().save(20, 40).end()
    with pytest.raises(FolderRefused) as refused:
        run("b").find(resume)
    message = str(refused.value)
    assert f"{shared} holds the checkpoints of another run, tiny-" in message
    assert f"{run('a').output})" in message
    assert "Name another folder in spec.checkpoint.storage.path, or take them over" in message
    assert message.endswith(f"with --resume {shared / 'update-000040'}")
    assert not (run("b").output).exists()


def test_seeds_that_share_a_folder_are_distinguished(run, shared):
    run("a").start().save(20).end()
    with pytest.raises(
        FolderRefused, match=r"with another manifest:\n  spec.seed: 0 there, 1 here\nName another folder"
    ):
        run("b", seed=1).find("auto")
    assert saved(shared) == ["update-000020"]


def test_a_run_that_has_not_saved_yet_keeps_its_folder_until_it_ends(run, shared):
    first = run("a").start()
    with pytest.raises(
        FolderRefused, match=r"and holds no checkpoint now. Name another .* or delete .*owner.json if that"
    ):
        run("b").find("auto")
    first.end()
    assert run("b").find("auto").checkpoint is None


def test_of_two_that_start_at_the_same_time_the_second_to_claim_is_refused(run):
    first, second = run("a"), run("b")
    early = second.find()
    first.start()
    with pytest.raises(FolderRefused, match=r"was claimed by tiny-.* meanwhile"):
        second.go_on(early)


def test_the_newest_checkpoint_may_be_taken_over_by_name_and_the_run_before_saves_there_no_more(run, shared):
    first = run("a").start().save(20, 40)
    second = run("b").start(shared / "update-000040")
    with pytest.raises(Superseded, match=r"update-000060 was not saved: .* was taken over by tiny-"):
        first.save(60)
    assert first.made.name == "update-000040", "it wrote nothing before it looked"
    second.save(60)
    second.end()
    assert (shared / "update-000060" / "state").read_text() == "b"
    assert run("b").find("auto").checkpoint.progress.update == 60
    first.end()
    with pytest.raises(FolderRefused, match="holds the checkpoints of another run"):
        run("a").find("auto")


@pytest.mark.torch
def test_an_output_folder_exports_no_checkpoints_of_another_run(run, shared, tmp_path):
    from qwen35_trainer.runtime.export_command import ExportRefused, export  # imports torch

    run("a").start().save(20).end()
    run("b").start(shared / "update-000020").end()
    with pytest.raises(
        ExportRefused, match=r"shared holds the checkpoints of another run now, tiny-.*; name a checkpoint"
    ):
        export(run("a").output, tmp_path / "model")


def test_an_older_checkpoint_of_another_run_is_not_taken_over(run, shared):
    """The first save would delete all that came after it."""
    run("a").start().save(20, 40).end()
    with pytest.raises(FolderRefused, match=r"--resume .*update-000040"):
        run("b").find(shared / "update-000020")


def test_a_checkpoint_from_elsewhere_does_not_open_the_folder_of_another_run(run, shared, tmp_path):
    run("a").start().save(20).end()
    copied = shutil.copytree(shared / "update-000020", tmp_path / "kept" / "update-000020")
    with pytest.raises(FolderRefused, match="holds the checkpoints of another run"):
        run("b").find(copied)
    assert run("a").find(copied).checkpoint.path == copied


@pytest.mark.parametrize("leftover", ["a checkpoint", "nothing"])
def test_a_killed_run_comes_back_without_a_question(run, shared, leftover):
    killed = run("a").start()
    if leftover == "a checkpoint":
        killed.save(20)
    record = (shared / "owner.json").read_bytes()
    killed.end()
    (shared / "owner.json").write_bytes(record)  # a kill lets go of the lock alone
    back = run("a").start("auto").save(40)
    assert back.job.resume is None or back.job.resume.progress.update == 20


def test_an_output_folder_in_which_a_killed_run_saved_nothing_is_used_again(run):
    killed = run("a", checkpoint={}).start()
    record = killed.output / "checkpoints" / "owner.json"
    content = record.read_bytes()
    killed.end()
    record.write_bytes(content)
    run("a", checkpoint={}).start().save(20)


def test_a_copy_of_the_output_folder_takes_over_and_the_original_is_refused(run, tmp_path):
    """Two folders with one run.id: the newer attempt saves."""
    original = run("a").start().save(20)
    copy = run("b")
    shutil.copytree(original.output, copy.output, ignore=shutil.ignore_patterns("run.lock"))
    copy.start("auto").save(40)
    with pytest.raises(Superseded, match="was taken over by"):
        original.save(40)


def test_a_copy_of_the_checkpoints_belongs_to_the_run_that_saved_them(run, shared, tmp_path):
    run("a").start().save(20).end()
    shutil.copytree(shared, tmp_path / "copy")
    storage = {"checkpoint": {"storage": {"path": str(tmp_path / "copy")}}}
    assert run("a", **storage).find("auto").checkpoint.path == tmp_path / "copy" / "update-000020"
    with pytest.raises(FolderRefused, match="another run"):
        run("b", **storage).find("auto")


def test_checkpoints_of_an_earlier_release_are_continued_and_then_owned(run, shared, tmp_path):
    run("a").start().save(20).end()
    (shared / "owner.json").unlink()
    with pytest.raises(
        FolderRefused, match=r"shared holds checkpoints of an earlier run. Continue it with --resume auto"
    ):
        run("b").find()
    elsewhere = shutil.copytree(shared / "update-000020", tmp_path / "kept" / "update-000020")
    with pytest.raises(FolderRefused, match="shared holds checkpoints of an earlier run"):
        run("b").find(elsewhere)
    run("b").start("auto").save(40).end()
    with pytest.raises(FolderRefused, match="another run"):
        run("c").find("auto")


def test_checkpoints_without_a_manifest_are_taken_as_they_are(run, shared):
    """A release before wrote none."""
    run("a").start().save(20).end()
    contents = shared / "update-000020" / "contents.json"
    (shared / "update-000020" / "manifest.yaml").unlink()
    contents.write_text(
        json.dumps({key: size for key, size in json.loads(contents.read_text()).items() if "yaml" not in key})
    )
    (shared / "owner.json").unlink()
    assert run("b", seed=1).find("auto").checkpoint.progress.update == 20


def test_a_checkpoint_of_a_run_with_another_manifest_is_refused_with_every_field(run, tmp_path, shared):
    run("a").start().save(20).end()
    storage = {"checkpoint": {"storage": {"path": str(tmp_path / "own")}}}
    other = run("b", **storage, **{"seed": 3, "model.source.random.hiddenSize": 48, "train.updates": 9})
    with pytest.raises(FolderRefused) as refused:
        other.find(shared / "update-000020")
    assert str(refused.value).splitlines()[:3] == [
        f"checkpoint {shared}/update-000020 is of a run with another manifest:",
        "  spec.seed: 0 there, 3 here",
        "  spec.model.source.random.hiddenSize: 32 there, 48 here",
    ]
    assert "leave --resume out and name another folder in spec.checkpoint.storage.path" in str(refused.value)
    assert run("c", **storage, **{"train.updates": 9}).find(shared / "update-000020").checkpoint is not None


def test_the_folder_of_the_model_may_be_elsewhere_on_another_machine(run, shared, tmp_path):
    def model(path):
        return {"model": {"name": "m", "source": {"path": str(path)}}}

    run("a", **model("models/m")).start().save(20).end()
    (shared / "owner.json").unlink()
    for same in ("models/m", "./models/m", "../models/m", tmp_path / "manifests" / "a" / "models" / "m"):
        assert run("b", **model(same)).find("auto").checkpoint is not None
    for other in ("models/n", "n/m", "/models/m"):
        with pytest.raises(FolderRefused, match=r"  spec.model.source.path: .*/a/models/m there, /.* here"):
            run("b", **model(other)).find("auto")


def test_pods_of_one_training_share_their_folder_however_often_they_start(run, shared):
    """Each attempt has an output folder of its own where only the checkpoints are on a volume."""
    run("pod-1", title="math", in_cluster=True).start("auto").save(20)
    zombie = run("pod-2", title="math", in_cluster=True).start("auto").save(40)
    assert zombie.job.resume.progress.update == 20
    newest = run("pod-3", title="math", in_cluster=True).start("auto")
    assert newest.job.resume.progress.update == 40
    with pytest.raises(Superseded, match="was taken over by default/math"):
        zombie.save(60)
    newest.save(60)


def test_all_attempts_of_a_run_publish_into_the_same_folder_which_no_other_run_has(run, tmp_path):
    publishing = {"publication": {"transport": "Folder", "folder": str(tmp_path / "publications")}}
    attempts = [run(f"pod-{number}", title="math", in_cluster=True, **publishing).start("auto") for number in (1, 2)]
    folder = tmp_path / "publications" / "default" / "math"
    assert [attempt.job.publications for attempt in attempts] == [folder, folder]
    assert run("local", **publishing, checkpoint={}).start().job.publications.parent == tmp_path / "publications"
    assert run("other", checkpoint={}).start().job.publications is None


def test_pods_of_two_trainings_do_not_share_a_folder(run, shared):
    run("pod-1", title="math", in_cluster=True).start("auto").save(20)
    with pytest.raises(FolderRefused) as refused:
        run("pod-2", title="code", in_cluster=True).find("auto")
    message = str(refused.value)
    assert f"{shared} is the folder of another run, default/math (" in message
    assert message.endswith("Name another folder in spec.checkpoint.storage")


def test_a_training_that_is_created_again_with_another_manifest_is_refused_and_loses_nothing(run, shared):
    run("pod-1", title="math", in_cluster=True).start("auto").save(20)
    with pytest.raises(
        FolderRefused, match=r"spec.seed: 0 there, 5 here\n.* For a new training, name another folder in"
    ):
        run("pod-2", title="math", in_cluster=True, seed=5).find("auto")
    assert saved(shared) == ["update-000020"]


def test_pods_without_storage_save_nothing(write, tmp_path):
    start = Run(write(tmp_path), tmp_path / "out", in_cluster=True).find("auto")
    assert (start.checkpoint, start.claim) == (None, None)


@pytest.mark.parametrize(
    ("place", "problem"),
    [
        ("file", "file is a file; name a folder"),
        ("file/sub", "file/sub: .*/file is a file; name a folder"),
        ("link", "link is a link to nothing; name a folder"),
        ("/proc/qwen35", r"/proc/qwen35: /proc cannot be written \(.+\); name another folder"),
    ],
)
def test_storage_that_can_never_be_written_is_refused(run, write, tmp_path, place, problem):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    storage = {"checkpoint": {"storage": {"path": str(tmp_path / place)}}}
    with pytest.raises(FolderRefused, match=f"spec.checkpoint.storage.path .*{problem}"):
        run("a", **storage).find()


def test_a_record_that_cannot_be_read_is_named_with_what_to_do(run, shared):
    run("a").start().save(20).end()
    for content in ("", "[]", '{"run": "x"}', "\x00"):
        (shared / "owner.json").write_text(content)
        with pytest.raises(FolderRefused, match=r"owner.json does not say whose folder this is .* Delete it if no"):
            run("a").find("auto")


def test_a_disk_that_cannot_be_read_now_deletes_nothing(run, shared, monkeypatch):
    """The operator tries again: such an error passes."""
    run("a").start().save(20).end()
    (shared / "owner.json").unlink()
    (shared / "owner.json").mkdir()  # read as root, permissions would keep nothing away
    with pytest.raises(CheckpointError, match=r"shared cannot be read: Is a directory$"):
        run("a").find("auto")


def test_auto_does_not_start_from_scratch_where_the_run_has_saved_elsewhere(run, shared, tmp_path):
    first = run("a").start().save(20).end()
    record = CheckpointRecord(update=20, version=20, time=1.0, path=str(shared / "update-000020"), seconds=1.0)
    with Recorder(RunFolder(first.output).metrics, []) as recorder:
        recorder.append(record)
    storage = {"checkpoint": {"storage": {"path": str(tmp_path / "new")}}}
    with pytest.raises(
        CheckpointError, match=r"new holds no checkpoint, and this run saved .*shared/update-000020 last"
    ):
        run("a", **storage).find("auto")
    assert run("a", **storage).find(shared / "update-000020").checkpoint.progress.update == 20


@pytest.mark.parametrize("written", ["link", "shared/../shared"])
def test_a_folder_of_an_earlier_release_is_continued_by_any_of_its_names(run, shared, tmp_path, written):
    run("a").start().save(20).end()
    (shared / "owner.json").unlink()
    (tmp_path / "link").symlink_to(shared)
    storage = {"checkpoint": {"storage": {"path": str(tmp_path / written)}}}
    assert run("a", **storage).find("auto").checkpoint.progress.update == 20


def test_a_run_that_saves_while_another_takes_its_folder_over_keeps_what_it_saved(run, shared):
    going = run("a").start().save(20)
    start = run("b").find(shared / "update-000020")
    going.save(40)
    with pytest.raises(FolderRefused, match=r"a run has saved into .*shared meanwhile"):
        run("b").go_on(start, shared / "update-000020")
    going.save(60)
    assert saved(shared) == ["update-000040", "update-000060"]


def test_an_attempt_that_lost_the_folder_while_it_saved_deletes_nothing_of_the_next(run, shared, monkeypatch):
    """A node that was cut off between the rename and the deletion of older checkpoints."""
    old = run("pod-1", title="math", in_cluster=True).start("auto").save(20)
    new = run("pod-2", title="math", in_cluster=True)
    flush = checkpoint_store.sync

    def stall(path: Path) -> None:
        flush(path)
        if path == shared:
            monkeypatch.setattr(checkpoint_store, "sync", flush)
            new.start("auto").save(60, 80)

    monkeypatch.setattr(checkpoint_store, "sync", stall)
    with pytest.raises(Superseded, match=r"update-000040 was saved, but this run ends: .* was taken over by"):
        old.save(40)
    assert saved(shared) == ["update-000060", "update-000080"]


def test_an_attempt_that_was_cut_off_deletes_no_later_checkpoint_of_the_next_one(run, shared):
    """It saves update 405 when the next attempt has 420 and 440, which it would have to delete if it still owned the folder."""
    old = run("pod-1", title="math", in_cluster=True).start("auto").save(380, 400)
    new = run("pod-2", title="math", in_cluster=True).start("auto").save(420, 440)
    assert new.job.resume.progress.update == 400
    with pytest.raises(Superseded):
        old.save(405)
    assert saved(shared) == ["update-000420", "update-000440"]
    new.save(460)
    assert saved(shared) == ["update-000440", "update-000460"]


def test_a_run_that_was_killed_twice_before_it_saved_starts_again(run, shared):
    first = run("a").start()
    owner = (shared / "owner.json").read_text()
    first.end()
    (shared / "owner.json").write_text(owner)  # killed, it had left this
    (first.output / "run.id").write_text("another-name\n")  # and the second start ended between the two
    assert run("a").find().checkpoint is None
    assert run("a").find("auto").checkpoint is None
    with pytest.raises(FolderRefused, match="another run"):
        run("b").find()


def test_what_is_not_a_checkpoint_is_not_called_a_damaged_one(run, shared, tmp_path):
    run("a").start().save(20).end()
    for wrong in (tmp_path / "a", shared, ""):
        with pytest.raises(CheckpointError, match=r"is not a checkpoint. Name one like checkpoints/update-000020"):
            run("a").find(wrong)


def test_a_folder_that_somebody_deleted_is_made_again(run, shared):
    going = run("a").start().save(20)
    shutil.rmtree(shared)
    assert saved(going.save(40).job.checkpoints.folder) == ["update-000040"]


def test_a_record_that_somebody_deleted_is_written_again(run, shared):
    going = run("a").start().save(20)
    (shared / "owner.json").unlink()
    going.save(40)
    with pytest.raises(FolderRefused, match="another run"):
        run("b").find("auto")


def test_two_attempts_that_are_both_alive_write_into_folders_of_their_own(run, shared):
    """A node that was cut off goes on to write what it had begun."""
    old = run("pod-1", title="math", in_cluster=True).start("auto").save(20)

    def write_again(folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)  # as PyTorch's writer does
        (folder / "state").write_text("old")

    async def write(folder: Path) -> None:
        write_again(folder)
        new = await asyncio.to_thread(lambda: run("pod-2", title="math", in_cluster=True).start("auto").save(40))
        assert (new.job.resume.progress.update, new.made != folder) == (20, True)
        write_again(folder)

    with pytest.raises(Superseded, match=r"update-000040 was not saved: .* was taken over by"):
        asyncio.run(old.job.checkpoints.save(CheckpointMeta(40, 40, 0, (), 1.0), write))
    assert (shared / "update-000040" / "state").read_text() == "pod-2"
    assert CheckpointStore(shared, 2).latest().progress.update == 40
    new = run("pod-3", title="math", in_cluster=True).start("auto").save(60)
    assert [path.name for path in shared.glob(".*")] == [new.job.checkpoint_epoch.workspace.name]


def _abandoned(run, shared: Path) -> Path:
    """A run with checkpoints 20 and 40 continues from 20, and is lost before it saves. Returns checkpoint 20."""
    run("a").start().save(20, 40).end()
    run("a").start(shared / "update-000020").end()
    return shared / "update-000020"


def test_after_a_crash_before_the_first_save_a_run_continues_its_new_lineage(run, shared):
    twenty = _abandoned(run, shared)
    assert run("a").find("auto").checkpoint.path == twenty
    run("a").start("auto").end()  # lost again
    assert run("a").find("auto").checkpoint.path == twenty


def test_a_crash_between_a_save_and_the_deletion_of_abandoned_checkpoints_does_not_return_to_them(
    run, shared, monkeypatch
):
    twenty = _abandoned(run, shared)
    attempt = run("a").start("auto")
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointStore, "_delete_old", lambda *_: None)
        attempt.save(30).end()
    assert saved(shared) == ["update-000020", "update-000030", "update-000040"]
    assert run("a").find("auto").checkpoint.progress.update == 30
    shutil.rmtree(shared / "update-000030")  # as the advice about a damaged one says
    assert run("a").find("auto").checkpoint.path == twenty


def test_the_first_save_of_the_lineage_ends_the_abandoned_one(run, shared):
    _abandoned(run, shared)
    run("a").start("auto").save(30).end()
    assert saved(shared) == ["update-000020", "update-000030"]
    run("a").start("auto").save(50).end()
    assert run("a").find("auto").checkpoint.progress.update == 50


def test_a_run_that_began_from_a_copy_elsewhere_continues_from_there_until_it_has_saved(run, shared, tmp_path):
    run("a").start().save(20, 40).end()
    copy = shutil.copytree(shared / "update-000020", tmp_path / "kept" / "update-000020")
    run("a").start(copy).end()
    assert run("a").find("auto").checkpoint.path == copy
    shutil.rmtree(copy)
    shutil.rmtree(shared / "update-000020")
    with pytest.raises(
        CheckpointError, match=r"continued from .*/kept/update-000020, which is gone.*--resume, such as"
    ):
        run("a").find("auto")


def test_the_folder_of_a_release_that_recorded_no_start_continues_from_the_newest(run, shared):
    _abandoned(run, shared)
    record = json.loads((shared / "owner.json").read_text())
    del record["start"]
    (shared / "owner.json").write_text(json.dumps(record))
    assert run("a").find("auto").checkpoint.progress.update == 40


def test_checkpoints_that_do_not_name_their_attempt_are_not_of_the_last_one(run, shared):
    """Earlier releases wrote such checkpoints. The last attempt continued from an earlier one, and was lost before its first save."""
    run("a").start().save(20, 40).end()
    for checkpoint in shared.glob("update-*"):
        meta, contents = checkpoint / "progress.json", checkpoint / "contents.json"
        progress = json.loads(meta.read_text())
        del progress["journal"]
        meta.write_text(json.dumps(progress))
        contents.write_text(json.dumps(json.loads(contents.read_text()) | {"progress.json": meta.stat().st_size}))
    run("a").start(shared / "update-000020").end()
    assert run("a").find("auto").checkpoint.progress.update == 20


def test_too_little_memory_for_a_checkpoint_does_not_say_that_the_checkpoint_is_wrong(tmp_path):
    """The operator would not try again with a wrong one, and the user would look for another."""

    class OutOfMemoryError(RuntimeError):
        """As PyTorch's."""

    async def restore(path: Path) -> None:
        raise OutOfMemoryError("CUDA out of memory")

    pool: Any = SimpleNamespace(restore=restore)
    with pytest.raises(MemoryError, match=r"could not be loaded: CUDA out of memory") as raised:
        asyncio.run(driver._restore(pool, tmp_path))
    assert reason_of(raised.value) is FailureReason.OUT_OF_MEMORY

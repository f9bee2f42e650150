"""One attempt owns a folder: whenever another takes it over, the earlier one changes nothing any more, and ends."""

import asyncio
import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen35_trainer import epoch as epoch_module
from qwen35_trainer.epoch import Epoch, FolderRefused, Owner, Superseded, read_owner, take
from qwen35_trainer.manifest import Manifest, load_manifest
from qwen35_trainer.pipeline.commands import SchedulingSnapshot
from qwen35_trainer.pipeline.journal import recover
from qwen35_trainer.pipeline.notices import GroupDispatched
from qwen35_trainer.progress.metrics_file import read_records
from qwen35_trainer.progress.recorder import Recorder
from qwen35_trainer.progress.records import CheckpointRecord, FinishRecord, SpanRecord
from qwen35_trainer.progress.sample_file import Moment, SampleFile, read_samples
from qwen35_trainer.runtime import owner as owner_module
from qwen35_trainer.runtime.checkpoint_store import CheckpointMeta, CheckpointStore, load
from qwen35_trainer.runtime.exporting import Exports
from qwen35_trainer.runtime.folder import RunFolder
from qwen35_trainer.runtime.job import Job, checkpoint_folder
from qwen35_trainer.runtime.journal_file import JournalFile
from qwen35_trainer.runtime.owner import Claim
from qwen35_trainer.runtime.resuming import RunStart, newest_of_lineage
from qwen35_trainer.runtime.run_command import _claimed
from tests.patience import PATIENCE
from tests.profiles import SOAK, examples

from .paused import Attempt, intercept

OWNER = Owner("team/math", "first", "node-1", "/run")
LATER = {
    "a later attempt": ({"QWEN35_ATTEMPT": "1"}, {"QWEN35_ATTEMPT": "2"}),
    "the same attempt in another cluster": ({"RAY_CLUSTER_NAME": "math-1-a"}, {"RAY_CLUSTER_NAME": "math-1-b"}),
}
"""What differs between the variables of the head pods of an old attempt and of the one that takes over."""


@pytest.fixture
def manifest(write, tmp_path) -> Manifest:
    changes = {"checkpoint": {"keep": 3, "storage": {"path": "shared"}}}
    return load_manifest(write(tmp_path / "manifest", changes, name="math"))


class Training:
    """An attempt of a training in a cluster, which does everything with files that `qwen35 run` does, without a model."""

    def __init__(self, manifest: Manifest, place: Path, monkeypatch, variables: dict[str, str]) -> None:
        self._manifest, self._place, self._patch = manifest, place, monkeypatch
        self._variables = {
            "QWEN35_TRAINING_UID": "uid",
            "QWEN35_ATTEMPT": "1",
            "RAY_CLUSTER_NAME": "math-1-a",
        } | variables
        self.folder = RunFolder(place / "run")
        self.shared = checkpoint_folder(self.folder, manifest.spec, place)
        self.start: RunStart | None = None
        self.epoch: Epoch | None = None

    def look(self) -> "Training":
        """Choose where to begin."""
        claim = Claim.on(self.shared)
        newest = newest_of_lineage(self.shared, claim.owner)
        self.start = RunStart(None if newest is None else load(newest), claim, Claim.on(self.folder.root))
        return self

    def train(self, *updates: int) -> None:
        asyncio.run(self._train(*updates))

    async def _train(self, *updates: int) -> None:
        start = self.start or self.look().start
        for name, value in self._variables.items():
            self._patch.setenv(name, value)
        job = Job(self._manifest, self._place, self.folder, start.checkpoint, 0.0, 1, 999, 9, False, 0, in_cluster=True)
        with _claimed(job, start, resume=True) as owned:
            self.epoch = owned.epoch
            await self.write(owned, updates)
        owned.epoch.write(self.folder.summary, json.dumps({"updates": updates}))
        owned.epoch.end()

    async def write(self, job: Job, updates: tuple[int, ...]) -> None:
        journal = JournalFile(self.folder.journal, job.writer)
        samples = SampleFile(self.folder.samples, job.writer)
        store = job.checkpoints
        try:
            with Recorder(self.folder.metrics, [], job.writer) as recorder:
                await journal.begin(SchedulingSnapshot(), job.attempt)
                for number, update in enumerate(updates):
                    journal.add(GroupDispatched(number, number))
                    await journal.flush()
                    recorder.append(SpanRecord(lane="train-0", kind="train", start=update, end=update + 1))
                    meta = CheckpointMeta(update, 0, update, (), 1.0, journal=job.attempt)
                    path = await store.save(meta, self._write_shards)
                    recorder.append(CheckpointRecord(update=update, version=1, time=1.0, path=str(path), seconds=1.0))
                    samples.add(Moment(kind="trained", update=update, version=1, samples=()))
                    await journal.compact(0)
                exported, problem = await _Exports(asyncio.Event(), 60.0).export(path, 2, store.writer)
                recorder.append(FinishRecord(outcome="Succeeded", message=problem or str(exported), time=1.0))
        finally:
            samples.close()
            await journal.close()

    async def _write_shards(self, folder: Path) -> None:
        (folder / "state").mkdir(parents=True, exist_ok=True)  # as PyTorch's writer does, even if the folder is gone
        (folder / "state" / "shard").write_text(folder.name)

    def files(self) -> dict[str, bytes]:
        """All files of the folders, except those in workspaces, which nobody reads."""
        paths = [path for path in self._place.rglob("*") if path.is_file()]
        names = {str(path.relative_to(self._place)): path for path in paths}
        return {name: path.read_bytes() for name, path in names.items() if "/.epoch-" not in name}


class _Exports(Exports):
    async def _run(self, checkpoint: Path, output: Path) -> str:
        try:
            shutil.copytree(checkpoint, output)
        except OSError as error:
            return str(error)
        return ""


def operations_of(manifest: Manifest, place: Path, patch) -> list[str]:
    """What an attempt does that nobody disturbs."""
    attempt = Attempt("alone", lambda: Training(manifest, place, patch, {}).look().train(20, 40, 60, 80))
    attempt.finish()
    if attempt.error is not None:
        raise attempt.error
    return attempt.operations


@pytest.mark.parametrize("who", LATER)
def test_wherever_an_old_attempt_stops_it_changes_nothing_of_the_next_one_and_ends(
    manifest, tmp_path, monkeypatch, who
):
    """It stops before each of its operations in turn: the next one takes over, trains, and then the old one continues."""
    intercept(monkeypatch)
    operations = operations_of(manifest, tmp_path / "alone", monkeypatch)
    assert len(operations) > 100
    survived, stride = (
        [],
        1 if SOAK or who == "a later attempt" else 4,
    )  # the second case differs in its first operations
    for count, operation in enumerate(operations):
        if count % stride and "owner.json" not in operation:
            continue
        place = tmp_path / f"{count}"
        variables, later = LATER[who]
        old = Training(manifest, place, monkeypatch, variables).look()
        attempt = Attempt("old", lambda old=old: old.train(20, 40, 60, 80)).run_to(count)
        new = Training(manifest, place, monkeypatch, later)
        new.train(400, 420, 440)
        before = new.files()
        attempt.finish()
        ended = f"the old attempt stopped before operation {count}, {operation}, and ended with {attempt.error!r}"
        assert new.files() == before, ended
        if attempt.error is None:
            survived.append(operation)
        else:
            assert isinstance(attempt.error, Superseded), ended
            assert attempt.error.by_later_attempt == (who == "a later attempt") or "being taken over" in str(
                attempt.error
            )
        assert recover(new.folder.journal.read_bytes(), 0).position == 3, ended
        saved = [path.name for path in CheckpointStore(new.shared, 3).complete]
        assert saved == ["update-000400", "update-000420", "update-000440"], ended
        newest = [record.update for record in read_records(new.folder.metrics).of(CheckpointRecord)][-3:]
        assert newest == [400, 420, 440], ended
        assert [moment.update for moment in read_samples(new.folder.samples)][-3:] == [400, 420, 440], ended
        shutil.rmtree(place)
    # After its last write of a file that others read, nothing is left that could fail.
    assert len(survived) < 10, survived


class Shelf:
    """A folder in which attempts put books, and from which they take those of others."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.epochs: dict[str, int] = {}
        """Name of an attempt → the epoch that it has begun."""

    def books(self) -> set[str]:
        return {path.name for path in self.folder.glob("book-*")}

    def work(self, name: str) -> None:
        epoch = take(self.folder, replace(OWNER, attempt=name), read_owner(self.folder))
        self.epochs[name] = epoch.owner.epoch
        for number in range(3):
            made = epoch.place("book")
            made.mkdir()
            (made / "page").write_text(name)
            epoch.publish(made, self.folder / f"book-{name}-{number}")
            for book in self.books() - {f"book-{name}-{number}"}:
                epoch.delete(self.folder / book)


@settings(max_examples=examples(40))
@given(bursts=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 30)), max_size=15))
def test_however_attempts_take_turns_only_the_newest_owner_changes_anything(bursts, tmp_path_factory):
    """Each turn is one operation on files. bursts: which attempt has how many turns in a row."""
    with pytest.MonkeyPatch.context() as patch:
        intercept(patch)
        shelf = Shelf(tmp_path_factory.mktemp("shelf"))
        attempts = [Attempt(name, lambda name=name: shelf.work(name)) for name in "abc"]
        owners = []
        for turn in [attempt for attempt, length in bursts for _ in range(length)]:
            books, begun = shelf.books(), dict(shelf.epochs)
            attempts[turn].step()
            if shelf.books() != books:
                assert begun[attempts[turn].name] == max(begun.values())
            owners += [owner.epoch for owner in [read_owner(shelf.folder)] if owner is not None]
        for attempt in attempts:
            attempt.finish()
        assert owners == sorted(owners), "the record never names an earlier epoch again"
        assert all(attempt.error is None or isinstance(attempt.error, Superseded) for attempt in attempts)
        assert not all(attempt.error for attempt in attempts), "one of them is left"


def begin(folder: Path, name: str = "first", **fields) -> Epoch:
    return take(folder, replace(OWNER, attempt=name, **fields), read_owner(folder))


def test_each_epoch_has_the_next_number_and_its_owner_is_recorded(tmp_path):
    for number, name in enumerate(("a", "b", "c"), 1):
        epoch = begin(tmp_path, name)
        assert read_owner(tmp_path) == epoch.owner == replace(OWNER, attempt=name, epoch=number)
        assert [path.name for path in tmp_path.glob(".*")] == [epoch.workspace.name], "earlier workspaces are gone"


def test_while_the_workspace_of_an_ended_epoch_is_deleted_nothing_in_it_can_be_published(tmp_path, monkeypatch):
    """A thread may be stuck in the storage, and continue only then."""
    epoch = begin(tmp_path)
    made = epoch.place("update-000001")
    made.mkdir()
    problems = []

    def deleting(path: Path, **_: object) -> None:
        try:
            epoch.publish(made, tmp_path / "update-000001")
        except (OSError, Superseded) as error:
            problems.append(error)

    monkeypatch.setattr(shutil, "rmtree", deleting)
    epoch.end()
    assert problems
    assert not (tmp_path / "update-000001").exists()


def test_an_earlier_attempt_that_is_late_does_not_take_the_folder_from_a_later_one(tmp_path):
    begin(tmp_path, "new", training="uid", number=2)
    with pytest.raises(Superseded) as raised:
        begin(tmp_path, "old", training="uid", number=1)
    assert raised.value.by_later_attempt
    assert read_owner(tmp_path).attempt == "new"
    assert begin(tmp_path, "again", training="another uid", number=1).owner.epoch == 2, "a training of the same name"


async def test_what_an_attempt_saves_while_the_next_one_starts_is_what_the_one_after_that_begins_from(tmp_path):
    old = begin(tmp_path, "old", training="uid", number=1)

    async def save(update: int) -> None:
        meta = CheckpointMeta(update, 0, update, (), 1.0, journal="old")
        await CheckpointStore(tmp_path, 3, epoch=old).save(meta, _write_nothing)

    await save(20)
    seen = Claim.on(tmp_path)
    await save(40)
    new = replace(OWNER, attempt="new", training="uid", number=2, start="update-000020")
    with pytest.raises(Superseded, match=r"has the checkpoints update-000020, update-000040 now"):
        seen.take(new)
    with pytest.raises(Superseded):
        await save(60)
    assert newest_of_lineage(tmp_path, read_owner(tmp_path)) == tmp_path / "update-000040"


def test_a_claim_ends_in_time_although_its_folder_does_not_answer_any_more(tmp_path, monkeypatch, caplog):
    """A daemon thread waits for the folder, and does not hold up the process."""
    answers, began = threading.Event(), threading.Event()

    def end(epoch: Epoch, **_: object) -> None:
        began.set()
        answers.wait(PATIENCE)

    monkeypatch.setattr(owner_module, "END_SECONDS", 0.05)
    monkeypatch.setattr(Epoch, "end", end)
    with Claim.on(tmp_path).held(OWNER):
        pass
    assert began.is_set()
    assert f"{tmp_path} did not answer within 0.05 s" in caplog.text
    answers.set()


async def _write_nothing(folder: Path) -> None:
    """Write no files of train ranks."""


def test_a_folder_of_an_earlier_release_is_taken(tmp_path):
    """It wrote neither an epoch nor the number of the attempt, and prepared checkpoints next to the others."""
    (tmp_path / "owner.json").write_text(json.dumps({"run": "r", "attempt": "a", "host": "h", "output": "o"}))
    (tmp_path / ".update-000020.a.partial" / "state").mkdir(parents=True)
    assert read_owner(tmp_path) == Owner("r", "a", "h", "o")
    epoch = begin(tmp_path)
    assert epoch.owner.epoch == 1
    assert [path.name for path in tmp_path.glob(".*")] == [epoch.workspace.name], "it can rename none of them now"


def test_an_earlier_release_reads_a_new_record(tmp_path):
    begin(tmp_path)
    record = json.loads((tmp_path / "owner.json").read_text())
    assert {"run", "attempt", "host", "output", "start"} <= record.keys()
    assert all(isinstance(record[name], str) for name in ("run", "attempt", "host", "output", "start"))


def test_what_somebody_deletes_by_hand_is_made_again(tmp_path):
    epoch = begin(tmp_path / "shared")
    (tmp_path / "shared" / "owner.json").unlink()
    epoch.check()
    assert read_owner(tmp_path / "shared") == epoch.owner
    shutil.rmtree(epoch.workspace)
    epoch.write(tmp_path / "shared" / "file", "text")
    shutil.rmtree(tmp_path / "shared")
    epoch.write(tmp_path / "shared" / "file", "text")
    assert read_owner(tmp_path / "shared") == epoch.owner


def test_an_attempt_whose_successor_has_ended_does_not_take_the_folder_back(tmp_path):
    old = begin(tmp_path, "old")
    begin(tmp_path, "new").end(keep_record=False)
    assert read_owner(tmp_path) is None
    with pytest.raises(Superseded, match="was taken over by another attempt, which has ended"):
        old.check()


def test_files_that_a_process_of_this_machine_has_open_on_nfs_hold_up_nobody(tmp_path, monkeypatch):
    """The client renames them instead of deleting them, until they are closed."""
    old = begin(tmp_path, "old")
    (old.workspace / "update-000020").mkdir()
    (old.workspace / "update-000020" / ".nfs0001").touch()
    rmtree = shutil.rmtree

    def all_but_open_files(path, **options):
        if not list(Path(path).rglob(".nfs*")):
            rmtree(path, **options)

    monkeypatch.setattr(shutil, "rmtree", all_but_open_files)
    new = begin(tmp_path, "new")
    with pytest.raises(Superseded):
        old.publish(old.workspace / "update-000020", tmp_path / "update-000020")
    assert not (tmp_path / "update-000020").exists()
    new.check()


def test_an_attempt_that_writes_faster_than_its_workspace_can_be_deleted_keeps_the_folder(tmp_path, monkeypatch):
    old = begin(tmp_path, "old")
    (old.workspace / "file").touch()
    monkeypatch.setattr(epoch_module, "REVOKE_SECONDS", 0.0)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    with pytest.raises(Superseded, match=r"an earlier attempt still writes into .* Delete its pods"):
        begin(tmp_path, "new")
    assert read_owner(tmp_path) == old.owner


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"run": "r", "attempt": "a", "host": "h", "output": "o", "epoch": "x"}']
)
def test_a_damaged_record_is_named(tmp_path, content):
    (tmp_path / "owner.json").write_text(content)
    with pytest.raises(FolderRefused, match=r"owner.json does not say whose folder this is"):
        begin(tmp_path)

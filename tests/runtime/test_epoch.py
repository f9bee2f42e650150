"""One attempt owns a folder: whenever another takes it over, the earlier one changes nothing any more, and ends."""

import asyncio
import json
import re
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
from qwen35_trainer.runtime.checkpoint_store import CheckpointMeta, CheckpointStore, load
from qwen35_trainer.runtime.exporting import Exports
from qwen35_trainer.runtime.folder import RunFolder
from qwen35_trainer.runtime.job import Job, checkpoint_folder
from qwen35_trainer.runtime.journal_file import JournalFile
from qwen35_trainer.runtime.owner import Claim
from qwen35_trainer.runtime.resuming import RunStart, newest_of_lineage
from qwen35_trainer.runtime.run_command import _claimed

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
        self._variables = {"QWEN35_TRAINING_UID": "uid", "QWEN35_ATTEMPT": "1", "RAY_CLUSTER_NAME": "math-1-a"} | variables
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
    """It stops before each of its operations in turn: the next one takes over, trains, and then the old one goes on."""
    intercept(monkeypatch)
    operations = operations_of(manifest, tmp_path / "alone", monkeypatch)
    assert len(operations) > 100
    survived = []
    for count, operation in enumerate(operations):
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
            assert attempt.error.by_later_attempt == (who == "a later attempt") or "being taken over" in str(attempt.error)
        assert recover(new.folder.journal.read_bytes(), 0).position == 3, ended
        saved = [path.name for path in CheckpointStore(new.shared, 3).complete]
        assert saved == ["update-000400", "update-000420", "update-000440"], ended
        newest = [record.update for record in read_records(new.folder.metrics).of(CheckpointRecord)][-3:]
        assert newest == [400, 420, 440], ended
        assert [moment.update for moment in read_samples(new.folder.samples)][-3:] == [400, 420, 440], ended
        shutil.rmtree(place)
    assert set(survived) <= {"unlink owner.json", "rmdir", "after the check"}, survived

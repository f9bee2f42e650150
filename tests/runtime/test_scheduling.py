"""What the coordinator is given to begin with: settings from the manifest, and the place where an earlier attempt stopped."""

import asyncio
import dataclasses
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from qwen35_trainer.failure_reasons import FailureReason, reason_of
from qwen35_trainer.manifest import load_manifest
from qwen35_trainer.pipeline.buffer import MissedDeadlinePolicy
from qwen35_trainer.pipeline.commands import SchedulingSnapshot, TrainGroups
from qwen35_trainer.pipeline.coordinator_settings import CoordinatorSettings
from qwen35_trainer.pipeline.journal import JournalBase, JournalRecord, encode
from qwen35_trainer.pipeline.notices import GroupDispatched, GroupLeft, LeaveReason
from qwen35_trainer.pipeline.window import Window
from qwen35_trainer.runtime.checkpoint_store import CheckpointMeta, SavedCheckpoint, load
from qwen35_trainer.runtime.driver import _kl_coefficient
from qwen35_trainer.runtime.folder import RunFolder
from qwen35_trainer.runtime.job import Job, coordinator_settings, replica_slots, scheduling_start
from qwen35_trainer.runtime.journal_file import JournalNotRead


@pytest.fixture
def settings(write, tmp_path) -> Callable[..., CoordinatorSettings]:
    """settings({"mode": "Colocated"}, updates=7) is what a manifest with these changes means."""

    def of(changes: dict[str, object], updates: int = 8) -> CoordinatorSettings:
        return coordinator_settings(load_manifest(write(tmp_path, changes)).spec, updates)

    return of


def test_a_manifest_of_asynchronous_training_in_full(settings):
    knobs = {
        "stalenessThreshold": 0.5,
        "maxVersionLag": 3,
        "onMissedDeadline": "MaskTokens",
        "batchesPerPublication": 4,
    }
    lane = {"nodes": 1, "tensorParallel": 2, "afterTokens": 2}
    chosen = settings(
        {
            "async": knobs | {"updatesPerBatch": 2, "adaptiveDispatch": True, "partialRollout": False},
            "rollout.nodes": 3,
            "rollout.stragglerLane": lane,
            "accelerator.devicesPerNode": 2,
            "train.batch.microBatchSequences": 8,
            "algorithm.dynamicSampling": True,
        },
        updates=7,
    )
    assert chosen == CoordinatorSettings(
        window=Window(groups_per_batch=8, batches_per_version=4, staleness_threshold=0.5, max_version_lag=3),
        group_size=4,
        batches=4,  # of 2 updates, the last of 1
        on_missed_deadline=MissedDeadlinePolicy.MASK_TOKENS,
        partial_rollout=False,
        dynamic_sampling=True,
        lane_after=2,
        max_response_tokens=3,
        adaptive=True,
    )


def test_what_a_manifest_leaves_out_keeps_everything_and_waits(settings):
    assert settings({"async": {"stalenessThreshold": 1.0, "maxVersionLag": 2}}) == CoordinatorSettings(
        window=Window(4, 1, 1.0, 2), group_size=4, batches=8, max_response_tokens=3
    )


def test_with_a_threshold_of_nothing_each_sequence_comes_from_one_version(settings):
    chosen = settings({"async": {"stalenessThreshold": 0, "maxVersionLag": 2}})
    assert (chosen.window, chosen.partial_rollout, chosen.taking_turns) == (Window(4, 1, 0, 2), False, False)


def test_colocated_pools_take_turns_and_nothing_runs_ahead(settings):
    chosen = settings({"mode": "Colocated", "async": {"batchesPerPublication": 2}})
    assert chosen == CoordinatorSettings(
        window=Window(4, 2, 0.0, 0),
        group_size=4,
        batches=8,
        partial_rollout=False,
        taking_turns=True,
        max_response_tokens=3,
    )


@pytest.mark.parametrize(("sequences", "slots"), [(1, 1), (4, 5), (64, 80)])
def test_a_few_sequences_wait_in_a_replicas_own_queue(write, tmp_path, sequences, slots):
    spec = load_manifest(write(tmp_path, {"rollout.maxSequencesPerReplica": sequences})).spec
    assert replica_slots(spec) == slots


@pytest.mark.parametrize(
    ("saved", "first", "now"),
    [(0.03, 0.02, 0.03), (0.03, 0.5, 0.02), (0.03, None, 0.03), (None, None, 0.02)],
    ids=["the same manifest", "a changed coefficient", "an old release", "it was fixed"],
)
def test_a_kl_coefficient_continues_unless_the_manifest_begins_with_another_one(write, tmp_path, saved, first, now):
    adaptive = {"placement": "Loss", "coefficient": 0.02, "adaptive": {"target": 0.1, "horizon": 50}}
    spec = load_manifest(write(tmp_path, {"algorithm.kl": adaptive})).spec
    progress = CheckpointMeta(4, 4, 16, (), 1.0, kl_coefficient=saved, kl_first=first)
    job = SimpleNamespace(spec=spec, resume=SimpleNamespace(progress=progress))
    assert _kl_coefficient(job) == now


@pytest.fixture
def job(write, tmp_path) -> Job:
    """A run from the beginning."""
    return Job(
        manifest=load_manifest(write(tmp_path)),
        base=tmp_path,
        folder=RunFolder(tmp_path / "out"),
        resume=None,
        started=0.0,
        threads=1,
        updates_total=9,
        vocabulary=9,
        pictures=False,
        end_token=0,
    )


def save(job: Job, start: SchedulingSnapshot) -> SavedCheckpoint:
    """A checkpoint of that place, one update a batch."""

    async def write(folder: Path) -> None:
        (folder / "state").write_text("weights")

    progress = CheckpointMeta(start.batch, start.batch, start.position, start.pending, 1.0, start.group, ATTEMPT)
    return load(asyncio.run(job.checkpoints.save(progress, write)))


def resumed(job: Job, checkpoint: SavedCheckpoint) -> SchedulingSnapshot:
    return scheduling_start(dataclasses.replace(job, resume=checkpoint))


def keep(job: Job, *records: JournalRecord) -> None:
    """The journal that an earlier attempt left."""
    job.folder.root.mkdir(exist_ok=True)
    job.folder.journal.write_bytes(b"".join(map(encode, records)))


ATTEMPT = "5a5a5a5a"
EARLIER = SchedulingSnapshot(batch=1, position=6, pending=(2, 4), group=6)
SAVED = SchedulingSnapshot(batch=2, position=8, pending=(4, 7), group=8)
JOURNAL = (
    JournalBase(EARLIER, held=(2, 4), attempt=ATTEMPT),
    GroupDispatched(6, 6),
    GroupDispatched(7, 7),
    TrainGroups(1, 0, (2, 6)),
    GroupDispatched(8, 8),
    GroupLeft(4, 4, LeaveReason.FILTERED),
    GroupLeft(7, 7, LeaveReason.DISCARDED),
    GroupDispatched(9, 7),
)


def test_a_run_that_resumes_nothing_begins_at_the_beginning(job):
    keep(job, *JOURNAL)
    assert scheduling_start(job) == SchedulingSnapshot()


def test_the_journal_shows_what_happened_since_the_newest_checkpoint(job):
    keep(job, *JOURNAL)
    # Prompt 4 has left for good meanwhile; 7 was given back, and 8 was dispatched.
    assert resumed(job, save(job, SAVED)) == SchedulingSnapshot(batch=2, position=9, pending=(8, 7), group=10)


def test_batches_that_trained_after_the_checkpoint_train_again(job):
    keep(job, *JOURNAL, TrainGroups(2, 0, (8, 9)), GroupDispatched(10, 9))
    assert resumed(job, save(job, SAVED)) == SchedulingSnapshot(batch=2, position=9, pending=(8, 7), group=10)


def test_a_line_that_was_torn_by_the_crash_never_happened(job):
    keep(job, *JOURNAL)
    job.folder.journal.write_bytes(job.folder.journal.read_bytes()[:-3])
    assert resumed(job, save(job, SAVED)) == SchedulingSnapshot(batch=2, position=9, pending=(8, 7), group=9)


def test_a_checkpoint_older_than_the_journal_goes_by_what_it_holds_itself(job):
    earlier = save(job, EARLIER)
    save(job, SAVED)
    keep(job, JournalBase(SAVED, attempt=ATTEMPT), GroupDispatched(8, 8))
    assert resumed(job, earlier) == EARLIER


def test_an_older_checkpoint_can_be_named_when_the_newest_is_damaged(job):
    earlier, newest = save(job, EARLIER), save(job, SAVED)
    (newest.path / "state").unlink()
    keep(job, JournalBase(SAVED, attempt=ATTEMPT))
    assert resumed(job, earlier) == EARLIER


def test_the_journal_of_a_later_attempt_says_nothing_of_what_an_earlier_one_saved(job):
    """Resumed from an older checkpoint and lost before it saved: the newest checkpoint has another history."""
    newest = save(job, SAVED)
    keep(job, dataclasses.replace(JOURNAL[0], attempt="later"), *JOURNAL[1:])
    assert resumed(job, newest) == SAVED


def test_the_journal_of_a_run_says_nothing_of_another_runs_checkpoint(job, tmp_path):
    other = dataclasses.replace(job, folder=RunFolder(tmp_path / "other"))
    keep(job, JournalBase(EARLIER, held=(2, 4), attempt="other"), *JOURNAL[1:])
    assert resumed(job, save(other, SAVED)) == SAVED


def test_without_a_journal_the_checkpoint_is_all_there_is(job):
    assert resumed(job, save(job, SAVED)) == SAVED


def test_with_a_damaged_journal_the_run_continues_from_the_checkpoint_and_the_log_names_the_line(job, caplog):
    keep(job, *JOURNAL)
    checkpoint = save(job, SAVED)
    assert resumed(job, checkpoint) != SAVED, "the journal adds to the checkpoint while it is whole"
    lines = job.folder.journal.read_bytes().splitlines(keepends=True)
    lines[5] = b"x" + lines[5][1:]
    job.folder.journal.write_bytes(b"".join(lines))
    assert resumed(job, checkpoint) == SAVED
    assert "line 6 of the journal: it cannot be read" in caplog.text
    assert f"the run continues from the position in checkpoint {checkpoint.path}" in caplog.text


def test_with_a_journal_of_another_release_the_run_continues_from_the_checkpoint(job, caplog):
    keep(job, *JOURNAL)
    checkpoint = save(job, SAVED)
    text = b'{"v":2}'
    job.folder.journal.write_bytes(b"%08x %s\n" % (zlib.crc32(text), text))
    assert resumed(job, checkpoint) == SAVED
    assert "it has format 2, and this release reads 1" in caplog.text


def test_a_journal_that_cannot_be_read_ends_the_run_as_storage_that_failed(job):
    job.folder.journal.mkdir(parents=True)  # root may read every file
    with pytest.raises(
        JournalNotRead, match=r"journal .* was not read: Is a directory\. Make the file readable"
    ) as error:
        resumed(job, save(job, SAVED))
    assert reason_of(error.value) is FailureReason.STORAGE_FAILED

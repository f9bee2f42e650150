"""The driver dies at any byte of its journal. Whatever the weights have trained, each prompt has one turn in them."""

import itertools
import random
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import settings as drawing
from hypothesis import strategies as st

from qwen35_trainer.pipeline import events as on
from qwen35_trainer.pipeline.buffer import MissedDeadlinePolicy
from qwen35_trainer.pipeline.commands import SchedulingSnapshot, TrainGroups
from qwen35_trainer.pipeline.coordinator_settings import CoordinatorSettings
from qwen35_trainer.pipeline.journal import JOURNALLED_ACTIONS, JournalBase, JournalDamaged, compact, encode, recover
from qwen35_trainer.pipeline.notices import GroupDispatched, GroupLeft, LeaveReason
from qwen35_trainer.pipeline.requests import TakeCheckpoint
from qwen35_trainer.pipeline.window import Window
from tests.pipeline.world import World
from tests.profiles import SOAK, examples

BEGINNING = SchedulingSnapshot(1, 4, (1, 3), 10)
TRAINED_BEFORE = (0, 2)
SEEDS = range(100 if SOAK else 3)


@dataclass
class File:
    """A journal from its beginning until it is compacted: `begin` records had been written before its first line."""

    data: bytes
    begin: int
    batch: int


class Run(World):
    """A run with its journal: one file after the other, each compacted from the one before, after a checkpoint."""

    def __init__(self, settings, start):
        super().__init__(settings, start)
        self.start = start
        self.files = [File(encode(JournalBase(start)), 0, start.batch)]
        self.records = []
        self.checkpoint = None
        self.saves_during_training = {}  # (batch saved, batch training meanwhile) → what a crash then leaves

    def send(self, event):
        done = len(self.log)
        super().send(event)
        for action in self.log[done:]:
            if isinstance(action, JOURNALLED_ACTIONS):
                self.records.append(action)
                self.files[-1].data += encode(action)
        if self.saving is not None and self.training is not None:
            complete = self.saved[-1].batch if self.saved else self.start.batch
            crash = self.files[-1].data, complete, len(self.records)
            self.saves_during_training.setdefault((self.saving.snapshot.batch, self.training.batch), crash)

    def save(self):
        index = next(place for place, action in enumerate(self.log) if action is self.saving)
        before = [action for action in self.log[:index] if isinstance(action, JOURNALLED_ACTIONS)]
        snapshot = self.saving.snapshot
        assert recover(journal(JournalBase(self.start), *before), snapshot.batch) == snapshot
        self.checkpoint = snapshot.batch
        super().save()

    def compact(self):
        data = compact(self.files[-1].data, self.checkpoint)
        self.files.append(File(data, len(lineage(self.records, self.checkpoint)), self.checkpoint))
        self.checkpoint = None


def journal(*records):
    return b"".join(encode(record) for record in records)


def lineage(records, batch):
    """The records that led to weights which have trained all batches before `batch`."""
    take = (index for index, record in enumerate(records) if isinstance(record, TrainGroups) and record.batch == batch)
    return records[: next(take, len(records))]


def done(records):
    """Positions that have trained, or left for good; each as often as it did."""
    positions, turns = {}, []
    for record in records:
        match record:
            case GroupDispatched(group, position):
                positions[group] = position
            case TrainGroups(_, _, groups):
                turns += [positions[group] for group in groups]
            case GroupLeft(_, position, reason) if reason is not LeaveReason.DISCARDED:
                turns.append(position)
    return turns


def moves(world, chance):
    """What may happen now, with its odds."""
    if world.running:
        # One group in three is slow, so that deadlines are missed.
        quick = [name for name in world.running if name[0] % 3] if chance.random() < 0.95 else []
        name = chance.choice(quick or world.running)
        yield 6, lambda: world.finish(name)
        yield 0.2, lambda: world.send(on.GroupFailed(name[0]))
    if world.unscored:
        yield 5, lambda: world.score(chance.choice(list(world.unscored)), signal=chance.random() < 0.8)
    if world.training is not None:
        yield 3, world.train
    if world.saving is not None:
        yield 2, world.save
    else:
        yield 0.5, lambda: world.send(TakeCheckpoint())
    if world.checkpoint is not None:
        yield 1, world.compact
    if len(world.replicas) < 3:
        yield 1, lambda: world.join(chance.randint(1, 3), newest=chance.random() < 0.5)
    for number in world.replicas:
        yield 1, lambda number=number: world.load(number)
        yield 1, lambda number=number: (world.generate(number, 1), world.tell(number))
        yield 0.2, lambda number=number: world.lose(number, chance.randint(0, 2))


def live(world, chance, steps):
    """Take `steps` random steps, or until it ends."""
    world.join(3)
    for _ in range(steps):
        if world.ended:
            break
        odds, acts = zip(*moves(world, chance), strict=True)
        chance.choices(acts, odds)[0]()


def small(policy, batches_per_version, *, batches=12):
    window = Window(2, batches_per_version, staleness_threshold=1, max_version_lag=1)
    return CoordinatorSettings(window, group_size=2, batches=batches, on_missed_deadline=policy, dynamic_sampling=True)


def go_on(settings, start, before, seed):
    """A new coordinator, some time at random and then straight to the end. `before`: what is done in this lineage."""
    world = Run(settings, start)
    live(world, random.Random(seed), 20)
    world.play()
    end = world.coordinator.snapshot
    assert end.batch == settings.batches
    assert Counter([*before, *done(world.records), *end.pending]) == Counter(range(end.position))


def cuts(data):
    """After each line: how many there are, and the cuts that leave these."""
    ends = [at + 1 for at, byte in enumerate(data) if byte == ord("\n")]
    for lines, (end, following) in enumerate(itertools.pairwise([*ends, len(data) + 1]), 1):
        yield lines, range(end, following)


def crashes(run):
    """Every byte at which a file may end, and every batch at which the weights may then be, as long as that differs:
    where to continue from, and the records that led there.
    """
    for file in run.files:
        for cut in range(file.data.index(b"\n") + 1):
            with pytest.raises(JournalDamaged, match="no base record"):
                recover(file.data[:cut], file.batch)
        for lines, places in cuts(file.data):
            records = run.records[: file.begin + lines - 1]
            newest = max((record.batch + 1 for record in records if isinstance(record, TrainGroups)), default=0)
            for batch in range(file.batch, max(file.batch, newest) + 1):
                start = recover(file.data[: places[0]], batch)
                assert all(recover(file.data[:cut], batch) == start for cut in places)
                assert start.batch == batch
                yield start, lineage(records, batch)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("batches_per_version", [1, 2])
@pytest.mark.parametrize("policy", MissedDeadlinePolicy)
def test_cut_at_every_byte_each_prompt_has_one_turn(policy, batches_per_version, seed):
    settings = small(policy, batches_per_version)
    run = Run(settings, BEGINNING)
    live(run, random.Random(seed), 400)
    run.play()
    seen = set()
    for start, records in crashes(run):
        if (start, len(records)) not in seen:
            seen.add((start, len(records)))
            go_on(settings, start, [*TRAINED_BEFORE, *done(records)], seed=len(seen))
    assert len(seen) > len(run.records) / 2


def test_the_recorded_runs_have_everything_that_can_happen():
    reasons, files = Counter(), 0
    for policy, batches_per_version, seed in itertools.product(MissedDeadlinePolicy, (1, 2), range(6)):
        run = Run(small(policy, batches_per_version), BEGINNING)
        live(run, random.Random(seed), 400)
        run.play()
        reasons += Counter(record.reason for record in run.records if isinstance(record, GroupLeft))
        files += len(run.files)
    assert min(reasons[each] for each in (LeaveReason.FILTERED, LeaveReason.FAILED, LeaveReason.DISCARDED)) >= 10, (
        reasons
    )
    assert files > 2 * 24, "runs are compacted more than once"


@pytest.mark.parametrize("policy", MissedDeadlinePolicy)
def test_killed_during_a_save_while_batches_train_each_prompt_has_one_turn(policy):
    """The weights are then those of the checkpoint before, and the journal has not been compacted past it."""
    settings, longest = small(policy, 2), 0
    for seed in range(8):
        run = Run(settings, BEGINNING)
        live(run, random.Random(seed), 400)
        for (saving, training), (data, complete, written) in run.saves_during_training.items():
            assert complete <= saving <= training
            longest = max(longest, training - complete)
            start = recover(data, complete)
            assert start.batch == complete
            go_on(settings, start, [*TRAINED_BEFORE, *done(lineage(run.records[:written], complete))], seed)
    assert longest >= 3, "several batches train between one complete checkpoint and the next"


@drawing(max_examples=examples(60))
@given(
    policy=st.sampled_from(MissedDeadlinePolicy),
    batches_per_version=st.integers(1, 3),
    seed=st.integers(0, 2**32),
    crashes=st.lists(st.tuples(st.integers(5, 60), st.floats(0, 1), st.floats(0, 1)), max_size=5),
)
def test_crash_after_crash_each_prompt_has_one_turn(policy, batches_per_version, seed, crashes):
    """Each time the driver continues from its journal, and the journal from there."""
    settings, chance = small(policy, batches_per_version), random.Random(seed)
    start, before = BEGINNING, list(TRAINED_BEFORE)
    for steps, byte, batch in crashes:
        run = Run(settings, start)
        live(run, chance, steps)
        file = run.files[-1]
        first = file.data.index(b"\n") + 1
        data = file.data[: first + round(byte * (len(file.data) - first))]
        records = run.records[: file.begin + data.count(b"\n") - 1]
        trained = sum(isinstance(record, TrainGroups) for record in records)
        at = file.batch + round(batch * (run.start.batch + trained - file.batch))
        start = recover(data, at)
        before += done(lineage(records, at))
    go_on(settings, start, before, seed)


@drawing(max_examples=examples(60))
@given(
    policy=st.sampled_from(MissedDeadlinePolicy), seed=st.integers(0, 2**32), torn=st.integers(0, 30), data=st.data()
)
def test_a_compacted_journal_recovers_the_same_from_there_on(policy, seed, torn, data):
    run = Run(small(policy, 2), BEGINNING)
    live(run, random.Random(seed), 100)
    whole = journal(JournalBase(BEGINNING), *run.records)
    whole = whole[: max(len(encode(JournalBase(BEGINNING))), len(whole) - torn)]
    newest = 1 + whole.count(b'{"t":')
    newest -= not whole.endswith(b"\n") and b'{"t":' in whole.rpartition(b"\n")[2]
    batch = data.draw(st.integers(1, newest))
    compacted = compact(whole, batch)
    for later in range(batch, newest + 1):
        assert recover(compacted, later) == recover(whole, later)
        assert compact(compacted, later) == compact(whole, later)
    for wrong in (batch - 1, newest + 1):
        with pytest.raises(JournalDamaged):
            recover(compacted, wrong)


def test_evaluations_leave_no_record():
    run = Run(small(MissedDeadlinePolicy.WAIT, 1), BEGINNING)
    run.join(4)
    run.evaluate(2)
    run.play()
    assert sum(isinstance(record, TrainGroups) for record in run.records) == 11
    assert recover(run.files[-1].data, 12) == run.coordinator.snapshot

"""The plan by which replicas read a version from each other: everyone gets it, with few readers of each source, whatever is lost."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35_trainer.weights.relay import (
    MAX_FAILED_READS,
    MIN_TRAINER_READERS,
    REPLICA_READERS,
    TRAINER,
    Relay,
    trainer_readers,
    waves,
)

EVENTS = st.lists(st.tuples(st.sampled_from(["add", "load", "fail", "lose"]), st.integers(0, 99)), max_size=80)


class History:
    """A relay and what a cluster would know: which replicas live, and who has the version."""

    def __init__(self, trainer_readers: int, replica_readers: int) -> None:
        self.relay = Relay(trainer_readers, replica_readers)
        self.limits = trainer_readers, replica_readers
        self.alive: set[int] = set()
        self.has: set[int] = set()
        self.failures: Counter[int] = Counter()
        self.reads_from_trainer = 0

    def add(self, replica: int) -> None:
        self.alive.add(replica)
        self.relay.add(replica)

    def lose(self, replica: int) -> None:
        self.alive.discard(replica)
        self.has.discard(replica)
        self.relay.lost(replica)

    def load(self, replica: int) -> None:
        """The replica has read all bytes. If its source was lost meanwhile, it has not."""
        source = self.relay.reading[replica]
        if source != TRAINER and source not in self.has:
            self.fail(replica)
            return
        self.has.add(replica)
        self.relay.loaded(replica, serves=True)

    def fail(self, replica: int) -> None:
        self.failures[replica] += 1
        self.relay.failed(replica)

    def assign(self) -> None:
        waiting = self.relay.waiting
        begun = self.relay.assign()
        bad = {reader for reader in waiting if self.failures[reader] >= MAX_FAILED_READS}
        for queue in ([each for each in waiting if each in bad], [each for each in waiting if each not in bad]):
            served = [each for each in queue if each in begun]
            assert served == queue[: len(served)], "in the order of requests"
        assert {begun[reader] for reader in bad & begun.keys()} <= {TRAINER}
        for reader, source in begun.items():
            assert reader in self.alive
            assert source == TRAINER or source in self.has, "a source has the version"
            self.reads_from_trainer += source == TRAINER
        for source, readers in Counter(self.relay.reading.values()).items():
            assert readers <= self.limits[source != TRAINER]

    def finish(self) -> None:
        """Let every read end, until nothing is left to do."""
        for _ in range(1000):
            self.assign()
            if not self.relay.reading:
                break
            for reader in self.relay.reading:
                self.load(reader)


@given(count=st.integers(1, 12), events=EVENTS, limits=st.tuples(st.integers(1, 5), st.integers(1, 3)))
def test_every_replica_that_lives_gets_the_version_whatever_is_lost(count, events, limits) -> None:
    history = History(*limits)
    for replica in range(count):
        history.add(replica)
    joining = count
    for kind, number in events:
        history.assign()
        reading = sorted(history.relay.reading)
        if kind == "add":
            history.add(joining)
            joining += 1
        elif kind == "lose":
            history.lose(number % joining)
        elif reading:
            reader = reading[number % len(reading)]
            history.load(reader) if kind == "load" else history.fail(reader)
    history.finish()
    assert history.has == history.alive
    assert history.relay.waiting == ()
    assert history.relay.reading == {}


@given(count=st.integers(0, 200), trainer=st.integers(1, 6), replica=st.integers(1, 3))
def test_the_reads_from_the_trainer_do_not_grow_with_the_number_of_replicas(count, trainer, replica) -> None:
    history = History(trainer, replica)
    for number in range(count):
        history.add(number)
    history.finish()
    assert history.has == set(range(count))
    assert history.reads_from_trainer == min(count, trainer)


@pytest.mark.parametrize(("replicas", "expected"), [(1, [1]), (4, [4]), (5, [4, 1]), (64, [4, 4, 8, 16, 32])])
def test_the_number_of_replicas_with_the_version_doubles_in_each_wave(replicas, expected) -> None:
    planned = waves(replicas)
    assert [len(wave) for wave in planned] == expected
    assert sum(source == TRAINER for wave in planned for source in wave) == min(replicas, MIN_TRAINER_READERS)
    assert all(count <= REPLICA_READERS for wave in planned[1:] for count in Counter(wave).values())


@pytest.mark.parametrize(
    ("train_ranks", "replica_ranks", "readers"), [(1, 1, 4), (8, 8, 4), (64, 8, 8), (64, 1, 64), (64, 16, 4)]
)
def test_as_many_replicas_read_from_the_trainer_as_have_its_bandwidth(train_ranks, replica_ranks, readers) -> None:
    assert trainer_readers(train_ranks, replica_ranks) == readers


def test_a_source_that_could_not_be_read_serves_nobody_any_more() -> None:
    relay = Relay(from_trainer=1, from_replica=2)
    for replica in range(3):
        relay.add(replica)
    assert relay.assign() == {0: TRAINER}
    relay.loaded(0, serves=True)
    assert relay.assign() == {1: 0, 2: 0}
    relay.failed(1)
    assert relay.assign() == {1: TRAINER}
    relay.loaded(2, serves=False)
    assert relay.reading == {1: TRAINER}


def serving(count: int) -> Relay:
    """A relay whose replicas 0 to count - 1 have the version and serve it."""
    relay = Relay(from_trainer=1)
    for replica in range(count):
        relay.loaded(replica, serves=True)
    return relay


def sources_of(relay: Relay, readers: range) -> set[int]:
    """From whom these replicas read if they join now."""
    for reader in readers:
        relay.add(reader)
    return set(relay.assign().values())


def test_a_replica_that_cannot_read_from_anybody_costs_one_source_and_then_reads_from_the_trainer() -> None:
    relay = serving(4)
    relay.add(9)
    sources = []
    for _ in range(4):
        sources.append(relay.assign()[9])
        relay.failed(9)
    assert sources == [0, 1, TRAINER, TRAINER]
    assert sources_of(relay, range(10, 13)) == {TRAINER, 1, 2, 3}


def test_a_replica_that_waits_for_the_trainer_delays_no_other() -> None:
    relay = Relay(from_trainer=1)
    relay.add(0)
    relay.add(9)
    assert relay.assign() == {0: TRAINER}
    relay.failed(9)
    relay.failed(9)
    relay.loaded(1, serves=True)
    relay.add(2)
    assert relay.assign() == {2: 1}
    assert relay.waiting == (9,)
    relay.loaded(0, serves=True)
    assert relay.assign() == {9: TRAINER}


def test_a_source_that_hangs_loses_only_one_reader() -> None:
    """The driver ends a reader that takes longer than publication.timeoutSeconds, before its read is given up."""
    relay = serving(2)
    relay.add(9)
    assert relay.assign() == {9: 0}
    relay.lost(9)
    assert sources_of(relay, range(10, 13)) == {1}


def test_a_replica_that_is_lost_while_it_waits_costs_no_source() -> None:
    relay = serving(2)
    relay.add(9)
    relay.lost(9)
    assert sources_of(relay, range(10, 13)) == {0, 1}


def test_replicas_that_serve_nobody_leave_the_trainer_as_the_source() -> None:
    relay = Relay(from_trainer=1)
    for replica in range(2):
        relay.add(replica)
    assert relay.assign() == {0: TRAINER}
    relay.loaded(0, serves=False)
    assert relay.assign() == {1: TRAINER}

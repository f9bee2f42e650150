"""The samples of a prompt go to one replica that has room for them, and no slot stays free for that."""

import heapq
import random
from collections import Counter

import pytest

from qwen35_trainer.pipeline import commands as do
from qwen35_trainer.pipeline import events as on
from qwen35_trainer.pipeline import notices
from qwen35_trainer.pipeline.coordinator import Coordinator
from qwen35_trainer.pipeline.coordinator_settings import CoordinatorSettings
from qwen35_trainer.pipeline.sequences import MIN_OUTDATED_ENTRIES, WaitingSequences
from qwen35_trainer.pipeline.window import Window
from tests.pipeline.world import World


def world(
    *slots: int, groups: int = 2, group_size: int = 4, lag: int = 2, token_room: int | None = None, **more
) -> World:
    """Replicas with these slots, which join together."""
    window = Window(groups, 1, float(lag), lag)
    built = World(CoordinatorSettings(**({"window": window, "group_size": group_size, "batches": 9} | more)))
    with built.together():
        for each in slots:
            built.join(each, token_room=token_room)
    return built


def homes(played: World) -> dict[int, list[int]]:
    return {group: sorted(replicas) for group, replicas in played.places.items()}


def test_the_samples_of_a_prompt_share_a_replica_and_the_next_prompt_takes_the_least_loaded_one():
    played = world(8, 8)
    assert homes(played) == {0: [0], 1: [1], 2: [0], 3: [1]}


def test_without_affinity_each_sample_takes_the_least_loaded_replica():
    played = world(8, 8, group_affinity=False)
    assert homes(played) == {0: [0, 1], 1: [0, 1], 2: [0, 1], 3: [0, 1]}


def test_a_group_is_divided_when_whole_groups_would_leave_replicas_without_any():
    """Three groups are in the window, and half of them run: six sequences for six replicas."""
    played = world(*[8] * 6, groups=1)
    assert [len(replica.running) for replica in played.replicas.values()] == [2] * 6


def test_the_rest_of_a_group_waits_for_its_replica_while_others_take_new_groups():
    played = world(4, 4, groups=4)
    for number in (0, 1):
        for name in list(played.replicas[number].running)[:3]:
            played.finish(name)
    assert homes(played)[2] == [0]
    assert homes(played)[3] == [1]


def test_at_most_a_quarter_of_a_replicas_slots_is_waited_for():
    played = world(4, 4, groups=4)
    played.finish((0, 0))  # one slot for group 2: one sample starts, one waits for it, two go where a slot is free next
    assert homes(played)[2] == [0]
    played.finish((1, 0))
    played.finish((1, 1))
    assert homes(played)[2] == [0, 1]
    assert played.replicas[0].running.keys() == {(0, 1), (0, 2), (0, 3), (2, 0)}


def test_a_sequence_that_its_replica_refused_does_not_wait_for_that_replica():
    played = world(4, 4, groups=4)
    for name in list(played.replicas[1].running):
        played.finish(name)
    assert not played.coordinator.waiting
    played.refuse((0, 0), keep=0)
    played.finish((2, 0))
    assert (0, 0) in played.replicas[1].running
    played.finish((0, 1))
    assert len(played.replicas[0].running) == 2, "it gets no sequence"
    played.trust(0)
    assert len(played.replicas[0].running) == 4


def test_a_slot_is_not_kept_free_for_a_replica_that_is_waited_for():
    """The window is full: the free slot of replica 1 takes the sequence that waits for replica 0."""
    played = world(4, 5, groups=1, lag=2, group_size=3)
    assert len(played.held) == 3
    assert sum(len(replica.running) for replica in played.replicas.values()) == 9
    assert played.coordinator.waiting == 0


def test_what_waits_for_a_lost_or_leaving_replica_goes_to_any_other():
    for leaves in (True, False):
        played = world(8, groups=2)
        played.finish((0, 0))
        assert (2, 0) in played.replicas[0].running
        assert played.coordinator.waiting > 0
        if leaves:
            played.leave(0, True)
        else:
            played.lose(0, keep=0)
        played.join(40)
        assert played.coordinator.waiting == 0
        played.play()


def test_what_waits_for_the_last_replica_goes_to_the_lane_when_that_is_lost():
    played = world(4, groups=2, lane_after=5)
    played.finish((0, 0))
    assert played.coordinator.waiting > 0
    with played.together():
        played.join(20, lane=True)
        played.lose(0, keep=0)
    assert played.coordinator.waiting == 0


def test_a_sequence_that_waits_for_its_replica_goes_first_to_any_when_a_version_is_published():
    played = world(16, 8, groups=1, lag=3, group_size=8)
    played.finish((0, 0))
    assert played.coordinator.waiting == 7
    for index in range(1, 8):
        played.finish((0, index))
    played.score(0)
    assert played.coordinator.version == 0
    played.train()
    for number in (0, 1):
        played.load(number)
    assert played.coordinator.version == 1
    played.play()


def test_after_a_publication_it_does_not_begin_to_wait_for_the_second_replica_of_its_group():
    """Sample 8 of group 0 waits for replica 0, and later samples run on replica 1, for which others may still wait."""
    played = world(8, 8, 8, groups=1, lag=3, group_size=13)
    assert homes(played)[0] == [0, 1]
    assert (0, 8) not in played.running
    while names := [name for name in played.running if name[0] == 1]:
        played.finish(names[0])
    played.score(1)
    played.train()
    for number in played.replicas:
        played.load(number)
    assert played.coordinator.version == 1
    assert (0, 8) not in played.running
    played.finish(next(iter(played.replicas[2].running)))
    assert (0, 8) in played.replicas[2].running


def test_a_group_that_starts_over_is_together_again():
    played = world(16, 16, 16, groups=4, group_size=4, lag=1)
    lost = {group for group, _ in played.replicas[0].running}
    played.lose(0, keep=0)
    assert [len(homes(played)[group]) for group in lost] == [2] * len(lost), "the lost replica and one other"


def test_a_continued_sequence_goes_to_the_least_loaded_replica():
    played = world(8, 8, 8, groups=2, group_size=8, lag=1)
    played.generate(0, 3)
    played.tell(0)
    held = set(played.replicas[0].running)
    played.lose(0, keep=3)
    shares = [len(held & replica.running.keys()) for replica in played.replicas.values()]
    assert max(shares) - min(shares) <= 1


# Tokens.


def test_the_replica_with_more_free_tokens_is_chosen_though_it_has_more_sequences():
    played = world(16, 16, group_size=1, groups=4, token_room=1000)
    long, *others = played.replicas[0].running
    played.send(on.SequencesProgressed({long: 900}))
    for name in others[:4]:
        played.finish(name)
        played.score(name[0])
    before = set(played.running)
    played.train()
    for number in (0, 1):
        played.load(number)
    new = set(played.running) - before
    assert len(new) == 4
    assert new <= played.replicas[1].running.keys()
    assert len(played.replicas[1].running) > len(played.replicas[0].running)


def test_a_replica_whose_memory_is_full_takes_nothing_until_a_sequence_ends():
    played = world(group_size=1, groups=4)
    played.join(4, token_room=100)
    first = next(iter(played.replicas[0].running))
    played.send(on.SequencesProgressed({first: 100}))
    held = set(played.replicas[0].running)
    played.finish(next(name for name in held if name != first))
    assert played.replicas[0].running.keys() < held
    played.finish(first)
    assert played.replicas[0].running.keys() - held
    played.play()


def test_an_empty_replica_takes_a_sequence_that_is_larger_than_its_memory():
    played = world(group_size=1, groups=1, lag=0)
    played.join(4)
    played.generate(0, 50)
    played.tell(0)
    played.join(4, token_room=10)
    played.lose(0, keep=50)
    assert len(played.replicas[1].running) == 1


# Many replicas.


class Steady:
    """A pool in steady state with random lengths: on how many replicas do the samples of one group run?"""

    def __init__(
        self, replicas: int, slots: int, groups: int, group_size: int, *, batches: int, affinity: bool
    ) -> None:
        settings = CoordinatorSettings(
            Window(groups, 1, 1.0, 4), group_size=group_size, batches=batches, group_affinity=affinity
        )
        self.coordinator = Coordinator(settings)
        self.places: dict[int, set[int]] = {}
        self.started: Counter[int] = Counter()
        self.group_size, self.replicas = group_size, replicas
        self.random = random.Random(0)
        self.later: list[tuple[float, int, list[object]]] = []
        self.now, self.serial, self.ended = 0.0, 0, False
        self.carry_out(self.coordinator.handle(*(on.ReplicaJoined(each, slots, 0) for each in range(replicas))))

    def run(self) -> float:
        while not self.ended:
            self.now, _, events = heapq.heappop(self.later)
            self.carry_out(self.coordinator.handle(*events))
        return sum(map(len, self.places.values())) / len(self.places)

    def carry_out(self, actions) -> None:
        for action in actions:
            match action:
                case do.StartSequences(replica, sequences):
                    for (group, index), _ in sequences:
                        self.places.setdefault(group, set()).add(replica)
                        self.started[group] += 1
                        last = [on.GroupScored(group)] if self.started[group] == self.group_size else []
                        self.after(self.random.lognormvariate(0, 0.8), on.SequenceFinished((group, index), 10))
                        if last:
                            self.after(40.0, *last)
                case do.TrainGroups(batch):
                    self.after(0.8, on.BatchTrained(batch))
                case do.CopyWeights(version):
                    self.after(0.01, on.WeightsCopied(version))
                case do.PublishWeights(version):
                    self.after(0.01, *(on.VersionLoaded(each, version) for each in range(self.replicas)))
                case do.SaveCheckpoint(snapshot):
                    self.after(0.01, on.CheckpointCompleted(snapshot.batch))
                case notices.RunEnded():
                    self.ended = True

    def after(self, seconds: float, *events: object) -> None:
        self.serial += 1
        heapq.heappush(self.later, (self.now + seconds, self.serial, list(events)))


@pytest.mark.parametrize(("replicas", "slots"), [(64, 40), (8, 320)])
def test_with_room_the_sixteen_samples_of_a_group_run_on_at_most_two_replicas(replicas, slots):
    assert Steady(replicas, slots, 64, 16, batches=4, affinity=True).run() <= 2.0
    assert Steady(replicas, slots, 64, 16, batches=4, affinity=False).run() > 7.5


# What waits.


def test_the_queue_forgets_sequences_that_no_longer_wait():
    queue = WaitingSequences()
    queue.add((0, 0), 0, home=1)
    for number in range(1, 1000):
        queue.add((number, 0), 5)
        queue.add((number, 1), 5, home=1)
        queue.remove((number, 0))
        queue.remove((number, 1))
    assert len(queue) == 1
    assert max(len(queue._anywhere), len(queue._bound)) <= MIN_OUTDATED_ENTRIES + 4
    assert queue.first(before=0) is None
    assert queue.first(before=1) == (0, 0)
    assert queue.first_at(1) == (0, 0)


def test_the_lowest_priority_goes_first_and_what_is_bound_only_when_it_is_old():
    queue = WaitingSequences()
    queue.add((1, 0), 2)
    queue.add((2, 0), 1, home=7)
    assert queue.first(before=1) == (1, 0)
    assert queue.first(before=2) == (2, 0)
    queue.unbind(7)
    assert queue.first(before=0) == (2, 0)
    assert not queue.has_bound(7)

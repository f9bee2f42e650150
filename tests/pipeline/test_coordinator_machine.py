"""The coordinator among replicas that start late, finish in any order, load weights one by one, and are lost and replaced.

What must hold whatever happens: the bound, the count, the nested inequalities, one exit for each group, one turn for
each prompt, one end for each evaluation, no free slot while a sequence waits, no error for a replica that joins with old
weights or reports late, and never a state in which nothing can happen and work remains. A stop reaches its end although no
copy, no replica and no evaluation does anything more. `World` asserts the rest as it plays.
"""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from qwen35_trainer.pipeline import events as on
from qwen35_trainer.pipeline.buffer import MissedDeadlinePolicy
from qwen35_trainer.pipeline.commands import SchedulingSnapshot
from qwen35_trainer.pipeline.coordinator_settings import CoordinatorSettings
from qwen35_trainer.pipeline.notices import LeaveReason
from qwen35_trainer.pipeline.requests import TakeCheckpoint
from qwen35_trainer.pipeline.window import Window
from tests.pipeline.world import World
from tests.profiles import examples

SMALL = st.integers(0, 5)


class Histories(RuleBasedStateMachine):
    @initialize(
        window=st.builds(
            lambda groups, batches, lag, share: Window(groups, batches, share * lag, lag),
            groups=st.integers(1, 4),
            batches=st.integers(1, 3),
            lag=st.integers(0, 3),
            share=st.floats(0, 1),
        ),
        samples=st.integers(1, 3),
        batches=st.integers(0, 12),
        policy=st.sampled_from(MissedDeadlinePolicy),
        mode=st.sampled_from(["partial", "partial", "whole", "turns"]),
        filtering=st.booleans(),
        lane_after=st.none() | st.integers(1, 4),
        breaks_even=st.sampled_from([True, True, False]),
        adaptive=st.booleans(),
        start=st.integers(0, 5),
        pending=st.integers(0, 3),
        slots=st.lists(st.integers(1, 6), min_size=1, max_size=3),
        affinity=st.booleans(),
        stops=st.booleans(),
    )
    def begin(
        self, window, samples, batches, policy, mode, filtering, lane_after, breaks_even, adaptive, start, pending, slots,
        affinity, stops,
    ):  # fmt: skip
        self.settings = CoordinatorSettings(
            window=window,
            group_size=samples,
            batches=start + batches,
            on_missed_deadline=policy,
            partial_rollout=mode == "partial",
            taking_turns=mode == "turns",
            dynamic_sampling=filtering and samples > 1,
            lane_after=lane_after,
            lane_breaks_even=breaks_even,
            max_response_tokens=40,
            adaptive=adaptive,
            group_affinity=affinity,
        )
        self.begun, self.stops = start, stops
        self.pending = tuple(range(7, 7 + pending))
        self.world = World(self.settings, SchedulingSnapshot(start, 20, self.pending, group=100))
        for each in slots:
            self.world.join(each)
        if lane_after is not None:
            self.world.join(6, lane=True)
            for number in self.world.replicas if breaks_even else ():
                self.world.measure(number, 1.0 if number < len(slots) else 0.25)

    # The rollout pool.

    @rule(replica=SMALL, tokens=st.integers(1, 3), reported=st.booleans())
    def generate(self, replica, tokens, reported):
        if (number := self.replica(replica)) is not None:
            self.world.generate(number, tokens)
            if reported:
                self.world.tell(number)

    @rule(which=SMALL, count=st.integers(1, 8))
    def finish(self, which, count):
        for _ in range(min(count, len(self.world.running))):
            self.world.finish(self.world.running[which % len(self.world.running)])

    @rule(which=SMALL, count=st.integers(1, 6), signal=st.booleans())
    def score(self, which, count, signal):
        for _ in range(min(count, len(self.world.unscored))):
            groups = list(self.world.unscored)
            self.world.score(groups[which % len(groups)], signal=signal)

    @precondition(lambda self: self.world.held)
    @rule(which=SMALL)
    def fail(self, which):
        """A group that is not scored yet."""
        held = [group for group in self.world.held if group in self.running_groups]
        if held:
            self.world.fail(held[which % len(held)])

    @rule(replica=SMALL, keep=st.none() | st.integers(0, 3), several=st.integers(1, 3))
    def lose(self, replica, keep, several):
        """One replica, or the replicas of a node: the coordinator learns of them together."""
        with self.world.together():
            for _ in range(several):
                if (number := self.replica(replica)) is not None:
                    self.world.lose(number, keep)

    @rule(tokens=st.integers(1, 3), tells=st.booleans())
    def lose_one_after_the_other(self, tokens, tells):
        """The second one is lost before it reports anything about what it took over from the first."""
        for keep in (3, None):
            if (number := self.replica(0)) is not None:
                if keep:
                    self.world.generate(number, tokens)
                if keep and tells:
                    self.world.tell(number)
                self.world.lose(number, keep)
            self.world.join(3)

    @precondition(lambda self: len(self.world.replicas) < 5)
    @rule(
        slots=st.integers(1, 4),
        newest=st.booleans(),
        lane=st.booleans(),
        behind=st.integers(0, 2),
        token_room=st.none() | st.integers(1, 9),
    )
    def join(self, slots, newest, lane, behind, token_room):
        lane = lane and self.settings.lane_after is not None
        self.world.join(slots, newest=newest, lane=lane, behind=behind, token_room=token_room)

    @precondition(lambda self: self.world.joined > len(self.world.replicas))
    @rule(version=SMALL)
    def report_of_a_lost_replica(self, version):
        gone = min(set(range(self.world.joined)) - self.world.replicas.keys())
        self.world.send(on.VersionLoaded(gone, version), on.ReplicaLeaving(gone), on.ReplicaLost(gone))

    @rule(
        replica=SMALL,
        step=st.sampled_from([0.25, 0.5, 1.0]),
        prefill=st.sampled_from([0.0, 0.25, 2.0]),
        hand_over=SMALL,
    )
    def measure(self, replica, step, prefill, hand_over):
        if (number := self.replica(replica)) is not None:
            self.world.measure(number, step, prefill, hand_over)

    @precondition(lambda self: self.settings.lane_after is not None)
    @rule(tokens=st.integers(1, 5))
    def stragglers(self, tokens):
        """All replicas generate, and the pool's report together: many may move at one moment."""
        with self.world.together():
            for number in self.world.replicas:
                self.world.generate(number, tokens)
                self.world.tell(number)

    @rule(replica=SMALL, leaving=st.booleans())
    def leave(self, replica, leaving):
        if (number := self.replica(replica)) is not None:
            self.world.leave(number, leaving)

    @rule(replica=SMALL, next_only=st.booleans())
    def load(self, replica, next_only):
        if (number := self.replica(replica)) is not None:
            self.world.load(number, next_only=next_only)

    @rule(which=SMALL, keep=st.integers(0, 3), several=st.integers(1, 3))
    def refuse(self, which, keep, several):
        """A replica cannot generate a sequence, or several at one moment."""
        with self.world.together():
            for _ in range(min(several, len(self.world.running))):
                self.world.refuse(self.world.running[which % len(self.world.running)], keep)

    @rule(replica=SMALL)
    def trust(self, replica):
        if (number := self.replica(replica)) is not None:
            self.world.trust(number)

    # The train pool.

    @precondition(lambda self: self.world.training is not None)
    @rule(copies=st.booleans())
    def train(self, copies):
        self.world.train(copies=copies)

    @precondition(lambda self: self.world.copying is not None)
    @rule()
    def copy(self):
        self.world.copy()

    @precondition(lambda self: self.world.saving is not None)
    @rule()
    def save(self):
        self.world.save()

    @rule()
    def ask_for_a_checkpoint(self):
        self.world.send(TakeCheckpoint())

    @precondition(lambda self: not self.world.ended and len(self.world.evaluations) < 6)
    @rule(ahead=st.sampled_from([0, 0, 0, 1, 1, 2, -1]), groups=st.integers(0, 2), samples=st.integers(1, 2))
    def evaluate(self, ahead, groups, samples):
        self.world.evaluate(self.world.coordinator.version + ahead, groups, samples)

    @precondition(lambda self: self.world.evaluations)
    @rule(which=SMALL)
    def fail_a_group_of_an_evaluation(self, which):
        unfinished = [group for each in self.world.evaluations if each.is_running for group in each.unfinished]
        if unfinished:
            self.world.fail(unfinished[which % len(unfinished)])

    @rule(
        steps=st.lists(st.sampled_from(["finish", "score", "train", "copy", "save", "load", "lose"]), max_size=6),
        which=SMALL,
    )
    def at_one_moment(self, steps, which):
        world = self.world
        with world.together():
            for step in steps:
                if step == "finish" and world.running:
                    world.finish(world.running[which % len(world.running)])
                elif step == "score" and world.unscored:
                    world.score(list(world.unscored)[which % len(world.unscored)])
                elif step == "train" and world.training is not None:
                    world.train(copies=False)
                elif step == "copy" and world.copying is not None:
                    world.copy()
                elif step == "save" and world.saving is not None:
                    world.save()
                elif step == "load" and world.replicas:
                    world.load(self.replica(which))
                elif step == "lose" and world.replicas:
                    world.lose(self.replica(which), which)

    @precondition(lambda self: self.stops and self.world.joined > 3)
    @rule()
    def stop(self):
        self.world.stop()
        assert self.world.ended, "a stop waits for the batch that trains and for checkpoints only"

    # All of it together, so that histories get as far as deadlines.

    @rule(
        newest=st.booleans(),
        spared=st.integers(0, 3),
        saved=st.booleans(),
        copied=st.booleans(),
        loaded=st.integers(0, 3),
    )
    def a_batch(self, newest, spared, saved, copied, loaded):
        """Finish and score all but some, train, load; a checkpoint may take longer than that."""
        for _ in range(3):
            running = self.world.running[::-1] if newest else self.world.running
            for name in running[: max(0, len(running) - spared)]:
                if name in self.world.running:
                    self.world.finish(name)
            for group in list(self.world.unscored):
                if group in self.world.unscored:  # a batch that another group's score filled may have discarded it
                    self.world.score(group)
        if saved and self.world.saving is not None:
            self.world.save()
        if self.world.training is not None:
            self.world.train(copies=copied)
        if copied and self.world.copying is not None:
            self.world.copy()
        for number in list(self.world.replicas)[: loaded or None]:
            self.world.load(number)

    # What must hold.

    @invariant()
    def it_holds(self):
        if not hasattr(self, "world") or self.world.ended:
            return
        world, coordinator = self.world, self.world.coordinator
        assert coordinator.buffer.counted <= self.settings.window.limit
        if self.settings.on_missed_deadline is MissedDeadlinePolicy.WAIT:
            assert coordinator.buffer.excess() == 0, "the nested inequalities"
        assert list(coordinator.buffer.pending) == list(world.held)
        groups = coordinator._placement.groups
        for replica in (*coordinator._placement.pool, *coordinator._placement.lane):
            assert replica.tokens == sum(groups[name[0]].sequences[name[1]].tokens for name in replica.sequences)
        assert sum(world.exits.values()) + len(world.held) == len(world.positions), "one exit for each group"
        assert world.exits == Counter({reason: n for reason, n in coordinator.left_by_reason.items() if n})
        assert all(len(replica.running) <= replica.slots for replica in world.replicas.values())
        assert coordinator.running == len(world.running)
        leaving = {number for number, replica in world.replicas.items() if replica.leaving}
        assert coordinator.drained == {number for number in leaving if not world.replicas[number].running}
        if self.settings.lane_after is not None:
            outside = [replica for replica in world.replicas.values() if not replica.lane]
            long = {
                name
                for each in outside
                for name in each.running
                if len(world.reported[name]) >= self.settings.lane_after
            }
            stragglers = coordinator._placement._stragglers
            assert {name for name in long if name in stragglers} == long, "each straggler is considered"
            assert len(stragglers) == len(long), "and nothing else"
        if self.settings.partial_rollout and not self.settings.taking_turns and coordinator.waiting:
            pool = (each for each in world.replicas.values() if not each.lane and each.token_room is None)
            assert not any(replica.has_free_slot for replica in pool), "no slot is free while a sequence waits"

    def teardown(self):
        """However a history ended: played on, it comes to its end, and every prompt has had its turn."""
        if not hasattr(self, "world"):
            return
        world, window = self.world, self.settings.window
        if self.stops:
            self.stop()
            assert world.next_batch == self.begun or world.saved[-1].batch == world.next_batch
            assert all(each.outcome for each in world.evaluations), "every evaluation has an end"
            return
        world.play()
        end = world.coordinator.snapshot
        assert all(each.outcome for each in world.evaluations), "every evaluation has an end"
        assert end.batch == self.settings.batches
        assert self.begun == end.batch or world.saved[-1].batch == end.batch, "all that has trained is saved"
        assert [snapshot.batch for snapshot in world.saved] == sorted(snapshot.batch for snapshot in world.saved)
        assert len(world.trained) == (self.settings.batches - self.begun) * window.groups_per_batch
        every = [*self.pending, *range(20, end.position)]
        assert sorted([*world.trained, *world.gone, *end.pending]) == sorted(every), "each prompt once"
        assert (
            world.exits[LeaveReason.DISCARDED] == 0 or self.settings.on_missed_deadline is MissedDeadlinePolicy.DISCARD
        )

    @property
    def running_groups(self) -> set[int]:
        return {group for group, _ in self.world.running}

    def replica(self, which: int) -> int | None:
        numbers = list(self.world.replicas)
        return numbers[which % len(numbers)] if numbers else None


Histories.TestCase.settings = settings(max_examples=examples(300), stateful_step_count=60, deadline=None)
test_whatever_happens_the_bound_the_count_and_progress_hold = Histories.TestCase

"""The buffer among replicas that start late, finish in any order, and get their weights one by one.

dispatch ─► waiting ─(a replica takes it: its weights' version)─► running ─► finished
                          └─ birth is told to the buffer some time before the finish, not at once
take ─► train ─► publication begins ─► each replica loads, at its own time ─► publication ends
            └── the next batch may leave and train before that; the next publication begins after it
"""

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from qwen35_trainer.pipeline.buffer import Batch, Blocked, Buffer, OnMissedDeadline
from qwen35_trainer.pipeline.window import Window


@dataclass
class Group:
    """What really happened to a group, whether the buffer knows it or not."""

    replica: int
    dispatched: int
    slow: bool
    """Finishes only when it is waited for, or late by chance."""
    born: int | None = None
    told: bool = False
    finished: bool = False


class Replicas(RuleBasedStateMachine):
    @initialize(
        groups=st.integers(1, 4),
        batches=st.integers(1, 3),
        lag=st.integers(0, 3),
        share=st.floats(0, 1),
        replicas=st.integers(1, 3),
        policy=st.sampled_from(OnMissedDeadline),
        start=st.integers(0, 8),
        slow_every=st.integers(1, 4),
    )
    def begin(self, groups, batches, lag, share, replicas, policy, start, slow_every):
        self.window = Window(groups, batches, share * lag, lag)
        self.policy = policy
        self.buffer = Buffer(self.window, policy)
        self.buffer.start_at(start)
        self.published = self.window.version_of(start)
        self.loaded = [self.published] * replicas
        self.travelling: int | None = None
        self.training = False
        self.held: dict[int, Group] = {}
        self.trained_at: list[int] = [batch for batch in range(start) for _ in range(groups)]
        self.dispatched = 0
        self.left: list[int] = []
        self.slow_every = slow_every
        self.dispatch(self.window.limit)

    # The rollout pool.

    @rule(most=st.integers(1, 12))
    def dispatch(self, most):
        for _ in range(min(most, self.buffer.room)):
            group, self.dispatched = self.dispatched, self.dispatched + 1
            self.buffer.dispatch(group, self.published)
            self.held[group] = Group(group % len(self.loaded), self.published, slow=group % self.slow_every == 0)

    @rule(count=st.integers(1, 6), newest=st.booleans())
    def start(self, count, newest):
        waiting = [group for group in self.held.values() if group.born is None]
        for group in (waiting[::-1] if newest else waiting)[:count]:
            group.born = self.loaded[group.replica]

    @rule(count=st.integers(1, 6))
    def tell_births(self, count):
        silent = [number for number, group in self.held.items() if group.born is not None and not group.told]
        for number in silent[:count]:
            self.tell(number)

    @rule(count=st.integers(1, 6), newest=st.booleans(), slow=st.booleans())
    def finish(self, count, newest, slow):
        running = [number for number in self.running if self.held[number].slow == slow]
        for number in (running[::-1] if newest else running)[:count]:
            self.finish_one(number)

    # The train pool.

    @precondition(lambda self: not self.training)
    @rule()
    def take(self):
        taken = self.buffer.take()
        if isinstance(taken, Batch):
            self.leave(taken)
        else:
            self.blocked(taken)

    @precondition(lambda self: self.training)
    @rule()
    def train(self):
        self.training = False
        version, rest = divmod(self.buffer.batch, self.window.batches_per_version)
        if rest == 0:
            self.end_publication()
            self.travelling = version

    @precondition(lambda self: self.travelling is not None)
    @rule(replica=st.integers(0, 2))
    def load(self, replica):
        self.loaded[replica % len(self.loaded)] = self.travelling

    @precondition(lambda self: self.travelling is not None)
    @rule()
    def end_publication(self):
        if self.travelling is not None:
            self.loaded = [self.travelling] * len(self.loaded)
            self.published, self.travelling = self.travelling, None
            self.buffer.publish(self.published)
            self.dispatch(self.window.limit)

    # All of it at once, so that every history gets as far as deadlines.

    @precondition(lambda self: not self.training)
    @rule(newest=st.booleans(), unborn=st.integers(0, 3), patient=st.booleans())
    def train_what_is_quick(self, newest, unborn, patient):
        waiting = sum(group.born is None for group in self.held.values())
        self.start(max(0, waiting - unborn), newest)
        self.finish(self.window.limit, newest, slow=False)
        self.take()
        while not self.training and patient and self.running:
            self.finish(1, newest, slow=True)
            self.take()
        if self.training:
            self.train()

    # What must come true.

    def teardown(self):
        """However a history ended: whenever everything that runs finishes, a batch leaves."""
        if not hasattr(self, "buffer"):
            return
        if self.training:
            self.train()
        for _ in range(2 * self.window.batches_per_version):
            self.end_publication()
            self.dispatch(self.window.limit)
            self.start(len(self.held), newest=False)
            for number in self.running:
                self.finish_one(number)
            batch = self.buffer.take()
            assert isinstance(batch, Batch), f"{len(self.held)} finished groups, and yet {batch}"
            self.leave(batch)
            self.train()

    @invariant()
    def the_count_is_within_the_limit(self):
        counted = len(self.held) + sum(
            batch >= self.published * self.window.batches_per_version for batch in self.trained_at
        )
        assert counted <= self.window.limit
        assert self.buffer.counted == counted

    @invariant()
    def every_dispatched_group_left_once_or_is_pending(self):
        assert list(self.buffer.pending) == list(self.held)
        assert sorted([*self.left, *self.held]) == list(range(self.dispatched))

    def leave(self, batch: Batch) -> None:
        number = self.buffer.batch - 1
        version = self.window.version_of(number)
        assert len(set(batch.groups)) == self.window.groups_per_batch
        overdue = [g for g, group in self.held.items() if group.finished and self.lag(group, version) > self.limit]
        assert set(overdue) <= set(batch.groups) or set(batch.groups) <= set(overdue), "overdue groups come first"
        if self.policy is not OnMissedDeadline.DISCARD:
            assert not batch.discarded
        for each in batch.discarded:
            group = self.held.pop(each)
            known = group.born if group.told else group.dispatched
            assert self.window.deadline(known) <= number, "it could still have trained"
            self.left.append(each)
        for each in batch.groups:
            group = self.held.pop(each)
            assert group.finished
            assert group.born is not None
            if self.policy is not OnMissedDeadline.MASK_TOKENS:
                assert self.lag(group, version) <= self.limit
            self.left.append(each)
            self.trained_at.append(number)
        self.training = True

    def blocked(self, blocked: Blocked) -> None:
        finished = sum(group.finished for group in self.held.values())
        assert (blocked.finished, blocked.needed) == (finished, self.window.groups_per_batch)
        assert all(not self.held[group].finished for group in blocked.due), "only running groups are waited for"
        assert blocked.due or finished < self.window.groups_per_batch
        if self.policy is not OnMissedDeadline.WAIT:
            assert not blocked.due

    @property
    def running(self) -> list[int]:
        return [number for number, group in self.held.items() if group.born is not None and not group.finished]

    @property
    def limit(self) -> int:
        return self.window.max_version_lag

    def lag(self, group: Group, version: int) -> int:
        return version - (group.dispatched if group.born is None else group.born)

    def tell(self, number: int) -> None:
        group = self.held[number]
        if not group.told:
            assert group.born is not None
            self.buffer.born(number, group.born)
            group.told = True

    def finish_one(self, number: int) -> None:
        self.tell(number)
        self.buffer.finish(number)
        self.held[number].finished = True


Replicas.TestCase.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)
test_among_replicas_the_bound_the_count_and_progress_hold = Replicas.TestCase

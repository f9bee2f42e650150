"""No key is lost, no two workers get the same key, and no key comes later than requested, or than its pause lasts."""

import asyncio
import contextlib
import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from qwen35_operator.kube.queue import (
    FIRST_BACKOFF_SECONDS,
    MAX_AHEAD,
    MAX_BACKOFF_SECONDS,
    MIN_PAUSE_SECONDS,
    MIN_SUPERSEDED,
    SLOW_MEMORY_SECONDS,
    SLOW_SECONDS,
    WorkQueue,
)
from tests.operator.kube import virtual
from tests.profiles import examples

WORKERS = 4
KEYS = st.sampled_from([("team", name) for name in "abcd"] + [("other", name) for name in "xy"])
ROUNDING = 1e-6


class QueueMachine(RuleBasedStateMachine):
    """Workers at a queue. The model knows when each key is due and when it was last processed, and whether a worker has it."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = virtual.Loop()
        self.queue = WorkQueue(self.loop.time, WORKERS)
        self.wanted: dict = {}
        self.held: dict = {}  # when each was taken
        self.slow: dict = {}  # when each was slow last
        self.ended: dict = {}
        self.failures: dict = {}
        self.taking: list[asyncio.Task] = []

    def teardown(self) -> None:
        for task in self.taking:
            task.cancel()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()

    def _want(self, key, at: float) -> None:
        self.wanted[key] = min(self.wanted.get(key, at), at)

    def _due(self, key) -> float:
        return max(self.wanted[key], self.ended.get(key, -math.inf) + MIN_PAUSE_SECONDS)

    def _is_slow(self, key) -> bool:
        return self.loop.time() - self.slow.get(key, -math.inf) < SLOW_MEMORY_SECONDS

    def _blocked(self, more_than: int) -> set:
        held = [namespace for namespace, _ in self.held]
        return {namespace for namespace in held if held.count(namespace) > more_than}

    def _settle(self, seconds: float = 0.0) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))
        for _ in range(10):
            self.loop.run_until_complete(asyncio.sleep(0))
        for task in [task for task in self.taking if task.done()]:
            self.taking.remove(task)
            key = task.result()
            assert key not in self.held
            assert self._due(key) <= self.loop.time() + ROUNDING
            del self.wanted[key]
            self.held[key] = self.loop.time(), self._is_slow(key)
            assert sum(is_slow for _, is_slow in self.held.values()) <= self.queue.max_slow == 1
            assert not self._blocked(more_than=self.queue.max_of_namespace)

    @rule(key=KEYS)
    def add(self, key) -> None:
        self._want(key, self.loop.time())
        self.queue.add(key)
        self._settle()

    @rule(key=KEYS)
    def add_behind(self, key) -> None:
        self._want(key, self.loop.time())
        self.queue.add_behind(key)
        self._settle()

    @rule(key=KEYS, seconds=st.sampled_from([0.0, 0.5, 1.0, 3.0]))
    def add_later(self, key, seconds) -> None:
        self._want(key, self.loop.time() + seconds)
        self.queue.add_later(key, seconds)
        self._settle()

    @rule(key=KEYS)
    def fail(self, key) -> None:
        self.failures[key] = self.failures.get(key, 0) + 1
        wait = self.queue.add_failed(key)
        assert wait == min(0.1 * 2 ** (self.failures[key] - 1), 60)
        self._want(key, self.loop.time() + wait)
        self._settle()

    @rule(key=KEYS)
    def succeed(self, key) -> None:
        self.failures.pop(key, None)
        self.queue.succeeded(key)

    @rule()
    def start_take(self) -> None:
        self.taking.append(self.loop.create_task(self.queue.take()))
        self._settle()

    @rule()
    def cancel_take(self) -> None:
        """Cancel a worker that waits for a key."""
        if self.taking:
            self.taking.pop().cancel()
        self._settle()

    @rule(data=st.data())
    def finish(self, data) -> None:
        if self.held:
            key = data.draw(st.sampled_from(sorted(self.held)))
            self.ended[key] = self.loop.time()
            since, _ = self.held.pop(key)
            if self.ended[key] - since >= SLOW_SECONDS:
                self.slow[key] = self.ended[key]
            self.queue.done(key)
            self._settle()

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 70.0]))
    def wait(self, seconds) -> None:
        self._settle(seconds)

    @invariant()
    def no_worker_waits_while_a_key_is_due(self) -> None:
        now = self.loop.time() - ROUNDING
        due = {key for key in self.wanted if self._due(key) <= now and key not in self.held}
        blocked = self._blocked(more_than=self.queue.max_of_namespace - 1)
        due = {key for key in due if key[0] not in blocked}
        if any(is_slow for _, is_slow in self.held.values()):
            due = {key for key in due if key not in self.slow}
        assert not (due and self.taking)


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=examples(80), stateful_step_count=40, deadline=None)


def test_what_is_added_twice_is_taken_once() -> None:
    async def scenario() -> None:
        queue = WorkQueue(asyncio.get_running_loop().time)
        queue.add(("team", "a"))
        queue.add(("team", "a"))
        assert len(queue) == 1
        await queue.take()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(queue.take(), 1000)

    virtual.run(scenario())


def test_what_is_added_first_is_taken_first() -> None:
    async def scenario() -> list[str]:
        queue = WorkQueue(asyncio.get_running_loop().time)
        for name in "cab":
            queue.add(("team", name))
        return [(await queue.take())[1] for _ in "cab"]

    assert virtual.run(scenario()) == ["c", "a", "b"]


def taken(queue: WorkQueue, count: int) -> list[str]:
    """Take keys as one worker does. Returns their names."""

    async def scenario() -> list[str]:
        return [(await queue.take())[1] for _ in range(count)]

    return virtual.run(scenario())


def test_what_is_added_behind_is_taken_last_in_its_order_and_what_changes_meanwhile_moves_ahead() -> None:
    queue = WorkQueue(lambda: 0.0)
    for name in "abcd":
        queue.add_behind(("team", name))
    queue.add(("team", "x"))
    queue.add(("team", "c"))
    queue.add_behind(("team", "x"))
    assert len(queue) == 5
    assert taken(queue, 5) == ["x", "c", "a", "b", "d"]


def test_what_is_behind_is_taken_although_there_is_always_something_ahead() -> None:
    queue = WorkQueue(lambda: 0.0, workers=1000)
    queue.add_behind(("team", "behind"))
    for number in range(100):
        queue.add(("team", str(number)))
    assert taken(queue, 100).index("behind") == MAX_AHEAD


def test_what_is_behind_is_taken_at_the_time_for_which_it_was_also_requested() -> None:
    now = [0.0]
    queue = WorkQueue(lambda: now[0])
    for name in ("a", "b", "late"):
        queue.add_behind(("team", name))
    queue.add_later(("team", "late"), 2.0)
    assert taken(queue, 1) == ["a"]
    now[0] = 2.0
    assert taken(queue, 1) == ["late"]
    assert taken(queue, 1) == ["b"]


def test_a_delay_ends_when_what_is_behind_was_taken() -> None:
    async def scenario() -> None:
        queue, key = WorkQueue(asyncio.get_running_loop().time), ("team", "a")
        queue.add_later(key, 5.0)
        queue.add_behind(key)
        await queue.take()
        queue.done(key)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(queue.take(), 1000)

    virtual.run(scenario())


async def test_slow_keys_leave_workers_to_the_others_however_many_they_are() -> None:
    """Their reconciles wait for an admission webhook that does not answer, and events about them come all the time."""
    now = [0.0]
    queue = WorkQueue(lambda: now[0])
    slow = [("team", f"slow{number}") for number in range(100)]
    for key in slow:
        queue.add(key)
        await queue.take()
        now[0] += SLOW_SECONDS
        queue.done(key)
    now[0] += MIN_PAUSE_SECONDS
    recent = [key for key in slow if key in queue._slow]
    assert len(recent) == SLOW_MEMORY_SECONDS / SLOW_SECONDS
    for key in recent:
        queue.add(key)
    held = [await queue.take() for _ in range(queue.max_slow)]
    worker = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    assert not worker.done()
    queue.add(("team", "quick"))
    assert await worker == ("team", "quick")
    queue.done(held[0])
    assert (await queue.take()) in recent


async def test_one_quick_reconcile_does_not_end_a_training_s_slowness() -> None:
    """A repair that failed is due again after a while, and the reconciles until then have nothing to wait for."""
    now = [0.0]
    queue, key = WorkQueue(lambda: now[0]), ("team", "a")
    for seconds in (SLOW_SECONDS, 0.1):
        queue.add(key)
        await queue.take()
        now[0] += seconds
        queue.done(key)
        now[0] += MIN_PAUSE_SECONDS
    queue.add(key)
    assert key in queue._waiting


async def test_a_namespace_never_holds_all_workers() -> None:
    queue = WorkQueue(lambda: 0.0)
    for number in range(300):
        queue.add(("team", str(number)))
    for _ in range(queue.max_of_namespace):
        await queue.take()
    worker = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    assert not worker.done()
    queue.add(("other", "training"))
    assert await worker == ("other", "training")


async def test_namespaces_take_turns() -> None:
    queue = WorkQueue(lambda: 0.0, workers=100)
    for key in [("team", "a"), ("team", "b"), ("team", "c"), ("other", "x"), ("third", "y")]:
        queue.add(key)
    assert [(await queue.take())[1] for _ in range(5)] == ["a", "x", "y", "b", "c"]


@pytest.mark.parametrize("workers", [1, 2, 3, 8, 100])
def test_with_any_number_of_workers_slow_keys_and_those_of_one_namespace_are_processed(workers) -> None:
    queue = WorkQueue(lambda: 0.0, workers)
    assert 1 <= queue.max_slow <= max(1, workers // 2)
    assert 1 <= queue.max_of_namespace <= workers


def test_what_comes_while_in_work_comes_again_when_it_is_done() -> None:
    async def scenario() -> None:
        queue, key = WorkQueue(asyncio.get_running_loop().time), ("team", "a")
        queue.add(key)
        await queue.take()
        queue.add(key)
        assert len(queue) == 0
        queue.done(key)
        assert await queue.take() == key

    virtual.run(scenario())


def test_a_training_that_changes_all_the_time_is_taken_four_times_per_second_and_keeps_nobody_waiting() -> None:
    async def scenario() -> None:
        loop, busy = asyncio.get_running_loop(), ("team", "busy")
        queue, taken = WorkQueue(loop.time), []
        while loop.time() < 10:
            for key in (busy, ("team", "other")):
                queue.add(key)
            with contextlib.suppress(TimeoutError):
                key = await asyncio.wait_for(queue.take(), 0.01)
                taken.append(key)
                queue.done(key)
        assert abs(taken.count(busy) - 4 * 10) <= 2
        assert abs(taken.count(("team", "other")) - 4 * 10) <= 2
        assert len(queue._ended) <= 2

    virtual.run(scenario())


def test_the_earliest_of_several_delays_counts() -> None:
    async def scenario() -> list[float]:
        loop, key, taken = asyncio.get_running_loop(), ("team", "a"), []
        queue = WorkQueue(loop.time)
        for seconds in (5.0, 2.0, 9.0):
            queue.add_later(key, seconds)
        await queue.take()
        taken.append(round(loop.time(), 6))
        queue.done(key)
        with pytest.raises(TimeoutError):  # the later ones were the same wish
            await asyncio.wait_for(queue.take(), 100)
        return taken

    assert virtual.run(scenario()) == [2.0]


def test_waits_double_up_to_a_minute_and_begin_again_after_a_success() -> None:
    queue, key = WorkQueue(lambda: 0.0), ("team", "a")
    waits = [queue.add_failed(key) for _ in range(1200)]
    assert waits[:4] == [0.1, 0.2, 0.4, 0.8]
    assert set(waits[10:]) == {MAX_BACKOFF_SECONDS}
    assert queue.add_failed(("team", "b")) == FIRST_BACKOFF_SECONDS
    queue.succeeded(key)
    assert queue.add_failed(key) == FIRST_BACKOFF_SECONDS


def test_delays_that_later_events_supersede_take_no_memory() -> None:
    """As of trainings that report every few seconds, and whose deadline is two days away."""

    async def scenario() -> int:
        loop = asyncio.get_running_loop()
        queue = WorkQueue(loop.time)
        keys = [("team", str(number)) for number in range(50)]
        for round_number in range(40):
            for key in keys:
                queue.add(key)
                await queue.take()
                queue.done(key)
                queue.add_later(key, 5.0 if round_number % 2 else 172_800.0)
        assert len(queue._due) == len(keys)
        return len(queue._later)

    assert virtual.run(scenario()) <= 2 * 50 + MIN_SUPERSEDED


def test_a_delay_that_counts_outlasts_those_that_do_not() -> None:
    async def scenario() -> float:
        loop = asyncio.get_running_loop()
        queue, kept = WorkQueue(loop.time), ("team", "kept")
        queue.add_later(kept, 100.0)
        for number in range(1000):
            key = ("team", str(number % 7))
            queue.add_later(key, 1000.0)
            queue.add(key)
            await queue.take()
            queue.done(key)
        assert await queue.take() == kept
        return round(loop.time(), 6)

    assert virtual.run(scenario()) == 100.0

"""Which replica gets a group. Replicas are stand-ins for the remote actors, with the calls that the pool makes."""

from dataclasses import dataclass, field

import pytest

from qwen35_trainer.rollout.base import GroupRequest
from qwen35_trainer.runtime.rollout_pool import RolloutPool


@dataclass
class Remote:
    """`actor.submit.remote(…)`, answered at once."""

    groups: list[int] = field(default_factory=list)

    @property
    def submit(self) -> "Remote":
        return self

    async def remote(self, requests: list[GroupRequest]) -> None:
        self.groups += [request.group for request in requests]


@pytest.fixture
def actors() -> list[Remote]:
    return [Remote(), Remote(), Remote()]


@pytest.fixture
def pool(actors) -> RolloutPool:
    return RolloutPool(actors, ["pod-a", "pod-b", "pod-c"], call_seconds=60.0, publish_seconds=60.0)


def groups(first: int, count: int) -> list[GroupRequest]:
    return [GroupRequest(group, (1,), samples=4, max_tokens=8) for group in range(first, first + count)]


async def test_groups_are_spread_by_load(pool, actors):
    await pool.submit(groups(0, 6))
    assert [len(actor.groups) for actor in actors] == [2, 2, 2]


async def test_a_leaving_pod_gets_no_more_groups(pool, actors):
    pool.leaving = frozenset({"pod-b"})
    await pool.submit(groups(0, 6))
    assert [len(actor.groups) for actor in actors] == [3, 0, 3]


async def test_when_all_leave_the_training_goes_on_with_what_there_is(pool, actors):
    pool.leaving = frozenset({"pod-a", "pod-b", "pod-c", "pod-of-yesterday"})
    await pool.submit(groups(0, 6))
    assert [len(actor.groups) for actor in actors] == [2, 2, 2]


async def test_a_pod_that_stays_after_all_gets_groups_again(pool, actors):
    pool.leaving = frozenset({"pod-a"})
    await pool.submit(groups(0, 4))
    pool.leaving = frozenset()
    await pool.submit(groups(4, 2))
    assert actors[0].groups == [4, 5]


def test_hosts_are_told_by_replica(pool):
    assert pool.hosts == {"rollout-0": "pod-a", "rollout-1": "pod-b", "rollout-2": "pod-c"}

"""At most one of several candidates leads, whatever happens to their requests to the API server.

Time is virtual: a minute of elections takes a millisecond.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen35_operator.desired.object_names import KNOWN_VERSION
from qwen35_operator.kube.api_errors import Unavailable
from qwen35_operator.kube.client import JsonObject
from qwen35_operator.kube.kinds import LEASE
from qwen35_operator.kube.lease import (
    GIVE_UP_SECONDS,
    LEASE_SECONDS,
    REMEMBERED_VERSIONS,
    RENEW_SECONDS,
    REQUEST_SECONDS,
    UNDECIDED_SECONDS,
    Election,
)
from tests.operator.kube import virtual
from tests.operator.kube.memory_api import MemoryApi
from tests.profiles import examples

PATH = LEASE.path("system", "operator")
SLACK = 0.01


def now() -> float:
    return round(asyncio.get_running_loop().time(), 6)


@dataclass(frozen=True)
class Disturbance:
    """What happens to a candidate's requests for some time."""

    kind: str
    start: float
    length: float

    @property
    def end(self) -> float:
        return self.start + self.length


@dataclass
class UnreliableClient:
    """A client whose requests are disturbed. A late request still arrives, even if nobody waits for its answer any more."""

    memory: MemoryApi
    disturbances: list[Disturbance]
    tasks: set[asyncio.Task] = field(default_factory=set)

    async def _go(self, call: Callable[[], Awaitable[JsonObject]]) -> JsonObject:
        kind = next(
            (disturbance.kind for disturbance in self.disturbances if disturbance.start <= now() < disturbance.end),
            "fine",
        )
        if kind == "refused":
            raise Unavailable(503, "not now")
        if kind == "hangs":
            await asyncio.sleep(1000)
        task = asyncio.ensure_future(
            self._arrive(call, 1.4 if kind == "slow there" else 4.0 if kind == "late" else 0.0)
        )
        self.tasks.add(task)
        task.add_done_callback(lambda item: item.cancelled() or item.exception())  # when nobody waits for it any more
        answer = await asyncio.shield(task)
        if kind == "slow back":
            await asyncio.sleep(1.4)
        if kind == "answer lost":
            raise Unavailable(0, "reset by peer")
        if kind == "odd":
            return {"kind": "Status", "status": "Success"}
        return answer

    async def _arrive(self, call: Callable[[], Awaitable[JsonObject]], after: float) -> JsonObject:
        await asyncio.sleep(after)
        return await call()

    def now(self):
        return self.memory.now()

    async def get(self, path, query=None, *, accept="") -> JsonObject:
        return await self._go(lambda: self.memory.get(path))

    async def post(self, path, body, query=None) -> JsonObject:
        return await self._go(lambda: self.memory.post(path, body))

    async def put(self, path, body) -> JsonObject:
        return await self._go(lambda: self.memory.put(path, body))


def released() -> MemoryApi:
    """An API server with a Lease that its holder has released."""
    memory = MemoryApi()
    spec = {"holderIdentity": "", "renewTime": "2026-01-01T00:00:00.000000Z", "leaseTransitions": 4}
    memory.place(PATH, {"metadata": {"name": "operator", "namespace": "system"}, "spec": spec})
    return memory


@dataclass
class Candidates:
    """Candidates that share one API server, with a record of which of them led when."""

    memory: MemoryApi = field(default_factory=released)
    working: list[str] = field(default_factory=list)
    max_working: int = 0
    terms: list[tuple[str, float]] = field(default_factory=list)

    def candidate(self, identity: str, *disturbances: Disturbance, ending: float = 0.0) -> Election:
        client = UnreliableClient(self.memory, list(disturbances))
        return Election(client, "system", "operator", identity, lambda: self._lead(identity, ending), now)

    async def _lead(self, identity: str, ending: float) -> None:
        """Work until cancelled, then take `ending` seconds to finish."""
        self.terms.append((identity, now()))
        self.working.append(identity)
        self.max_working = max(self.max_working, len(self.working))
        try:
            await asyncio.sleep(1e6)
        finally:
            await asyncio.sleep(ending)
            self.working.remove(identity)

    @property
    def lease(self) -> JsonObject:
        return self.memory.objects[PATH]["spec"]

    @property
    def version(self) -> int:
        return int(self.memory.objects[PATH]["metadata"]["resourceVersion"])

    def delete(self) -> None:
        """Delete the Lease, as an administrator would."""
        self.memory.objects.pop(PATH, None)

    def start(self, *elections: Election) -> list[asyncio.Task]:
        return [asyncio.ensure_future(election.run()) for election in elections]


async def stop(*tasks: asyncio.Task) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def test_the_first_makes_the_lease_waits_a_term_and_keeps_it() -> None:
    async def scenario() -> None:
        candidates = Candidates(MemoryApi())
        first, second = candidates.candidate("a"), candidates.candidate("b")
        tasks = candidates.start(first, second)
        await asyncio.sleep(LEASE_SECONDS - SLACK)
        assert candidates.lease["holderIdentity"] == "a"
        assert not first.leading
        await asyncio.sleep(90)
        assert candidates.terms == [("a", LEASE_SECONDS)]
        assert (first.leading, second.leading) == (True, False)
        assert candidates.lease["holderIdentity"] == "a"
        assert candidates.lease["leaseTransitions"] == 0
        assert candidates.lease["leaseDurationSeconds"] == LEASE_SECONDS
        await stop(*tasks)

    virtual.run(scenario())


@pytest.mark.parametrize("memory", [MemoryApi, released], ids=["no Lease", "a Lease"])
def test_answers_that_are_not_a_lease_are_waited_out(memory) -> None:
    """As from a proxy in front of the API server."""

    async def scenario() -> None:
        candidates = Candidates(memory())
        tasks = candidates.start(candidates.candidate("a", Disturbance("odd", 0, 5), Disturbance("odd", 30, 15)))
        await asyncio.sleep(29)
        assert candidates.working == ["a"]
        await asyncio.sleep(15)
        assert candidates.working == [], "it could not renew the Lease"
        await asyncio.sleep(20)
        assert candidates.working == ["a"]
        await stop(*tasks)

    virtual.run(scenario())


def test_after_a_silent_death_another_leads_within_duration_and_renew() -> None:
    async def scenario() -> None:
        candidates = Candidates()
        tasks = candidates.start(
            candidates.candidate("a", Disturbance("refused", 20.5, 1000)), candidates.candidate("b")
        )
        await asyncio.sleep(60)
        (_, (successor, at)) = candidates.terms
        assert successor == "b"
        assert 20.0 + LEASE_SECONDS <= at <= 20.0 + LEASE_SECONDS + RENEW_SECONDS + SLACK
        assert candidates.lease["leaseTransitions"] == 6
        await stop(*tasks)

    virtual.run(scenario())


def test_a_candidate_is_a_standby_while_another_holds_the_lease() -> None:
    async def scenario() -> None:
        candidates = Candidates()
        first, second = candidates.candidate("a", Disturbance("refused", 20.5, 1000)), candidates.candidate("b")
        tasks = candidates.start(first)
        await asyncio.sleep(SLACK)
        tasks += candidates.start(second)
        await asyncio.sleep(SLACK)
        assert candidates.lease["holderIdentity"] == "a"
        for _ in range(20):
            assert (first.is_standby, second.is_standby) == (False, True)
            await asyncio.sleep(0.5)
        await asyncio.sleep(40)
        assert candidates.working == ["b"]
        assert (first.is_standby, second.is_standby) == (False, False)
        third = candidates.candidate("c")
        tasks += candidates.start(third)
        await asyncio.sleep(2 * RENEW_SECONDS + SLACK)
        assert third.is_standby
        await stop(*tasks)

    virtual.run(scenario())


@pytest.mark.parametrize("starts_at", [0, 62], ids=["a standby", "a process that starts later"])
def test_a_new_leader_knows_a_version_from_before_the_last_renewals_of_the_dead_one(starts_at) -> None:
    """Changes since then are those on which the dead leader may not have acted."""

    async def scenario() -> None:
        candidates = Candidates()
        first, second = candidates.candidate("a", Disturbance("refused", 60.5, 1000)), candidates.candidate("b")
        tasks = candidates.start(first)
        versions: dict[float, int] = {}
        while second.known_version == 0:
            versions[now()] = candidates.version
            if now() == starts_at:
                tasks += candidates.start(second)
            await asyncio.sleep(0.25)
        last_renewal = max(versions.values())
        seen_at = min(time for time, version in versions.items() if version >= second.known_version)
        assert second.known_version < last_renewal
        assert 10 <= 60 - seen_at <= REMEMBERED_VERSIONS * RENEW_SECONDS + RENEW_SECONDS
        await stop(*tasks)

    virtual.run(scenario())


def test_a_leader_that_dies_soon_passes_on_the_version_that_it_was_given() -> None:
    """It may have acted on nothing yet."""

    async def scenario() -> None:
        candidates = Candidates()
        first, second = (
            candidates.candidate("a", Disturbance("refused", 60.5, 1000)),
            candidates.candidate("b", Disturbance("refused", 75.0, 1000)),
        )
        third = candidates.candidate("c")
        tasks = candidates.start(first, second)
        await asyncio.sleep(74)
        assert candidates.working == ["b"]
        tasks += candidates.start(third)
        await asyncio.sleep(30)
        assert candidates.working == ["c"]
        assert 0 < third.known_version == second.known_version
        await stop(*tasks)

    virtual.run(scenario())


@pytest.mark.parametrize("noted", [None, "", "a lot", "9" * 30, "-4"])
def test_a_lease_that_notes_no_version_is_known_up_to_its_own(noted) -> None:
    """Such as that of an earlier release of the operator."""

    async def scenario() -> None:
        candidates = Candidates()
        metadata = candidates.memory.objects[PATH]["metadata"]
        metadata["annotations"] = {"theirs": "x"} | ({} if noted is None else {KNOWN_VERSION: noted})
        version, first = candidates.version, candidates.candidate("a")
        tasks = candidates.start(first)
        await asyncio.sleep(SLACK)
        assert first.known_version == version
        annotations = candidates.memory.objects[PATH]["metadata"]["annotations"]
        assert annotations == {"theirs": "x", KNOWN_VERSION: str(version)}
        await stop(*tasks)

    virtual.run(scenario())


def test_who_creates_the_lease_knows_everything_up_to_then() -> None:
    async def scenario() -> None:
        candidates = Candidates(MemoryApi())
        first = candidates.candidate("a")
        tasks = candidates.start(first)
        await asyncio.sleep(SLACK)
        assert first.known_version == candidates.version > 0
        await stop(*tasks)

    virtual.run(scenario())


def test_the_lease_of_a_process_that_has_ended_makes_a_standby_only_until_that_is_known() -> None:
    """With one replica, the process that starts again reads the Lease of the one before it."""

    async def scenario() -> None:
        candidates = Candidates()
        (dead,) = candidates.start(candidates.candidate("a", Disturbance("refused", 20.5, 1000)))
        await asyncio.sleep(21)
        next_one = candidates.candidate("b")
        tasks = candidates.start(next_one)
        await asyncio.sleep(SLACK)
        assert next_one.is_standby
        await asyncio.sleep(UNDECIDED_SECONDS)
        for _ in range(20):
            assert not next_one.is_standby
            await asyncio.sleep(0.5)
        assert candidates.working == ["b"]
        await stop(dead, *tasks)

    virtual.run(scenario())


def test_a_stopped_leader_releases_the_lease_immediately() -> None:
    async def scenario() -> None:
        candidates = Candidates()
        (first,) = candidates.start(candidates.candidate("a", ending=1.0))
        (second,) = candidates.start(candidates.candidate("b"))
        await asyncio.sleep(50)
        await stop(first)
        assert candidates.lease["holderIdentity"] == ""
        assert now() == pytest.approx(51.0)
        await asyncio.sleep(RENEW_SECONDS + SLACK)
        assert [identity for identity, _ in candidates.terms] == ["a", "b"]
        await stop(second)

    virtual.run(scenario())


def test_a_standby_that_is_stopped_leaves_the_lease_alone() -> None:
    async def scenario() -> None:
        candidates = Candidates()
        leader, standby = candidates.start(candidates.candidate("a"), candidates.candidate("b"))
        await asyncio.sleep(20)
        await stop(standby)
        assert candidates.lease["holderIdentity"] == "a"
        await stop(leader)

    virtual.run(scenario())


@pytest.mark.parametrize("kind", ["refused", "hangs", "late"])
def test_a_leader_that_cannot_renew_stops_before_anybody_else_may_start(kind) -> None:
    async def scenario() -> None:
        candidates = Candidates()
        (task,) = candidates.start(
            candidates.candidate("a", Disturbance(kind, 20.5, 1000), ending=LEASE_SECONDS - GIVE_UP_SECONDS - 0.5)
        )
        await asyncio.sleep(20.5 + GIVE_UP_SECONDS - RENEW_SECONDS)
        assert candidates.working == ["a"]
        await asyncio.sleep(LEASE_SECONDS - GIVE_UP_SECONDS + RENEW_SECONDS - 0.5)
        assert now() == 20 + LEASE_SECONDS
        assert candidates.working == []
        await stop(task)

    virtual.run(scenario())


@pytest.mark.parametrize(
    "absence", [Disturbance("refused", 20.5, 6), Disturbance("hangs", 20.5, 4.5)], ids=lambda item: item.kind
)
def test_a_short_absence_of_the_server_ends_no_term(absence) -> None:
    async def scenario() -> None:
        candidates = Candidates()
        tasks = candidates.start(candidates.candidate("a", absence), candidates.candidate("b"))
        await asyncio.sleep(100)
        assert candidates.terms == [("a", 0.0)]
        await stop(*tasks)

    virtual.run(scenario())


def test_a_term_counts_from_when_the_lease_was_asked_for() -> None:
    """The write may have been carried out long before its answer comes."""

    async def scenario() -> None:
        candidates = Candidates()
        slow = [Disturbance("slow back", 0, 1.45), Disturbance("hangs", 1.5, 1000)]
        tasks = candidates.start(candidates.candidate("a", *slow, ending=LEASE_SECONDS - GIVE_UP_SECONDS - 0.5))
        await asyncio.sleep(1.5)
        tasks += candidates.start(candidates.candidate("b"))
        await asyncio.sleep(40)
        assert [identity for identity, _ in candidates.terms] == ["a", "b"]
        assert candidates.max_working == 1
        await stop(*tasks)

    virtual.run(scenario())


def test_of_two_that_take_an_expired_lease_one_gets_it() -> None:
    async def scenario() -> None:
        candidates = Candidates()
        candidates.memory.objects[PATH]["spec"]["holderIdentity"] = "dead"
        tasks = candidates.start(*(candidates.candidate(name, Disturbance("slow there", 0, 14)) for name in "ab"))
        await asyncio.sleep(40)
        assert len(candidates.terms) == 1, candidates.terms
        assert candidates.terms[0][1] >= LEASE_SECONDS
        assert candidates.lease["leaseTransitions"] == 5
        await stop(*tasks)

    virtual.run(scenario())


@pytest.mark.parametrize("holder", ["", None])
def test_a_lease_that_was_released_is_taken_immediately(holder) -> None:
    async def scenario() -> None:
        candidates = Candidates()
        candidates.memory.objects[PATH]["spec"]["holderIdentity"] = holder
        tasks = candidates.start(candidates.candidate("a"))
        await asyncio.sleep(0.1)
        assert candidates.terms == [("a", 0.0)]
        assert candidates.lease["leaseTransitions"] == 5
        await stop(*tasks)

    virtual.run(scenario())


@pytest.mark.parametrize("spec", [{}, None, {"holderIdentity": ""}, {"leaseTransitions": 4}])
def test_a_lease_that_nobody_has_held_is_taken_and_waited_for_as_one_of_ones_own(spec) -> None:
    """Somebody may have put it there in the place of one that he deleted."""

    async def scenario() -> None:
        candidates = Candidates()
        candidates.memory.place(PATH, {"metadata": {"name": "operator", "namespace": "system"}, "spec": spec})
        tasks = candidates.start(candidates.candidate("a"))
        await asyncio.sleep(0.1)
        assert (candidates.lease["holderIdentity"], candidates.lease["leaseTransitions"]) == ("a", 0)
        await asyncio.sleep(LEASE_SECONDS)
        assert candidates.terms == [("a", LEASE_SECONDS)]
        await stop(*tasks)

    virtual.run(scenario())


@pytest.mark.parametrize("others", [0, 1, 2])
def test_when_the_lease_is_deleted_the_leader_stops_and_the_next_one_waits_a_term(others) -> None:
    async def scenario() -> None:
        candidates = Candidates()
        tasks = candidates.start(
            *(candidates.candidate(name, ending=LEASE_SECONDS - GIVE_UP_SECONDS - 0.5) for name in "abc"[: others + 1])
        )
        await asyncio.sleep(21.5)
        candidates.delete()
        await asyncio.sleep(RENEW_SECONDS + SLACK)
        assert candidates.terms == [("a", 0.0)]
        ended = now()
        await asyncio.sleep(LEASE_SECONDS - GIVE_UP_SECONDS)
        assert candidates.working == []
        await asyncio.sleep(LEASE_SECONDS + 2 * RENEW_SECONDS)
        ((_, began),) = candidates.terms[1:]
        assert began >= 21.5 + LEASE_SECONDS
        assert began <= ended + LEASE_SECONDS - GIVE_UP_SECONDS + RENEW_SECONDS + LEASE_SECONDS + SLACK
        assert candidates.max_working == 1
        await stop(*tasks)

    virtual.run(scenario())


@pytest.mark.parametrize("kind", ["refused", "hangs", "late", "slow back"])
def test_a_leader_that_does_not_hear_of_the_deletion_has_stopped_when_the_next_one_starts(kind) -> None:
    async def scenario() -> None:
        candidates = Candidates()
        ending = LEASE_SECONDS - GIVE_UP_SECONDS - 0.5
        tasks = candidates.start(candidates.candidate("a", Disturbance(kind, 20.5, 1000), ending=ending))
        await asyncio.sleep(0.1)
        tasks += candidates.start(candidates.candidate("b", ending=ending))
        await asyncio.sleep(20.6)
        candidates.delete()
        await asyncio.sleep(40)
        assert [identity for identity, _ in candidates.terms] == ["a", "b"]
        assert candidates.max_working == 1
        await stop(*tasks)

    virtual.run(scenario())


def test_who_has_made_the_lease_and_does_not_work_yet_does_not_release_it() -> None:
    """It would say that the work of the one before has ended."""

    async def scenario() -> None:
        candidates = Candidates()
        tasks = candidates.start(
            candidates.candidate("a", Disturbance("hangs", 20.5, 1000), ending=LEASE_SECONDS - GIVE_UP_SECONDS - 0.5)
        )
        await asyncio.sleep(20.6)
        candidates.delete()
        (successor,) = candidates.start(candidates.candidate("b"))
        await asyncio.sleep(1)
        await stop(successor)
        assert candidates.lease["holderIdentity"] == "b"
        tasks += candidates.start(candidates.candidate("c"))
        await asyncio.sleep(40)
        assert [identity for identity, _ in candidates.terms] == ["a", "c"]
        assert candidates.max_working == 1
        await stop(*tasks)

    virtual.run(scenario())


def test_a_lease_whose_creation_was_not_answered_is_still_waited_for() -> None:
    async def scenario() -> None:
        candidates = Candidates()
        tasks = candidates.start(
            candidates.candidate("a", Disturbance("hangs", 20.5, 1000), ending=LEASE_SECONDS - GIVE_UP_SECONDS - 0.5)
        )
        await asyncio.sleep(20.6)
        candidates.delete()
        tasks += candidates.start(candidates.candidate("b", Disturbance("answer lost", 0, 21)))
        await asyncio.sleep(40)
        ((identity, began),) = candidates.terms[1:]
        assert identity == "b"
        assert began >= 20.6 + LEASE_SECONDS
        assert candidates.max_working == 1
        await stop(*tasks)

    virtual.run(scenario())


def test_who_finds_its_lease_with_another_stops() -> None:
    async def scenario() -> None:
        candidates = Candidates()
        (task,) = candidates.start(candidates.candidate("a"))
        await asyncio.sleep(20.5)
        stolen = {**candidates.memory.objects[PATH], "spec": {"holderIdentity": "thief"}}
        candidates.memory.place(PATH, stolen)
        await asyncio.sleep(RENEW_SECONDS)
        assert candidates.working == []
        assert candidates.lease["holderIdentity"] == "thief"  # and is not released by the one who lost it
        await stop(task)

    virtual.run(scenario())


def test_when_the_work_fails_the_lease_is_released_and_the_error_raised() -> None:
    async def broken() -> None:
        await asyncio.sleep(5)
        raise RuntimeError("a bug")

    async def scenario() -> None:
        candidates = Candidates()
        election = Election(UnreliableClient(candidates.memory, []), "system", "operator", "a", broken, now)
        with pytest.raises(RuntimeError, match="a bug"):
            await election.run()
        assert now() == 5
        assert candidates.lease["holderIdentity"] == ""
        assert not election.leading

    virtual.run(scenario())


def test_a_server_that_is_away_does_not_hold_up_the_end() -> None:
    async def scenario() -> None:
        candidates = Candidates()
        (task,) = candidates.start(candidates.candidate("a", Disturbance("hangs", 20.5, 1000)))
        await asyncio.sleep(21)
        await stop(task)
        assert now() <= 21 + REQUEST_SECONDS + SLACK

    virtual.run(scenario())


KINDS = ["refused", "hangs", "slow there", "slow back", "late", "answer lost"]
DISTURBANCES = st.builds(
    Disturbance,
    st.sampled_from(KINDS),
    st.integers(0, 120).map(lambda half: half / 2 + 0.1),
    st.sampled_from([0.5, 1.0, 2.0, 3.0, 8.0, 12.0, 30.0]),
)


MOMENTS = st.integers(0, 400).map(lambda tenth: tenth / 10 + 0.05)


@settings(max_examples=examples(200))
@given(
    schedules=st.lists(st.lists(DISTURBANCES, max_size=4), min_size=2, max_size=3),
    starts=st.lists(st.integers(0, 30).map(lambda tenth: tenth / 10), min_size=3, max_size=3),
    ending=st.sampled_from([0.0, 1.0, LEASE_SECONDS - GIVE_UP_SECONDS - 0.5]),
    stopped=st.none() | st.integers(5, 70),
    deleted=st.lists(MOMENTS, max_size=3).map(sorted),
    memory=st.sampled_from([MemoryApi, released]),
)
def test_there_are_never_two_leaders_and_in_fair_weather_there_is_one(
    schedules, starts, ending, stopped, deleted, memory
) -> None:
    """Even if somebody deletes the Lease at arbitrary times."""

    async def scenario() -> None:
        candidates = Candidates(memory())
        for moment in deleted:
            asyncio.get_running_loop().call_later(moment, candidates.delete)
        elections = [
            candidates.candidate(name, *disturbances, ending=ending)
            for name, disturbances in zip("abc", schedules, strict=False)
        ]
        tasks = [
            asyncio.ensure_future(_later(start, election)) for election, start in zip(elections, starts, strict=False)
        ]
        if stopped is not None:
            await asyncio.sleep(stopped)
            await stop(tasks.pop(0))
        clear = max(
            [disturbance.end for disturbances in schedules for disturbance in disturbances] + starts + deleted,
            default=0.0,
        )
        await asyncio.sleep(max(0.0, clear - now()) + 2 * LEASE_SECONDS + 3 * RENEW_SECONDS + 4 * REQUEST_SECONDS)
        assert candidates.max_working <= 1
        assert len(candidates.working) == 1
        await stop(*tasks)

    virtual.run(scenario())


async def _later(start: float, election: Election) -> None:
    await asyncio.sleep(start)
    await election.run()


def test_a_leader_that_stood_still_may_not_write_before_it_has_renewed_the_lease() -> None:
    """Its machine was paused: the reconcile in progress may continue before the election notices."""

    async def scenario() -> None:
        candidates, pause = Candidates(), 0.0
        leader = candidates.candidate("a")
        leader.clock = lambda: now() + pause
        assert not leader.may_write()
        (task,) = candidates.start(leader)
        await asyncio.sleep(RENEW_SECONDS * 10.5)
        assert leader.may_write()
        pause = GIVE_UP_SECONDS - RENEW_SECONDS
        assert leader.may_write(), "another cannot lead yet"
        pause = GIVE_UP_SECONDS
        assert (leader.leading, leader.may_write()) == (True, False)
        await asyncio.sleep(RENEW_SECONDS * 5)
        assert not leader.may_write() or candidates.lease["holderIdentity"] == "a"
        await stop(task)
        assert not leader.may_write()

    virtual.run(scenario())

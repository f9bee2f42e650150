"""Of several candidates at most one leads, whatever the way to the API server does to their requests.

Time is virtual: a minute of elections takes a millisecond.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen35_operator.kube.client import Json
from qwen35_operator.kube.errors import Unavailable
from qwen35_operator.kube.kinds import LEASE
from qwen35_operator.kube.lease import CALL, DURATION, GIVE_UP, RENEW, Election
from tests.operator.kube import virtual
from tests.operator.kube.memory import Memory
from tests.profiles import examples

PATH = LEASE.path("system", "operator")
SLACK = 0.01


def now() -> float:
    return round(asyncio.get_running_loop().time(), 6)


@dataclass(frozen=True)
class Spell:
    """For a while, what becomes of a candidate's requests."""

    kind: str
    start: float
    length: float

    @property
    def end(self) -> float:
        return self.start + self.length


@dataclass
class Way:
    """To the API server and back. A request that is late arrives all the same, also when nobody waits for its answer."""

    memory: Memory
    spells: list[Spell]
    tasks: set[asyncio.Task] = field(default_factory=set)

    async def _go(self, call: Callable[[], Awaitable[Json]]) -> Json:
        kind = next((spell.kind for spell in self.spells if spell.start <= now() < spell.end), "fine")
        if kind == "refused":
            raise Unavailable(503, "not now")
        if kind == "hangs":
            await asyncio.sleep(1000)
        task = asyncio.ensure_future(
            self._arrive(call, 1.4 if kind == "slow there" else 4.0 if kind == "late" else 0.0)
        )
        self.tasks.add(task)
        task.add_done_callback(lambda one: one.cancelled() or one.exception())  # when nobody waits for it any more
        answer = await asyncio.shield(task)
        if kind == "slow back":
            await asyncio.sleep(1.4)
        if kind == "answer lost":
            raise Unavailable(0, "reset by peer")
        return answer

    async def _arrive(self, call: Callable[[], Awaitable[Json]], after: float) -> Json:
        await asyncio.sleep(after)
        return await call()

    def now(self):
        return self.memory.now()

    async def get(self, path, query=None, *, accept="") -> Json:
        return await self._go(lambda: self.memory.get(path))

    async def post(self, path, body, query=None) -> Json:
        return await self._go(lambda: self.memory.post(path, body))

    async def put(self, path, body) -> Json:
        return await self._go(lambda: self.memory.put(path, body))


def released() -> Memory:
    """With a Lease whose holder has said that its work is done."""
    memory = Memory()
    spec = {"holderIdentity": "", "renewTime": "2026-01-01T00:00:00.000000Z", "leaseTransitions": 4}
    memory.place(PATH, {"metadata": {"name": "operator"}, "spec": spec})
    return memory


@dataclass
class Room:
    """Candidates before one API server, and a log of who led when."""

    memory: Memory = field(default_factory=released)
    working: list[str] = field(default_factory=list)
    most: int = 0
    terms: list[tuple[str, float]] = field(default_factory=list)

    def candidate(self, identity: str, *spells: Spell, ending: float = 0.0) -> Election:
        way = Way(self.memory, list(spells))
        return Election(way, "system", "operator", identity, lambda: self._lead(identity, ending), now)

    async def _lead(self, identity: str, ending: float) -> None:
        """Works until called off, and then takes a while to end what is in hand."""
        self.terms.append((identity, now()))
        self.working.append(identity)
        self.most = max(self.most, len(self.working))
        try:
            await asyncio.sleep(1e6)
        finally:
            await asyncio.sleep(ending)
            self.working.remove(identity)

    @property
    def lease(self) -> Json:
        return self.memory.objects[PATH]["spec"]

    def delete(self) -> None:
        """Somebody deletes the Lease."""
        self.memory.objects.pop(PATH, None)

    def start(self, *elections: Election) -> list[asyncio.Task]:
        return [asyncio.ensure_future(election.run()) for election in elections]


async def stop(*tasks: asyncio.Task) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def test_the_first_makes_the_lease_waits_a_term_and_keeps_it() -> None:
    async def story() -> None:
        room = Room(Memory())
        first, second = room.candidate("a"), room.candidate("b")
        tasks = room.start(first, second)
        await asyncio.sleep(DURATION - SLACK)
        assert room.lease["holderIdentity"] == "a"
        assert not first.leading
        await asyncio.sleep(90)
        assert room.terms == [("a", DURATION)]
        assert (first.leading, second.leading) == (True, False)
        assert room.lease["holderIdentity"] == "a"
        assert room.lease["leaseTransitions"] == 0
        assert room.lease["leaseDurationSeconds"] == DURATION
        await stop(*tasks)

    virtual.run(story())


def test_after_a_silent_death_another_leads_within_duration_and_renew() -> None:
    async def story() -> None:
        room = Room()
        tasks = room.start(room.candidate("a", Spell("refused", 20.5, 1000)), room.candidate("b"))
        await asyncio.sleep(60)
        (_, (heir, at)) = room.terms
        assert heir == "b"
        assert 20.0 + DURATION <= at <= 20.0 + DURATION + RENEW + SLACK
        assert room.lease["leaseTransitions"] == 6
        await stop(*tasks)

    virtual.run(story())


def test_who_is_stopped_hands_over_at_once() -> None:
    async def story() -> None:
        room = Room()
        (first,) = room.start(room.candidate("a", ending=1.0))
        (second,) = room.start(room.candidate("b"))
        await asyncio.sleep(50)
        await stop(first)
        assert room.lease["holderIdentity"] == ""
        assert now() == pytest.approx(51.0)
        await asyncio.sleep(RENEW + SLACK)
        assert [identity for identity, _ in room.terms] == ["a", "b"]
        await stop(second)

    virtual.run(story())


def test_a_standby_that_is_stopped_leaves_the_lease_alone() -> None:
    async def story() -> None:
        room = Room()
        leader, standby = room.start(room.candidate("a"), room.candidate("b"))
        await asyncio.sleep(20)
        await stop(standby)
        assert room.lease["holderIdentity"] == "a"
        await stop(leader)

    virtual.run(story())


@pytest.mark.parametrize("kind", ["refused", "hangs", "late"])
def test_a_leader_that_cannot_renew_stops_before_anybody_else_may_start(kind) -> None:
    async def story() -> None:
        room = Room()
        (task,) = room.start(room.candidate("a", Spell(kind, 20.5, 1000), ending=DURATION - GIVE_UP - 0.5))
        await asyncio.sleep(20.5 + GIVE_UP - RENEW)
        assert room.working == ["a"]
        await asyncio.sleep(DURATION - GIVE_UP + RENEW - 0.5)
        assert now() == 20 + DURATION
        assert room.working == []
        await stop(task)

    virtual.run(story())


@pytest.mark.parametrize("absence", [Spell("refused", 20.5, 6), Spell("hangs", 20.5, 4.5)], ids=lambda one: one.kind)
def test_a_short_absence_of_the_server_ends_no_term(absence) -> None:
    async def story() -> None:
        room = Room()
        tasks = room.start(room.candidate("a", absence), room.candidate("b"))
        await asyncio.sleep(100)
        assert room.terms == [("a", 0.0)]
        await stop(*tasks)

    virtual.run(story())


def test_a_term_counts_from_when_the_lease_was_asked_for() -> None:
    """The write may have been carried out long before its answer comes."""

    async def story() -> None:
        room = Room()
        slow = [Spell("slow back", 0, 1.45), Spell("hangs", 1.5, 1000)]
        tasks = room.start(room.candidate("a", *slow, ending=DURATION - GIVE_UP - 0.5))
        await asyncio.sleep(1.5)
        tasks += room.start(room.candidate("b"))
        await asyncio.sleep(40)
        assert [identity for identity, _ in room.terms] == ["a", "b"]
        assert room.most == 1
        await stop(*tasks)

    virtual.run(story())


def test_of_two_that_take_an_expired_lease_one_gets_it() -> None:
    async def story() -> None:
        room = Room()
        room.memory.objects[PATH]["spec"]["holderIdentity"] = "dead"
        tasks = room.start(*(room.candidate(name, Spell("slow there", 0, 14)) for name in "ab"))
        await asyncio.sleep(40)
        assert len(room.terms) == 1, room.terms
        assert room.terms[0][1] >= DURATION
        assert room.lease["leaseTransitions"] == 5
        await stop(*tasks)

    virtual.run(story())


@pytest.mark.parametrize("holder", ["", None])
def test_a_lease_that_was_released_is_taken_at_once(holder) -> None:
    async def story() -> None:
        room = Room()
        room.memory.objects[PATH]["spec"]["holderIdentity"] = holder
        tasks = room.start(room.candidate("a"))
        await asyncio.sleep(0.1)
        assert room.terms == [("a", 0.0)]
        assert room.lease["leaseTransitions"] == 5
        await stop(*tasks)

    virtual.run(story())


@pytest.mark.parametrize("spec", [{}, None, {"holderIdentity": ""}, {"leaseTransitions": 4}])
def test_a_lease_that_nobody_has_held_is_taken_and_waited_for_as_one_of_ones_own(spec) -> None:
    """Somebody may have put it there in the place of one that he deleted."""

    async def story() -> None:
        room = Room()
        room.memory.place(PATH, {"metadata": {"name": "operator"}, "spec": spec})
        tasks = room.start(room.candidate("a"))
        await asyncio.sleep(0.1)
        assert (room.lease["holderIdentity"], room.lease["leaseTransitions"]) == ("a", 0)
        await asyncio.sleep(DURATION)
        assert room.terms == [("a", DURATION)]
        await stop(*tasks)

    virtual.run(story())


@pytest.mark.parametrize("others", [0, 1, 2])
def test_when_the_lease_is_deleted_the_leader_stops_and_the_next_one_waits_a_term(others) -> None:
    async def story() -> None:
        room = Room()
        tasks = room.start(*(room.candidate(name, ending=DURATION - GIVE_UP - 0.5) for name in "abc"[: others + 1]))
        await asyncio.sleep(21.5)
        room.delete()
        await asyncio.sleep(RENEW + SLACK)
        assert room.terms == [("a", 0.0)]
        ended = now()
        await asyncio.sleep(DURATION - GIVE_UP)
        assert room.working == []
        await asyncio.sleep(DURATION + 2 * RENEW)
        ((_, began),) = room.terms[1:]
        assert began >= 21.5 + DURATION
        assert began <= ended + DURATION - GIVE_UP + RENEW + DURATION + SLACK
        assert room.most == 1
        await stop(*tasks)

    virtual.run(story())


@pytest.mark.parametrize("kind", ["refused", "hangs", "late", "slow back"])
def test_a_leader_that_does_not_hear_of_the_deletion_has_stopped_when_the_next_one_starts(kind) -> None:
    async def story() -> None:
        room = Room()
        ending = DURATION - GIVE_UP - 0.5
        tasks = room.start(room.candidate("a", Spell(kind, 20.5, 1000), ending=ending))
        await asyncio.sleep(0.1)
        tasks += room.start(room.candidate("b", ending=ending))
        await asyncio.sleep(20.6)
        room.delete()
        await asyncio.sleep(40)
        assert [identity for identity, _ in room.terms] == ["a", "b"]
        assert room.most == 1
        await stop(*tasks)

    virtual.run(story())


def test_who_has_made_the_lease_and_does_not_work_yet_does_not_release_it() -> None:
    """It would say that the work of the one before has ended."""

    async def story() -> None:
        room = Room()
        tasks = room.start(room.candidate("a", Spell("hangs", 20.5, 1000), ending=DURATION - GIVE_UP - 0.5))
        await asyncio.sleep(20.6)
        room.delete()
        (heir,) = room.start(room.candidate("b"))
        await asyncio.sleep(1)
        await stop(heir)
        assert room.lease["holderIdentity"] == "b"
        tasks += room.start(room.candidate("c"))
        await asyncio.sleep(40)
        assert [identity for identity, _ in room.terms] == ["a", "c"]
        assert room.most == 1
        await stop(*tasks)

    virtual.run(story())


def test_a_lease_whose_making_was_not_answered_is_waited_for_all_the_same() -> None:
    async def story() -> None:
        room = Room()
        tasks = room.start(room.candidate("a", Spell("hangs", 20.5, 1000), ending=DURATION - GIVE_UP - 0.5))
        await asyncio.sleep(20.6)
        room.delete()
        tasks += room.start(room.candidate("b", Spell("answer lost", 0, 21)))
        await asyncio.sleep(40)
        ((identity, began),) = room.terms[1:]
        assert identity == "b"
        assert began >= 20.6 + DURATION
        assert room.most == 1
        await stop(*tasks)

    virtual.run(story())


def test_who_finds_its_lease_with_another_stops() -> None:
    async def story() -> None:
        room = Room()
        (task,) = room.start(room.candidate("a"))
        await asyncio.sleep(20.5)
        stolen = {**room.memory.objects[PATH], "spec": {"holderIdentity": "thief"}}
        room.memory.place(PATH, stolen)
        await asyncio.sleep(RENEW)
        assert room.working == []
        assert room.lease["holderIdentity"] == "thief"  # and is not released by the one who lost it
        await stop(task)

    virtual.run(story())


def test_when_the_work_fails_the_lease_is_released_and_the_error_told() -> None:
    async def broken() -> None:
        await asyncio.sleep(5)
        raise RuntimeError("a bug")

    async def story() -> None:
        room = Room()
        election = Election(Way(room.memory, []), "system", "operator", "a", broken, now)
        with pytest.raises(RuntimeError, match="a bug"):
            await election.run()
        assert now() == 5
        assert room.lease["holderIdentity"] == ""
        assert not election.leading

    virtual.run(story())


def test_a_server_that_is_away_does_not_hold_up_the_end() -> None:
    async def story() -> None:
        room = Room()
        (task,) = room.start(room.candidate("a", Spell("hangs", 20.5, 1000)))
        await asyncio.sleep(21)
        await stop(task)
        assert now() <= 21 + CALL + SLACK

    virtual.run(story())


KINDS = ["refused", "hangs", "slow there", "slow back", "late", "answer lost"]
SPELLS = st.builds(
    Spell,
    st.sampled_from(KINDS),
    st.integers(0, 120).map(lambda half: half / 2 + 0.1),
    st.sampled_from([0.5, 1.0, 2.0, 3.0, 8.0, 12.0, 30.0]),
)


MOMENTS = st.integers(0, 400).map(lambda tenth: tenth / 10 + 0.05)


@settings(max_examples=examples(200))
@given(
    ways=st.lists(st.lists(SPELLS, max_size=4), min_size=2, max_size=3),
    starts=st.lists(st.integers(0, 30).map(lambda tenth: tenth / 10), min_size=3, max_size=3),
    ending=st.sampled_from([0.0, 1.0, DURATION - GIVE_UP - 0.5]),
    stopped=st.none() | st.integers(5, 70),
    deleted=st.lists(MOMENTS, max_size=3).map(sorted),
    memory=st.sampled_from([Memory, released]),
)
def test_there_are_never_two_leaders_and_in_fair_weather_there_is_one(
    ways, starts, ending, stopped, deleted, memory
) -> None:
    """Though people delete the Lease as they like."""

    async def story() -> None:
        room = Room(memory())
        for moment in deleted:
            asyncio.get_running_loop().call_later(moment, room.delete)
        elections = [room.candidate(name, *spells, ending=ending) for name, spells in zip("abc", ways, strict=False)]
        tasks = [
            asyncio.ensure_future(_later(start, election)) for election, start in zip(elections, starts, strict=False)
        ]
        if stopped is not None:
            await asyncio.sleep(stopped)
            await stop(tasks.pop(0))
        clear = max([spell.end for spells in ways for spell in spells] + starts + deleted, default=0.0)
        await asyncio.sleep(max(0.0, clear - now()) + 2 * DURATION + 3 * RENEW + 4 * CALL)
        assert room.most <= 1
        assert len(room.working) == 1
        await stop(*tasks)

    virtual.run(story())


async def _later(start: float, election: Election) -> None:
    await asyncio.sleep(start)
    await election.run()

"""A process that starts while another leads takes little from the API server. Time is virtual."""

import asyncio
import itertools
from collections.abc import Callable
from contextlib import suppress

import pytest

from qwen35_operator.kube.list_pace import MAX_PACED_SECONDS, MAX_PAUSE_SECONDS, PAUSES, TURN_SECONDS, ListPace
from tests.operator.kube import virtual

PAGE_SECONDS = 0.1
PAGES, LISTS = 5, 8


def now() -> float:
    return asyncio.get_running_loop().time()


def pace(is_standby: Callable[[], bool]) -> ListPace:
    """That of a process which holds the Lease when no other one does."""
    return ListPace(lambda: not is_standby(), is_standby, now)


async def _list(pace: ListPace, pages: list[tuple[float, float]]) -> None:
    """List in pages, and note when each page began and ended."""
    async with pace.turn():
        for _ in range(PAGES):
            began = now()
            await asyncio.sleep(PAGE_SECONDS)
            pages.append((began, now()))
            await pace.pause(PAGE_SECONDS)


async def _all_lists(pace: ListPace) -> list[tuple[float, float]]:
    pages: list[tuple[float, float]] = []
    await asyncio.gather(*(_list(pace, pages) for _ in range(LISTS)))
    return sorted(pages)


def test_a_standby_requests_one_page_at_a_time_and_pauses_after_each() -> None:
    async def scenario() -> None:
        pages = await _all_lists(pace(lambda: True))
        assert len(pages) == PAGES * LISTS
        pauses = [began - ended for (_, ended), (began, _) in itertools.pairwise(pages)]
        assert min(pauses) > 0.99 * PAUSES * PAGE_SECONDS

    virtual.run(scenario())


def test_before_it_has_seen_a_leader_a_process_requests_one_page_at_a_time_without_pauses() -> None:
    async def scenario() -> None:
        pages = await _all_lists(ListPace(lambda: False, lambda: False, now))
        pauses = [began - ended for (_, ended), (began, _) in itertools.pairwise(pages)]
        assert min(pauses) >= 0
        assert max(pauses) < 0.01 * PAGE_SECONDS

    virtual.run(scenario())


@pytest.mark.parametrize("make", [ListPace, lambda: pace(lambda: False)], ids=["default", "leader"])
def test_other_processes_list_everything_at_the_same_time(make) -> None:
    async def scenario() -> None:
        pages = await _all_lists(make())
        assert pages[-1][1] < 1.01 * PAGES * PAGE_SECONDS

    virtual.run(scenario())


def test_when_a_standby_becomes_the_leader_its_lists_do_not_wait_for_each_other_any_more() -> None:
    async def scenario() -> None:
        leads_at = 1.0
        pages = await _all_lists(pace(lambda: now() < leads_at))
        after = pages[-1][1] - leads_at
        assert after < 1.01 * (PAGE_SECONDS + PAUSES * PAGE_SECONDS + PAGES * PAGE_SECONDS)

    virtual.run(scenario())


def test_a_page_without_an_answer_holds_up_the_others_only_while_another_process_leads() -> None:
    async def scenario() -> None:
        leads_at = 3.0
        paces, pages = pace(lambda: now() < leads_at), []

        async def hang() -> None:
            async with paces.turn():
                await asyncio.sleep(15.0)
                raise TimeoutError

        hanging = asyncio.ensure_future(hang())
        await asyncio.sleep(0.01)
        await asyncio.gather(*(_list(paces, pages) for _ in range(LISTS)))
        assert leads_at < min(began for began, _ in pages)
        assert max(ended for _, ended in pages) < leads_at + TURN_SECONDS + 1.1 * PAGES * PAGE_SECONDS
        await asyncio.wait({hanging})

    virtual.run(scenario())


def test_a_slow_page_delays_the_next_one_for_a_limited_time() -> None:
    async def scenario() -> None:
        await pace(lambda: True).pause(1000.0)
        assert now() < 1.01 * MAX_PAUSE_SECONDS

    virtual.run(scenario())


def test_a_list_that_fails_ends_its_turn() -> None:
    async def scenario() -> None:
        failing = pace(lambda: True)
        for _ in range(3):
            with suppress(ConnectionError):
                async with failing.turn():
                    await asyncio.sleep(PAGE_SECONDS)
                    raise ConnectionError
        assert now() < 3.01 * PAGE_SECONDS

    virtual.run(scenario())


def test_pages_are_paced_for_a_limited_time() -> None:
    """The API server would have forgotten the events since the list began, and the list would begin again."""

    async def scenario() -> None:
        slow = pace(lambda: True)
        for _ in range(1000):
            await slow.pause(1.0)
        assert now() < 1.01 * (MAX_PACED_SECONDS + MAX_PAUSE_SECONDS)
        assert (await _all_lists(slow))[-1][1] < now() + 1.01 * PAGES * PAGE_SECONDS

    virtual.run(scenario())

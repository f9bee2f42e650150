"""A process that starts while another leads takes little from the API server. Time is virtual."""

import asyncio
import itertools
from contextlib import suppress

from qwen35_operator.kube.list_pace import MAX_PAUSE_SECONDS, MAX_PAUSES_SECONDS, PAUSES, ListPace
from tests.operator.kube import virtual

PAGE_SECONDS = 0.1
PAGES, LISTS = 5, 8


async def _list(pace: ListPace, pages: list[tuple[float, float]]) -> None:
    """List in pages, and note when each page began and ended."""
    time = asyncio.get_running_loop().time
    for _ in range(PAGES):
        async with pace.page():
            began = time()
            await asyncio.sleep(PAGE_SECONDS)
            pages.append((began, time()))


async def _all_lists(pace: ListPace) -> list[tuple[float, float]]:
    pages: list[tuple[float, float]] = []
    await asyncio.gather(*(_list(pace, pages) for _ in range(LISTS)))
    return sorted(pages)


def test_a_standby_lists_one_page_at_a_time_and_pauses_after_each() -> None:
    pages = virtual.run(_all_lists(ListPace(lambda: True)))
    assert len(pages) == PAGES * LISTS
    pauses = [began - ended for (_, ended), (began, _) in itertools.pairwise(pages)]
    assert min(pauses) > 0.99 * PAUSES * PAGE_SECONDS


def test_other_processes_list_everything_at_the_same_time() -> None:
    for pace in (ListPace(), ListPace(lambda: False)):
        assert virtual.run(_all_lists(pace))[-1][1] < 1.01 * PAGES * PAGE_SECONDS


def test_a_standby_that_becomes_the_leader_pauses_no_more() -> None:
    async def scenario() -> float:
        time, leads_at = asyncio.get_running_loop().time, 1.0
        pages = await _all_lists(ListPace(lambda: time() < leads_at))
        return pages[-1][1] - leads_at

    assert virtual.run(scenario()) < PAUSES * PAGE_SECONDS + (PAGES + LISTS) * PAGE_SECONDS


def test_a_slow_page_delays_the_next_one_for_a_limited_time() -> None:
    async def scenario() -> float:
        time = asyncio.get_running_loop().time
        await ListPace(lambda: True).pause(1000.0)
        return time()

    assert virtual.run(scenario()) < 1.01 * MAX_PAUSE_SECONDS


def test_a_page_that_fails_does_not_hold_up_the_others() -> None:
    async def scenario() -> float:
        time, pace = asyncio.get_running_loop().time, ListPace(lambda: True)
        for _ in range(3):
            with suppress(ConnectionError):
                async with pace.page():
                    raise ConnectionError
        return time()

    assert virtual.run(scenario()) < 0.01


def test_all_pauses_together_have_an_end() -> None:
    """Otherwise the API server would no longer continue a list, which would begin again and again."""

    async def scenario() -> float:
        time, pace = asyncio.get_running_loop().time, ListPace(lambda: True)
        for _ in range(1000):
            await pace.pause(1.0)
        return time()

    assert virtual.run(scenario()) < 1.01 * (MAX_PAUSES_SECONDS + MAX_PAUSE_SECONDS)

"""Many short decisions fit into one turn of the event loop, and at most one long one."""

import asyncio
import time

import pytest

from qwen35_operator.reconcile.turn_budget import SECONDS, TurnBudget

LONG = 2 * SECONDS


@pytest.fixture
def turns_of(monkeypatch):
    """The number of the turn in which each of these decisions was made, by a clock that only decisions advance."""

    async def made_in(*seconds: float) -> list[int]:
        clock, turn, made = [0.0], [0], []
        monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
        budget = TurnBudget()

        async def count() -> None:
            while True:
                await asyncio.sleep(0)
                turn[0] += 1

        async def decide(duration: float) -> None:
            await budget.available()
            with budget.spending():
                clock[0] += duration
                made.append(turn[0])

        counting = asyncio.create_task(count())
        await asyncio.gather(*map(decide, seconds))
        counting.cancel()
        return made

    return made_in


async def test_short_decisions_share_a_turn(turns_of) -> None:
    assert len(set(await turns_of(*[SECONDS / 10] * 8))) == 1


async def test_each_long_decision_has_a_turn_of_its_own(turns_of) -> None:
    turns = await turns_of(*[LONG] * 5)
    assert len(set(turns)) == 5


async def test_after_a_long_decision_the_next_ones_wait_for_the_next_turn(turns_of) -> None:
    first, *others = await turns_of(LONG, *[SECONDS / 10] * 4)
    assert set(others) == {first + 1}


async def test_decisions_together_take_little_more_than_the_budget(turns_of) -> None:
    turns = await turns_of(*[SECONDS * 0.26] * 40)
    assert max(turns.count(turn) for turn in turns) == 4
    assert len(set(turns)) == 10

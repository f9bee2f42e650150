"""Compares how many decisions an operator makes in the turns of a busy event loop. Prints one JSON object.

    lock     the limit of an earlier operator: each decision holds a lock and waits for the next turn. The next worker gets the lock one turn
             later, so this allows one decision in two turns
    budget   `reconcile/turn_budget.py`: decisions share a time in each turn

Workers alternate between a request of REQUEST_SECONDS and a decision, as the operator's do, while other work fills each turn: parsing of
events and answers, which takes longer when the processors are busy. `longestTurnMs` is how long nothing else ran, such as a probe or the
renewal of the Lease. The decisions are a loop that takes the same time, so only the turns differ between the two.

    python -m benchmarks.operator_turns [--turns 1 4 10] [--decision 1] [--seconds 3] [--rounds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from qwen35_operator.reconcile.turn_budget import TurnBudget

WORKERS = 8
REQUEST_SECONDS = 0.005
type Decide = Callable[[float], Awaitable[None]]
"""Makes a decision of this number of seconds, when its turn comes."""


@dataclass(frozen=True)
class Rate:
    """The result of one variant in one round."""

    per_second: float
    longest_turn: float
    """In seconds."""


def _lock() -> Decide:
    lock = asyncio.Lock()

    async def decide(seconds: float) -> None:
        async with lock:
            await asyncio.sleep(0)
            _compute(seconds)

    return decide


def _budget() -> Decide:
    budget = TurnBudget()

    async def decide(seconds: float) -> None:
        await budget.available()
        with budget.spending():
            _compute(seconds)

    return decide


VARIANTS = {"lock": _lock, "budget": _budget}


def _compute(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


async def _measure(variant: Callable[[], Decide], turn: float, decision: float, seconds: float) -> Rate:
    """Run the workers. turn, decision: seconds of other work in each turn, and of each decision. seconds: length of the round."""
    decide, start = variant(), time.perf_counter()
    end = start + seconds
    made, longest = 0, 0.0

    async def work() -> None:
        nonlocal made
        while time.perf_counter() < end:
            await asyncio.sleep(REQUEST_SECONDS)
            await decide(decision)
            made += 1

    async def fill_turns() -> None:
        nonlocal longest
        while True:
            _compute(turn)
            began = time.perf_counter()
            await asyncio.sleep(0)
            longest = max(longest, time.perf_counter() - began)

    other = asyncio.create_task(fill_turns())
    await asyncio.gather(*(work() for _ in range(WORKERS)))
    other.cancel()
    return Rate(made / (time.perf_counter() - start), longest + turn)


def _compare(turn_ms: float, decision_ms: float, seconds: float, rounds: int) -> dict[str, Any]:
    """Measure the variants by turns. Returns the median rates of the rounds with their ratio, and the longest turn of any round."""
    rates: dict[str, list[Rate]] = {name: [] for name in VARIANTS}
    for number in range(rounds):
        for name in sorted(VARIANTS, reverse=number % 2 == 1):
            rates[name].append(asyncio.run(_measure(VARIANTS[name], turn_ms / 1e3, decision_ms / 1e3, seconds)))
    per_second = {name: statistics.median(rate.per_second for rate in each) for name, each in rates.items()}
    longest = {name: max(rate.longest_turn for rate in each) for name, each in rates.items()}
    return {
        "turnMs": turn_ms,
        "decisionsPerSecond": {name: round(value, 1) for name, value in per_second.items()},
        "ratio": round(per_second["budget"] / per_second["lock"], 2),
        "longestTurnMs": {name: round(1e3 * value, 1) for name, value in longest.items()},
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=float, nargs="+", default=[1.0, 4.0, 10.0], help="other work in a turn, ms")
    parser.add_argument("--decision", type=float, default=1.0, help="length of a decision, ms")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a round of one variant")
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    compared = [_compare(turn, chosen.decision, chosen.seconds, chosen.rounds) for turn in chosen.turns]
    print(json.dumps({"workers": WORKERS, "decisionMs": chosen.decision, "turns": compared}, indent=2))


if __name__ == "__main__":
    main()

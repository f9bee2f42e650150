"""Virtual time: a loop whose clock jumps to the next timer as soon as nothing else is ready to run."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any

TURN = 1e-9
"""Seconds that a turn of the loop takes: who polls until a time comes must see it come."""


class _Jumping(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("everybody waits, and nothing will ever happen")
        self.now += max(timeout or 0.0, TURN)
        return ready


class Loop(asyncio.SelectorEventLoop):
    """For what only waits for time: no sockets, no threads."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run[Result](scenario: Coroutine[Any, Any, Result]) -> Result:
    """To its end, in no time."""
    with asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(scenario)

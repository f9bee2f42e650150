"""How much hardware there was, over time."""

from __future__ import annotations


class Capacity:
    """Slots and engines that are there, summed over time."""

    __slots__ = ("_since", "engine_seconds", "engines", "slot_seconds", "slots")

    def __init__(self) -> None:
        self.slots = self.engines = 0
        self.slot_seconds = self.engine_seconds = self._since = 0.0

    def advance(self, now: float) -> None:
        self.slot_seconds += self.slots * (now - self._since)
        self.engine_seconds += self.engines * (now - self._since)
        self._since = now

    def add(self, now: float, engines: int, slots: int) -> None:
        self.advance(now)
        self.engines += engines
        self.slots += slots

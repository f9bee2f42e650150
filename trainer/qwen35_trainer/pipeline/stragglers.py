"""The stragglers outside the straggler lane, and which of them are due for a decision whether they move there.

    add ─► due ──take_due──► decided: moves, and is removed
            ▲                   │
            └───────────────────┴─► stays: due again when it is GROWTH longer, or when `reconsider_all` is called

A decision costs a few microseconds. There may be thousands of stragglers, so that not all of them are considered at
every event.
"""

from __future__ import annotations

from qwen35_trainer.pipeline.events import SequenceId

GROWTH = 1.25
"""Factor by which a straggler has to grow until it is considered again, if nothing else changes."""


class Stragglers:
    """The sequences that are long enough for the lane and run outside of it, each with the deadline of its group."""

    def __init__(self) -> None:
        self._deadlines: dict[SequenceId, int] = {}
        self._due_at: dict[SequenceId, float] = {}  # number of tokens with which each is considered again
        self._due: dict[SequenceId, None] = {}
        self._all_due = False

    def __len__(self) -> int:
        return len(self._deadlines)

    def __contains__(self, name: object) -> bool:
        return name in self._deadlines

    def add(self, name: SequenceId, tokens: int, deadline: int) -> None:
        """Add a sequence that has `tokens` tokens. It is due."""
        self._deadlines[name], self._due_at[name] = deadline, GROWTH * tokens
        self._due[name] = None

    def grow(self, name: SequenceId, tokens: int) -> None:
        """Record that a straggler has `tokens` tokens now."""
        if tokens >= self._due_at[name]:
            self._due_at[name] = GROWTH * tokens
            self._due[name] = None

    def discard(self, name: SequenceId) -> None:
        """Remove a sequence, if it is here, because it moves, waits, has finished or left."""
        if self._deadlines.pop(name, None) is not None:
            del self._due_at[name]
            self._due.pop(name, None)

    def reconsider_all(self) -> None:
        """Make all stragglers due, because the lane has changed: its replicas, their speed, or their sequences."""
        self._all_due = True

    def take_due(self) -> list[SequenceId]:
        """Return the stragglers that are due, the earliest deadline first. They are not due any more."""
        due = self._deadlines if self._all_due else self._due
        names = sorted(due, key=lambda name: (self._deadlines[name], name))
        self._due, self._all_due = {}, False
        return names

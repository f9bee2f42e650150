"""The stragglers (long sequences) outside the straggler lane, and which of them are due for a decision about a move.

    add ─► due ──take_due──► decided: moves to the lane, and is removed here
            ▲                   │
            └───────────────────┴─► stays: due again when it has GROWTH times as many tokens, or after `reconsider_all`

A decision costs a few microseconds, and there may be thousands of stragglers. Therefore not all of them are considered
at every event.
"""

from __future__ import annotations

from qwen35_trainer.pipeline.events import SequenceId

GROWTH = 1.25
"""Factor by which a straggler must grow before it is considered again, if the lane does not change."""


class Stragglers:
    """The sequences that are long enough for the straggler lane but run outside of it, with their groups' deadlines."""

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
        """Add a straggler that has `tokens` tokens. A decision about its move to the lane is then due.

        deadline: the deadline of the straggler's group.
        """
        self._deadlines[name], self._due_at[name] = deadline, GROWTH * tokens
        self._due[name] = None

    def grow(self, name: SequenceId, tokens: int) -> None:
        """Record that a straggler has `tokens` tokens now, and mark it as due if it has grown by GROWTH."""
        if tokens >= self._due_at[name]:
            self._due_at[name] = GROWTH * tokens
            self._due[name] = None

    def discard(self, name: SequenceId) -> None:
        """Remove a sequence that has finished, has left its replica, or moves to the lane.

        Does nothing for an unknown sequence.
        """
        if self._deadlines.pop(name, None) is not None:
            del self._due_at[name]
            self._due.pop(name, None)

    def reconsider_all(self) -> None:
        """Mark all stragglers as due, because the replicas of the lane, their speed or their sequences have changed."""
        self._all_due = True

    def take_due(self) -> list[SequenceId]:
        """Return the stragglers for which a decision about a move is due, and mark them as not due.

        Stragglers with the earliest deadline come first.
        """
        due = self._deadlines if self._all_due else self._due
        names = sorted(due, key=lambda name: (self._deadlines[name], name))
        self._due, self._all_due = {}, False
        return names

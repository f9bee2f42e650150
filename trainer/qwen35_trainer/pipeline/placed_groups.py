"""The groups that are generated or wait to train: where each of their sequences is, and how far it has come."""

from __future__ import annotations

from dataclasses import dataclass

EVALUATION_POSITION = -1
"""The position of an evaluation's group, which never enters the window."""


@dataclass(slots=True)
class PlacedSequence:
    """One sequence of a group: its replica, its tokens so far, and the version of its first token."""

    tokens: int = 0
    tokens_at_start: int = 0
    """The tokens that it was given when it was last placed: they are not lost with its replica."""
    born: int | None = None
    """The version of its first token, or an older one that bounds it."""
    replica: int | None = None
    done: bool = False


@dataclass(slots=True)
class PlacedGroup:
    """The sequences that are sampled for one prompt, and where they are."""

    position: int
    sequences: list[PlacedSequence]
    unfinished: int
    home: int | None = None
    """The replica to which its sequences without tokens go, so that they share the computation of their prompt."""
    home_room: int = 0
    """The number of sequences that may still go there."""

    @property
    def is_evaluation(self) -> bool:
        return self.position == EVALUATION_POSITION

"""The coordinator's events: facts about the rollout pool and the train pool. The requests of the run are in `requests.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

type SequenceId = tuple[int, int]
"""(group, index of the sample within it)."""


@dataclass(frozen=True, slots=True)
class ReplicaJoined:
    """A rollout replica is ready. `version`: the weights that it has.

    A replica whose weights are older than the published ones loads those next, and gets no sequences until it has.
    """

    replica: int
    slots: int
    """Sequences that it accepts at a time, including those in its own queue."""
    version: int
    lane: bool = False
    """It belongs to the straggler lane: it decodes faster and takes only stragglers."""
    token_room: int | None = None
    """Tokens that its memory holds for all its sequences together. None: it is not known, and slots alone count."""


@dataclass(frozen=True, slots=True)
class ReplicaLeaving:
    """A replica gets no more sequences and finishes those that it holds. `leaving` False takes this back."""

    replica: int
    leaving: bool = True


@dataclass(frozen=True, slots=True)
class ReplicaLost:
    """A replica is gone. `kept`: for each sequence that it generated, the number of response tokens that are still available.

    A sequence that `kept` does not name falls back to the number of tokens with which the last `StartSequences` started it.
    """

    replica: int
    kept: Mapping[SequenceId, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SequenceStarted:
    """A sequence's first token was computed with the weights of `version`."""

    sequence: SequenceId
    version: int


@dataclass(frozen=True, slots=True)
class SequencesProgressed:
    """The response tokens that running sequences have so far."""

    tokens: Mapping[SequenceId, int]


@dataclass(frozen=True, slots=True)
class SequenceFinished:
    """A sequence is complete. `tokens`: the length of its response."""

    sequence: SequenceId
    tokens: int


@dataclass(frozen=True, slots=True)
class GroupScored:
    """All sequences of a finished group have their rewards. `signal`: the rewards differ, so the group has a gradient."""

    group: int
    signal: bool = True


@dataclass(frozen=True, slots=True)
class GroupFailed:
    """A group cannot be generated or scored, and will not be tried again. `cause`: the first error, for messages."""

    group: int
    cause: str = ""


@dataclass(frozen=True, slots=True)
class BatchTrained:
    """The train pool has finished a batch."""

    batch: int


@dataclass(frozen=True, slots=True)
class WeightsCopied:
    """The trainer's weights are copied as `version`. The next batch may change them, and the copy may be published."""

    version: int


@dataclass(frozen=True, slots=True)
class VersionLoaded:
    """A replica has loaded `version`: its next token comes from these weights."""

    replica: int
    version: int


@dataclass(frozen=True, slots=True)
class CheckpointCompleted:
    """A checkpoint is complete. `batch`: the next batch to train after it, as in its snapshot."""

    batch: int


type Event = (
    ReplicaJoined
    | ReplicaLeaving
    | ReplicaLost
    | SequenceStarted
    | SequencesProgressed
    | SequenceFinished
    | GroupScored
    | GroupFailed
    | BatchTrained
    | WeightsCopied
    | VersionLoaded
    | CheckpointCompleted
)

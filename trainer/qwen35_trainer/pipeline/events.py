"""What the coordinator is told. Each event is a fact that has happened; none asks for an answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

type SequenceId = tuple[int, int]
"""(group, index of the sample within it)."""


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A rollout worker is ready. `version`: the weights that it has. If they are older than the published ones, it is to load
    those next, and gets no sequences before it has.
    """

    worker: int
    slots: int
    """Sequences that it takes at a time, those that wait in its own queue included."""
    version: int
    lane: bool = False
    """It decodes faster, and takes only stragglers."""


@dataclass(frozen=True, slots=True)
class WorkerLeaving:
    """It gets no more sequences; what it holds it finishes. `leaving` False takes that back."""

    worker: int
    leaving: bool = True


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """It is gone. `kept`: response tokens, with log-probs and versions, that are at hand for what it was generating."""

    worker: int
    kept: Mapping[SequenceId, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Started:
    """A sequence's first token was computed with the weights of `version`."""

    sequence: SequenceId
    version: int


@dataclass(frozen=True, slots=True)
class Progressed:
    """Response tokens that running sequences have so far."""

    tokens: Mapping[SequenceId, int]


@dataclass(frozen=True, slots=True)
class Finished:
    """A sequence is complete, with so many response tokens."""

    sequence: SequenceId
    tokens: int


@dataclass(frozen=True, slots=True)
class Scored:
    """All sequences of a finished group have their rewards. `signal`: these differ, so there is something to learn."""

    group: int
    signal: bool = True


@dataclass(frozen=True, slots=True)
class Failed:
    """A group cannot be generated or scored, and will not be tried again."""

    group: int


@dataclass(frozen=True, slots=True)
class Trained:
    """The train pool is done with a batch."""

    batch: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """A worker's next token comes from `version`."""

    worker: int
    version: int


@dataclass(frozen=True, slots=True)
class EvaluationAsked:
    """Generate `samples` sequences for each of `groups` as soon as `version` is published, and before the next one is."""

    version: int
    groups: tuple[int, ...]
    samples: int


@dataclass(frozen=True, slots=True)
class CheckpointAsked:
    """Save what has trained before the next batch does, or once the save under way is complete."""


@dataclass(frozen=True, slots=True)
class Checkpointed:
    """The checkpoint is complete. `batch`: the next one to train after it, as in its snapshot."""

    batch: int


@dataclass(frozen=True, slots=True)
class StopAsked:
    """Train no further batch; save, and end."""


type Event = (
    WorkerJoined
    | WorkerLeaving
    | WorkerLost
    | Started
    | Progressed
    | Finished
    | Scored
    | Failed
    | Trained
    | Loaded
    | EvaluationAsked
    | CheckpointAsked
    | Checkpointed
    | StopAsked
)

"""The coordinator's actions, which the runtime or the simulator carries out in the order given.

`GroupDispatched`, `GroupLeft` and `TrainGroups` are also the journal's records. A `TrainGroups` and everything before it is
on disk before its batch trains.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from qwen35_trainer.pipeline.events import SequenceId
from qwen35_trainer.pipeline.scheduling_snapshot import SchedulingSnapshot


class LeaveReason(StrEnum):
    """The reason why a group left. Every dispatched group leaves exactly once."""

    TRAINED = "trained"
    FILTERED = "filtered"
    """Its rewards are all equal, so it has no gradient (dynamic sampling of DAPO, `algorithm.dynamicSampling`)."""
    DISCARDED = "discarded"
    """It missed its deadline. Its prompt is dispatched again, as another group."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class GroupDispatched:
    """A group entered the window. `position`: its prompt's place in the epoch order."""

    group: int
    position: int


@dataclass(frozen=True, slots=True)
class GroupLeft:
    """A group left the pipeline without training. (The groups of a batch leave by `TrainGroups`.)"""

    group: int
    position: int
    reason: LeaveReason


@dataclass(frozen=True, slots=True)
class StartSequences:
    """Generate sequences on `replica`. Each comes with the number of response tokens that it keeps; 0 starts it over."""

    replica: int
    sequences: tuple[tuple[SequenceId, int], ...]


@dataclass(frozen=True, slots=True)
class MoveSequence:
    """Move a running sequence with its tokens to another replica. If it has finished meanwhile, nothing happens."""

    sequence: SequenceId
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class CancelSequences:
    """Drop sequences that `replica` holds; their tokens are not needed."""

    replica: int
    sequences: tuple[SequenceId, ...]


@dataclass(frozen=True, slots=True)
class TrainGroups:
    """Train batch number `batch`, which consists of `groups`, at weight version `version`."""

    batch: int
    version: int
    groups: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CopyWeights:
    """Copy the trainer's weights as `version` before the next batch changes them."""

    version: int


@dataclass(frozen=True, slots=True)
class PublishWeights:
    """Send the copied weights to every replica, which loads them between two tokens and continues its sequences."""

    version: int


@dataclass(frozen=True, slots=True)
class VersionPublished:
    """Every replica has loaded `version`, apart from replicas that joined with older weights and have not caught up."""

    version: int


@dataclass(frozen=True, slots=True)
class VersionEvaluated:
    """All sequences of the evaluation of `version` are complete."""

    version: int


@dataclass(frozen=True, slots=True)
class SaveCheckpoint:
    """Save the trainer's state together with `snapshot`. The next batch may train once the state is copied."""

    snapshot: SchedulingSnapshot


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The run is complete: no action follows."""


type Action = (
    GroupDispatched
    | GroupLeft
    | StartSequences
    | MoveSequence
    | CancelSequences
    | TrainGroups
    | CopyWeights
    | PublishWeights
    | VersionPublished
    | VersionEvaluated
    | SaveCheckpoint
    | RunEnded
)

"""The coordinator's commands to the pools, which the runtime or the simulator carries out in the order given.

`TrainGroups` is also a record of the journal. A `TrainGroups` and everything before it is on disk before its batch trains.
"""

from __future__ import annotations

from dataclasses import dataclass

from qwen35_trainer.pipeline.events import SequenceId
from qwen35_trainer.pipeline.notices import Notice


@dataclass(frozen=True, slots=True)
class StartSequences:
    """Generate sequences on `replica`. Each comes with the number of response tokens that it keeps; 0 starts it over."""

    replica: int
    sequences: tuple[tuple[SequenceId, int], ...]


@dataclass(frozen=True, slots=True)
class MoveSequences:
    """Move running sequences with their tokens from `source` to `target`. Those that have finished meanwhile are left out."""

    source: int
    target: int
    sequences: tuple[SequenceId, ...]


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
class SchedulingSnapshot:
    """The state of scheduling between two batches, as a checkpoint stores it: where a run starts or continues.

    The defaults start a new run.
    """

    batch: int = 0
    """The next batch to train."""
    position: int = 0
    """The first prompt, by place in the epoch order, that was never dispatched."""
    pending: tuple[int, ...] = ()
    """Earlier prompts that have neither trained nor left for good. They are dispatched first."""
    group: int = 0
    """The number of the next group."""


@dataclass(frozen=True, slots=True)
class SaveCheckpoint:
    """Save the trainer's state together with `snapshot`. The next batch may train once the state is copied."""

    snapshot: SchedulingSnapshot


type Command = (
    StartSequences | MoveSequences | CancelSequences | TrainGroups | CopyWeights | PublishWeights | SaveCheckpoint
)
type Action = Command | Notice
"""What the coordinator returns. The order of actions matters."""

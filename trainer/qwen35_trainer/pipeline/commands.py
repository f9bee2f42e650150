"""The coordinator's commands to the pools. The runtime or the simulator carries them out in the order given.

`TrainGroups` is also a record of the journal. The record and all earlier ones are on disk before the batch trains.
"""

from __future__ import annotations

from dataclasses import dataclass

from qwen35_trainer.pipeline.events import SequenceId
from qwen35_trainer.pipeline.notices import Notice


@dataclass(frozen=True, slots=True)
class StartSequences:
    """Generate sequences on `replica`.

    sequences: pairs of a sequence and the number of its response tokens that exist already. Generation continues after
    these tokens; with 0 it starts from the prompt.
    """

    replica: int
    sequences: tuple[tuple[SequenceId, int], ...]


@dataclass(frozen=True, slots=True)
class MoveSequences:
    """Move running sequences, with their tokens, from replica `source` to replica `target`.

    A sequence that has finished in the meantime does not move.
    """

    source: int
    target: int
    sequences: tuple[SequenceId, ...]


@dataclass(frozen=True, slots=True)
class CancelSequences:
    """Stop generating sequences on `replica`, and discard their tokens."""

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
    """Copy the trainer's weights as `version`. The next batch, which changes the weights, waits for the copy."""

    version: int


@dataclass(frozen=True, slots=True)
class PublishWeights:
    """Send the copied weights of `version` to every replica.

    A replica loads the weights between two decoding steps, and then continues to generate its sequences.
    """

    version: int


@dataclass(frozen=True, slots=True)
class SchedulingSnapshot:
    """The scheduling state between two batches, from which a run continues. Checkpoint and journal store it.

    The defaults are the state at the start of a new run.
    """

    batch: int = 0
    """Number of the next batch to train."""
    position: int = 0
    """Position of the first prompt that was never dispatched.

    Positions count prompts in the epoch order, over all epochs.
    """
    pending: tuple[int, ...] = ()
    """Positions of prompts that were dispatched, and whose groups have neither trained, failed nor been filtered.

    A run that continues from this state dispatches these prompts before all others.
    """
    group: int = 0
    """Number of the next group to dispatch."""


@dataclass(frozen=True, slots=True)
class SaveCheckpoint:
    """Save a checkpoint: the trainer's state together with `snapshot`.

    The next batch waits until the state is copied, but not until the copy is on disk.
    """

    snapshot: SchedulingSnapshot


type Command = (
    StartSequences | MoveSequences | CancelSequences | TrainGroups | CopyWeights | PublishWeights | SaveCheckpoint
)
type Action = Command | Notice
"""A command or a notice of the coordinator. Actions must be handled in the order in which they are returned."""

"""What the coordinator asks for, in the order in which it is to be done.

`Dispatched`, `Left` and `Train` are also the journal's records. A `Train` is on disk, and what came before it too, before its
batch is trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from qwen35_trainer.pipeline.events import SequenceId
from qwen35_trainer.pipeline.snapshot import Snapshot


class Reason(StrEnum):
    """Why a group left. Every dispatched group leaves exactly once."""

    TRAINED = "trained"
    FILTERED = "filtered"
    """Its rewards do not differ: there is nothing to learn."""
    DISCARDED = "discarded"
    """It missed its deadline; its prompt is dispatched again, as another group."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Dispatched:
    """A group entered the window. `position`: its prompt, by place in the epoch order."""

    group: int
    position: int


@dataclass(frozen=True, slots=True)
class Left:
    """A group left untrained. Those of a batch leave by `Train`."""

    group: int
    position: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Start:
    """Generate on `worker`: each sequence with the response tokens that it keeps, 0 to begin anew."""

    worker: int
    sequences: tuple[tuple[SequenceId, int], ...]


@dataclass(frozen=True, slots=True)
class Move:
    """Hand a running sequence over, with its tokens. One that has finished meanwhile stays finished."""

    sequence: SequenceId
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """Drop sequences that `worker` holds; their tokens are not needed."""

    worker: int
    sequences: tuple[SequenceId, ...]


@dataclass(frozen=True, slots=True)
class Train:
    """Train these groups, the batch's number being `batch`, at `version`."""

    batch: int
    version: int
    groups: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy the trainer's weights aside, as `version`, before the next batch changes them."""

    version: int


@dataclass(frozen=True, slots=True)
class Publish:
    """Give the copied weights to every worker, without draining it."""

    version: int


@dataclass(frozen=True, slots=True)
class Published:
    """Every worker has `version`, except workers that joined with older weights and have not caught up."""

    version: int


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The evaluation of `version` has all its sequences."""

    version: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Save the trainer's state together with this: as it is before the next batch, which may train once it is copied."""

    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class Ended:
    """There is nothing more to do."""


type Action = (
    Dispatched | Left | Start | Move | Cancel | Train | Copy | Publish | Published | Evaluated | Checkpoint | Ended
)

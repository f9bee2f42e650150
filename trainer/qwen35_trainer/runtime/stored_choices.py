"""The experts that replicas chose, on their way to the train ranks: by reference, in Ray's object store.

    replica      a sequence ends, or moves on: its table of choices ──────────► object store
                 └─► report 7                                                       │
    driver       ├─► calls `stored_choices(7)` ─► references to the tables          │
                 └─► batch: of each sample, references to its tables                │
    train rank   reads the tables of its samples ◄──────────────────────────────────┘

A table has the choices of one sequence on one replica, from its first token there to its last. It is stored once, when the sequence
leaves the replica, and never comes to the driver. The replica owns the object, and Ray frees it when no reference is left, which is
when the sequence has trained or was dropped. If the replica is lost, its tables are lost too, also those of sequences that still run:
the trainer's routers then choose for these inputs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from qwen35_trainer.data.expert_choices import RecordedChoices
from qwen35_trainer.engines.train_batch import TrainBatch

logger = logging.getLogger(__name__)

READ_SECONDS = 60.0
"""Maximum time in which a train rank fetches the choices of its share of a batch."""
LATE_SECONDS = 0.1
"""Time for which each table is awaited after the time for all of them is over, or after the first of them was lost."""
MAX_REASON_CHARACTERS = 400
"""Maximum number of characters of Ray's error that are logged."""


@dataclass(frozen=True, slots=True)
class StoredPart:
    """The choices of consecutive tokens of one sequence, which one replica has computed."""

    call: Any
    """Ray's reference to the answer of `RolloutWorker.stored_choices`: a list of references to tables."""
    index: int
    """Position of the reference to the sequence's table in the list."""
    first: int
    """Number of tokens of the response before the part."""
    end: int
    """Number of tokens of the response up to the end of the part."""
    dropped: int = 0
    """Number of rows at the end of the table that belong to dropped tokens."""


@dataclass(frozen=True, slots=True)
class StoredChoices:
    """The choices of one sequence, in the order of its tokens."""

    parts: tuple[StoredPart, ...] = ()

    def with_part(self, part: StoredPart) -> StoredChoices:
        """Return the choices with those of further tokens."""
        return StoredChoices((*self.parts, part))

    def up_to(self, tokens: int) -> StoredChoices:
        """Return the choices of the first `tokens` tokens of the response."""
        if not self.parts:
            return self
        kept = [
            replace(part, end=min(part.end, tokens), dropped=part.dropped + max(0, part.end - tokens))
            for part in self.parts
            if part.first < tokens
        ]
        return StoredChoices(tuple(kept))

    def read(self) -> Sequence[tuple[RecordedChoices, int]] | None:
        [own] = fetched([self])
        return None if own is None else own.read()


NO_CHOICES = StoredChoices()


@dataclass(frozen=True, slots=True)
class FetchedChoices:
    """The choices of one sequence in the memory of this node."""

    parts: tuple[tuple[RecordedChoices, int], ...]

    def read(self) -> Sequence[tuple[RecordedChoices, int]]:
        return self.parts


def fetched(
    choices: Sequence[StoredChoices | None], seconds: float = READ_SECONDS
) -> tuple[FetchedChoices | None, ...]:
    """Fetch the tables of sequences, all at the same time, and return the choices of each sequence.

    A sequence gets None if it has none, or if one of its tables is lost or does not arrive within `seconds`. The arrays are
    in the memory of Ray's object store, and cannot be written.
    """
    deadline = time.monotonic() + seconds
    parts = [part for each in choices if each is not None for part in each.parts]
    calls = list(dict.fromkeys(part.call for part in parts))
    # Half of the time, because the tables of all other replicas still have to arrive if one replica does not answer.
    answers = dict(zip(calls, _values(calls, time.monotonic() + seconds / 2), strict=True))
    present = [part for part in parts if isinstance(answers[part.call], list)]
    tables = dict(zip(present, _values([answers[part.call][part.index] for part in present], deadline), strict=True))
    if missing := [part for part in parts if not isinstance(tables.get(part), np.ndarray)]:
        reason = tables.get(missing[0], answers[missing[0].call])
        logger.warning(
            "%d of %d tables of chosen experts are lost or late, so the trainer's routers choose for their sequences "
            "(train.router.replay). The first one: %s",
            len(missing),
            len(parts),
            " ".join(str(reason).split())[:MAX_REASON_CHARACTERS],
        )

    def of(each: StoredChoices | None) -> FetchedChoices | None:
        own = [] if each is None else [(tables.get(part), part) for part in each.parts]
        rows = [(table[: len(table) - part.dropped], part.end) for table, part in own if isinstance(table, np.ndarray)]
        return FetchedChoices(tuple(rows)) if rows and len(rows) == len(own) else None

    return tuple(of(each) for each in choices)


def with_fetched(batch: TrainBatch, seconds: float) -> TrainBatch:
    """Return a rank's share of a batch with the choices of its samples in the memory of this node.

    seconds: maximum time for fetching them.
    """
    if batch.choices is None:
        return batch
    return replace(batch, choices=fetched([cast("StoredChoices | None", each) for each in batch.choices], seconds))


def _values(references: Sequence[Any], deadline: float) -> list[Any]:
    """Return the value of each of Ray's references, or the error for one that is lost or does not arrive before `deadline`.

    deadline: by `time.monotonic`.
    """
    import ray  # importing it takes a second, and manifests are checked without it
    from ray.exceptions import RayError

    try:
        # Only `get` brings objects for which the store of this node is too small: Ray then puts them on the disk.
        return list(ray.get(list(references), timeout=max(0.0, deadline - time.monotonic())))
    except RayError:  # of the first one that failed, or a time-out
        remaining = max(0.0, deadline - time.monotonic())
        ray.wait(list(references), num_returns=len(references), timeout=remaining)  # all others at the same time
        return [_value(reference) for reference in references]


def _value(reference: Any) -> Any:  # noqa: ANN401  # Ray's reference and its value
    """Return the value of a reference that was to arrive before, or the error."""
    import ray  # as above
    from ray.exceptions import RayError

    try:
        return ray.get(reference, timeout=LATE_SECONDS)
    except RayError as error:  # its owner, or the node that held it, is lost, or it is late
        return error

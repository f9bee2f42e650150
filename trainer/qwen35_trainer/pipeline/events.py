"""The coordinator's events: facts about the rollout pool and the train pool. `requests.py` has the run's requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from qwen35_trainer.pipeline.replica_times import ReplicaTimes

type SequenceId = tuple[int, int]
"""Identifies a sequence: (number of its group, index of the sample in the group)."""


@dataclass(frozen=True, slots=True)
class ReplicaJoined:
    """A rollout replica is ready. version: the version of the weights that it has loaded.

    A replica with weights older than the published version gets no sequences until it has loaded the published version.
    """

    replica: int
    slots: int
    """Maximum number of sequences that the replica holds at a time, including those in its internal queue."""
    version: int
    lane: bool = False
    """Whether the replica belongs to the straggler lane, which takes only long sequences and decodes them faster."""
    token_room: int | None = None
    """Number of tokens that the replica's memory holds for all sequences together.

    None: unknown; only `slots` limits it.
    """


@dataclass(frozen=True, slots=True)
class ReplicaLeaving:
    """A replica will leave: it finishes its sequences and gets no new ones.

    leaving: if False, the replica stays after all, and gets sequences again.
    """

    replica: int
    leaving: bool = True


@dataclass(frozen=True, slots=True)
class ReplicaMeasured:
    """The duration of a replica's decoding steps was measured. times: all present measurements of the replica.

    Only runs with a straggler lane (replicas reserved for long sequences) need this event.
    """

    replica: int
    times: ReplicaTimes


@dataclass(frozen=True, slots=True)
class ReplicaLost:
    """A replica is gone. The replica's sequences are enqueued again, for any replica.

    kept: sequence → number of its response tokens that are still available. A sequence that is not in `kept` had not
    arrived at the replica yet, so the tokens that it had when it was sent are still available. With
    `async.partialRollout`, generation continues after the available tokens; otherwise all sequences start over.
    """

    replica: int
    kept: Mapping[SequenceId, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SequenceRefused:
    """A replica could not generate a sequence, which is enqueued again, for any replica.

    Until `ReplicaTrusted`, the replica gets no sequences while the pool has other replicas. If the coordinator has just moved the
    sequence to another replica, it stays there. tokens: number of response tokens that are available, with which the sequence
    continues as after the loss of a replica.
    """

    sequence: SequenceId
    replica: int
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaTrusted:
    """A replica gets sequences again: each sequence that it refused was generated, or was refused again, or has ended."""

    replica: int


@dataclass(frozen=True, slots=True)
class SequenceStarted:
    """A sequence's first token was computed with the weights of `version`."""

    sequence: SequenceId
    version: int


@dataclass(frozen=True, slots=True)
class SequencesProgressed:
    """Running sequences have generated more tokens. tokens: sequence → total number of its response tokens so far."""

    tokens: Mapping[SequenceId, int]


@dataclass(frozen=True, slots=True)
class SequenceFinished:
    """A sequence is complete. tokens: length of its response."""

    sequence: SequenceId
    tokens: int


@dataclass(frozen=True, slots=True)
class GroupScored:
    """All sequences of a group have their rewards.

    signal: whether the rewards differ; if they are equal, the group has no gradient.
    """

    group: int
    signal: bool = True


@dataclass(frozen=True, slots=True)
class GroupFailed:
    """A group could not be generated or scored, and is not tried again. cause: the first error, for messages."""

    group: int
    cause: str = ""


@dataclass(frozen=True, slots=True)
class BatchTrained:
    """The train pool has finished the batch with the number `batch`."""

    batch: int


@dataclass(frozen=True, slots=True)
class WeightsCopied:
    """The trainer's weights are copied as `version`. Now the next batch may train, and the copy may be published."""

    version: int


@dataclass(frozen=True, slots=True)
class VersionLoaded:
    """A replica has loaded `version`: the next token that it generates comes from these weights."""

    replica: int
    version: int


@dataclass(frozen=True, slots=True)
class CheckpointCompleted:
    """A checkpoint is complete.

    batch: number of the first batch that the checkpoint does not contain (`SchedulingSnapshot.batch`).
    """

    batch: int


type Event = (
    ReplicaJoined
    | ReplicaLeaving
    | ReplicaMeasured
    | ReplicaLost
    | SequenceRefused
    | ReplicaTrusted
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

"""The coordinator's notices: decisions, and the completion of work. Unlike commands, they require no action.

`GroupDispatched` and `GroupLeft` are also records of the journal.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class LeaveReason(StrEnum):
    """The reason why a group left the pipeline. Every dispatched group leaves exactly once."""

    TRAINED = "trained"
    FILTERED = "filtered"
    """All rewards of the group are equal, so it has no gradient.

    Only with `algorithm.dynamicSampling` (from DAPO) do groups leave for this reason.
    """
    DISCARDED = "discarded"
    """The group missed its deadline. Its prompt is dispatched again, as another group."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class GroupDispatched:
    """A group was dispatched. position: position of its prompt in the epoch order, counted over all epochs."""

    group: int
    position: int


@dataclass(frozen=True, slots=True)
class GroupLeft:
    """A group left the pipeline untrained, for `reason`. The command `TrainGroups` contains the groups that train.

    position: position of the group's prompt in the epoch order, counted over all epochs.
    """

    group: int
    position: int
    reason: LeaveReason


@dataclass(frozen=True, slots=True)
class VersionPublished:
    """Every replica has loaded `version`. Replicas that joined late and still catch up do not count."""

    version: int


@dataclass(frozen=True, slots=True)
class VersionEvaluated:
    """The evaluation of `version` has ended: each of its groups has all its responses, or has failed."""

    version: int


@dataclass(frozen=True, slots=True)
class EvaluationSkipped:
    """A requested evaluation of `version` will not take place, or was cancelled.

    The reason is that some replica may already have later weights, or that the run stops.
    """

    version: int


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The run has ended. The coordinator emits no further action."""


type Notice = GroupDispatched | GroupLeft | VersionPublished | VersionEvaluated | EvaluationSkipped | RunEnded

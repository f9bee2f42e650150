"""The coordinator's notices of decisions and of complete work. Nothing has to be done about them.

`GroupDispatched` and `GroupLeft` are also records of the journal.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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
class VersionPublished:
    """Every replica has loaded `version`, apart from replicas that joined with older weights and have not caught up."""

    version: int


@dataclass(frozen=True, slots=True)
class VersionEvaluated:
    """All sequences of the evaluation of `version` are complete."""

    version: int


@dataclass(frozen=True, slots=True)
class EvaluationSkipped:
    """A requested evaluation of `version` does not take place, or not to its end.

    The replicas have later weights already, or the run stops.
    """

    version: int


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The run is complete: no action follows."""


type Notice = GroupDispatched | GroupLeft | VersionPublished | VersionEvaluated | EvaluationSkipped | RunEnded

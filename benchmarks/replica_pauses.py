"""The cost of a publication for the engine of a replica: the time of `receive` and `commit`, and the pause between its steps.

    engine ─► record: the times of each receive, commit and step ─► EngineTimes ─► costs ─► PublicationCost of each version

All times are in seconds of the monotonic clock, which the processes of a machine share. A step lasts from the end of the step
before it, so what the engine's thread does between two steps is part of the second one. If the engine had no sequences before a
step, the step lasts from its own start. A pause is the duration of the longest step less that of a usual step, which is the
median. Only steps that decode and prefill nothing count, because the duration of others depends on their prompts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Span:
    """The time from `start` to `end`."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass
class EngineTimes:
    """The times at which an engine received and committed versions of the weights, and made steps."""

    receives: dict[int, Span] = field(default_factory=dict)
    """By version."""
    commits: dict[int, Span] = field(default_factory=dict)
    """By version."""
    steps: list[Span] = field(default_factory=list)
    """The steps that decoded and prefilled nothing, in their order."""


@dataclass(frozen=True)
class PublicationCost:
    """The cost of a version for an engine that decoded all the time until the version was in service."""

    receive_seconds: float
    commit_seconds: float
    pause_seconds: float
    """The pause from the start of the trainer's copy until the first step with the version ends."""
    commit_pause_seconds: float
    """The pause of the step that contains the commit."""
    quiet_pause_seconds: float
    """The pause in an equally long time just before, which comes from the machine and not from the publication."""
    step_seconds: float
    """A usual step."""


class RecordedEngine:
    """Records the times of an engine, from the call of `record` on."""

    def __init__(self, engine: Any) -> None:  # noqa: ANN401  # a RolloutEngine, whose methods are replaced
        self._engine, self._receive, self._commit, self._step = engine, engine.receive, engine.commit, engine.step
        self._times = EngineTimes()
        self._ended: float | None = None  # when the last step ended, if sequences were left then

    def record(self) -> None:
        """Replace the methods of the engine by methods that also record their times."""
        engine = self._engine
        engine.receive, engine.commit, engine.step = self._recorded_receive, self._recorded_commit, self._recorded_step

    def take(self) -> EngineTimes:
        """Return the times since the previous call."""
        times, self._times = self._times, EngineTimes()
        return times

    def _recorded_receive(self, weights: object, version: int) -> None:
        with _timed(self._times.receives, version):
            self._receive(weights, version)

    def _recorded_commit(self, version: int) -> None:
        with _timed(self._times.commits, version):
            self._commit(version)

    def _recorded_step(self) -> Any:  # noqa: ANN401  # a StepOutput
        started = time.monotonic() if self._ended is None else self._ended
        output = self._step()
        ended = time.monotonic()
        if not output.prefills:
            self._times.steps.append(Span(started, ended))
        self._ended = ended if self._engine.busy else None
        return output


@contextmanager
def _timed(spans: dict[int, Span], version: int) -> Iterator[None]:
    started = time.monotonic()
    yield
    spans[version] = Span(started, time.monotonic())


def costs(times: EngineTimes, copied: Mapping[int, float]) -> list[PublicationCost]:
    """Return the cost of each version during which the engine decoded.

    copied: version → when the trainer began to copy it.
    """
    if not times.steps:
        return []
    usual = median(step.seconds for step in times.steps)
    result = []
    for version, commit in times.commits.items():
        if version not in times.receives or version not in copied:
            continue
        begun = copied[version]
        while_committing = _within(times.steps, commit)
        before = _within(times.steps, Span(2 * begun - commit.end, begun))
        if while_committing and before:
            during = _within(times.steps, Span(begun, commit.end))
            result.append(
                PublicationCost(
                    receive_seconds=times.receives[version].seconds,
                    commit_seconds=commit.seconds,
                    pause_seconds=_longest(during) - usual,
                    commit_pause_seconds=_longest(while_committing) - usual,
                    quiet_pause_seconds=_longest(before) - usual,
                    step_seconds=usual,
                )
            )
    return result


def _longest(steps: Sequence[Span]) -> float:
    return max(step.seconds for step in steps)


def _within(steps: Sequence[Span], span: Span) -> list[Span]:
    """Return the steps of which at least a part is within the span."""
    return [step for step in steps if step.start < span.end and step.end > span.start]

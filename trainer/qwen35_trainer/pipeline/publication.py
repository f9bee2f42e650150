"""The way of a version to the workers.

    wanted ──Copy──► copied ──Publish──► travelling ──Loaded by all──► published ──► evaluated, where that was asked for
      │                │                    ▲                             │
      │                └── waits for the one before it, and for its evaluation
      └── the trainer waits: the next batch would change the weights

One version travels at a time and one more waits copied. Without partial rollout it waits until nothing runs, and nothing starts
until it has arrived: so each sequence comes from one version.
"""

from __future__ import annotations

from qwen35_trainer.pipeline import actions as do
from qwen35_trainer.pipeline import events as on
from qwen35_trainer.pipeline.actions import Action
from qwen35_trainer.pipeline.buffer import Buffer
from qwen35_trainer.pipeline.placement import NOT_A_PROMPT, Placement


class Publication:
    """Versions between the trainer and the workers, and the evaluations of each."""

    def __init__(self, buffer: Buffer, placement: Placement, *, partial_rollout: bool) -> None:
        self._buffer, self._placement, self._partial_rollout = buffer, placement, partial_rollout
        self._wanted: int | None = None
        self._copied: int | None = None
        self._travelling: int | None = None
        self._behind = 0  # workers that have not loaded it
        self._evaluation: on.EvaluationAsked | None = None  # of a version that is not published yet
        self._evaluating: set[int] = set()  # groups

    @property
    def holds_trainer(self) -> bool:
        """Whether weights wait to be copied."""
        return self._wanted is not None

    @property
    def drains(self) -> bool:
        """Whether nothing may start."""
        if self._partial_rollout:
            return False
        return self._travelling is not None or (self._copied is not None and not self._evaluating)

    @property
    def evaluates(self) -> bool:
        return bool(self._evaluating)

    @property
    def rests(self) -> bool:
        """Whether every version has arrived and is evaluated."""
        waiting = (self._wanted, self._copied, self._travelling, self._evaluation)
        return all(each is None for each in waiting) and not self._evaluating

    def want(self, version: int) -> None:
        """The batches of a version have trained."""
        self._wanted = version

    def joined(self, version: int) -> None:
        """A worker came, with these weights."""
        self._behind += self._is_behind(version)

    def lost(self, version: int) -> None:
        """A worker with these weights is gone."""
        self._behind -= self._is_behind(version)

    def loaded(self, event: on.Loaded) -> None:
        worker = self._placement.with_worker(event.worker)[event.worker]
        self._behind -= self._is_behind(worker.version) and not self._is_behind(event.version)
        worker.version = max(worker.version, event.version)

    def ask_for_evaluation(self, event: on.EvaluationAsked) -> None:
        if event.version <= self._buffer.published:
            self._evaluate(event)
        else:
            self._evaluation = event

    def evaluated(self, number: int, actions: list[Action]) -> None:
        """A group of an evaluation is complete, or given up."""
        del self._placement.groups[number]
        self._evaluating.discard(number)
        if not self._evaluating:
            actions.append(do.Evaluated(self._buffer.published))

    def advance(self, actions: list[Action]) -> None:
        """Every step that can be made now."""
        while True:
            if self._travelling is not None and self._behind == 0:
                self._arrive(self._travelling, actions)
            if self._wanted is not None and self._copied is None:
                self._copied, self._wanted = self._wanted, None
                actions.append(do.Copy(self._copied))
            if self._copied is None or self._travelling is not None or self._evaluating:
                return
            if not self._partial_rollout and self._placement.running:
                return
            self._travelling, self._copied = self._copied, None
            workers = (worker for each in (self._placement.pool, self._placement.lane) for worker in each)
            self._behind = sum(self._is_behind(worker.version) for worker in workers)
            actions.append(do.Publish(self._travelling))

    def _arrive(self, version: int, actions: list[Action]) -> None:
        self._travelling = None
        self._buffer.publish(version)
        actions.append(do.Published(version))
        if self._evaluation is not None and self._evaluation.version <= version:
            self._evaluate(self._evaluation)

    def _evaluate(self, event: on.EvaluationAsked) -> None:
        self._evaluation = None
        for number in event.groups:
            self._evaluating.add(number)
            self._placement.add(number, NOT_A_PROMPT, event.samples)

    def _is_behind(self, version: int) -> bool:
        return self._travelling is not None and version < self._travelling

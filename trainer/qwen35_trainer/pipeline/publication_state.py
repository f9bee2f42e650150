"""Tracks each version of the weights on its way from the trainer to all replicas.

    pending ──CopyWeights──► copied ──PublishWeights──► in transfer ──VersionLoaded by all──► published ──► evaluated, if requested
      │                        │
      │                        └── waits for the previous version, and for its evaluation
      └── blocks the trainer: the next batch would change the weights

One version is in transfer at a time, and one more may wait as a copy. Without partial rollout the copy waits until no
sequence runs, and no sequence starts until the version has arrived, so that each sequence comes from one version.
"""

from __future__ import annotations

from qwen35_trainer.pipeline import actions as do
from qwen35_trainer.pipeline import events as on
from qwen35_trainer.pipeline.buffer import Buffer
from qwen35_trainer.pipeline.placement import EVALUATION_POSITION, Placement


class PublicationState:
    """The state of publication: which versions are trained, copied, in transfer and published, and the evaluation of each."""

    def __init__(self, buffer: Buffer, placement: Placement, *, partial_rollout: bool) -> None:
        self._buffer, self._placement, self._partial_rollout = buffer, placement, partial_rollout
        self._pending: int | None = None  # trained, not copied yet
        self._copied: int | None = None
        self._in_transfer: int | None = None
        self._replicas_behind = 0  # replicas that have not loaded the version in transfer
        self._requested_evaluation: on.EvaluationRequested | None = None  # of a version that is not published yet
        self._evaluation_groups: set[int] = set()  # unfinished groups of the current evaluation

    @property
    def blocks_training(self) -> bool:
        """Whether trained weights have not been copied yet."""
        return self._pending is not None

    @property
    def is_draining(self) -> bool:
        """Whether no sequence may start."""
        if self._partial_rollout:
            return False
        return self._in_transfer is not None or (self._copied is not None and not self._evaluation_groups)

    @property
    def is_evaluating(self) -> bool:
        return bool(self._evaluation_groups)

    @property
    def is_idle(self) -> bool:
        """Whether every version has arrived and every requested evaluation is complete."""
        waiting = (self._pending, self._copied, self._in_transfer, self._requested_evaluation)
        return all(step is None for step in waiting) and not self._evaluation_groups

    def version_trained(self, version: int) -> None:
        """Begin to publish a version, all of whose batches have trained."""
        self._pending = version

    def replica_joined(self, version: int) -> None:
        """Count a replica that joined with the weights of `version`."""
        self._replicas_behind += self._is_behind(version)

    def replica_lost(self, version: int) -> None:
        """Stop counting a lost replica, which had the weights of `version`."""
        self._replicas_behind -= self._is_behind(version)

    def loaded(self, event: on.VersionLoaded) -> None:
        """Note that a replica has loaded a version."""
        replica = self._placement.pool_of(event.replica)[event.replica]
        self._replicas_behind -= self._is_behind(replica.version) and not self._is_behind(event.version)
        replica.version = max(replica.version, event.version)

    def request_evaluation(self, event: on.EvaluationRequested) -> None:
        """Evaluate a version now if it is published, otherwise once it is."""
        if event.version <= self._buffer.published:
            self._evaluate(event)
        else:
            self._requested_evaluation = event

    def evaluation_group_ended(self, number: int, actions: list[do.Action]) -> None:
        """Note that a group of the evaluation is complete or has failed."""
        del self._placement.groups[number]
        self._evaluation_groups.discard(number)
        if not self._evaluation_groups:
            actions.append(do.VersionEvaluated(self._buffer.published))

    def advance(self, actions: list[do.Action]) -> None:
        """Append every step of a publication that is possible now: a version is copied, sent, or has arrived.

        When a version arrives, also start its evaluation if one was requested.
        """
        while True:
            if self._in_transfer is not None and self._replicas_behind == 0:
                self._arrive(self._in_transfer, actions)
            if self._pending is not None and self._copied is None:
                self._copied, self._pending = self._pending, None
                actions.append(do.CopyWeights(self._copied))
            if self._copied is None or self._in_transfer is not None or self._evaluation_groups:
                return
            if not self._partial_rollout and self._placement.running:
                return
            self._in_transfer, self._copied = self._copied, None
            replicas = (replica for pool in (self._placement.pool, self._placement.lane) for replica in pool)
            self._replicas_behind = sum(self._is_behind(replica.version) for replica in replicas)
            actions.append(do.PublishWeights(self._in_transfer))

    def _arrive(self, version: int, actions: list[do.Action]) -> None:
        self._in_transfer = None
        self._buffer.publish(version)
        actions.append(do.VersionPublished(version))
        if self._requested_evaluation is not None and self._requested_evaluation.version <= version:
            self._evaluate(self._requested_evaluation)

    def _evaluate(self, event: on.EvaluationRequested) -> None:
        self._requested_evaluation = None
        for number in event.groups:
            self._evaluation_groups.add(number)
            self._placement.add(number, EVALUATION_POSITION, event.samples)

    def _is_behind(self, version: int) -> bool:
        return self._in_transfer is not None and version < self._in_transfer

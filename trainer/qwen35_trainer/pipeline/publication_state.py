"""Tracks each version of the weights on its way from the trainer to all replicas.

    trained ─► pending ──CopyWeights──► copying ──WeightsCopied──► copied ──PublishWeights──► in transfer ──┐
                  │                        │                         │                                      │ VersionLoaded
                  │                        │                         └── waits for the previous version,    │ by all
                  └── waits for a place ───┴── block TrainGroups:        and for its evaluation             ▼
                      for its copy             it changes the weights                                   published

One version is in transfer at a time, and one more may wait as a copy. Only `TrainGroups` waits for a copy: a checkpoint and a
stop change no weights. Without partial rollout a copied version waits until no sequence runs, and no sequence starts until it
has arrived, so that each sequence comes from one version.
"""

from __future__ import annotations

from qwen35_trainer.pipeline import commands as do
from qwen35_trainer.pipeline import events as on
from qwen35_trainer.pipeline.actions import Action
from qwen35_trainer.pipeline.buffer import Buffer
from qwen35_trainer.pipeline.evaluation_queue import EvaluationQueue
from qwen35_trainer.pipeline.notices import VersionPublished
from qwen35_trainer.pipeline.placement import Placement


class PublicationState:
    """The state of publication: which versions are trained, copied, in transfer and published."""

    def __init__(
        self, buffer: Buffer, placement: Placement, evaluations: EvaluationQueue, *, partial_rollout: bool
    ) -> None:
        self._buffer, self._placement, self._evaluations = buffer, placement, evaluations
        self._partial_rollout = partial_rollout
        self._pending: int | None = None  # trained, and no place for its copy yet
        self._copying: int | None = None
        self._copied: int | None = None
        self._in_transfer: int | None = None
        self._replicas_behind = 0  # replicas that have not loaded the version in transfer
        self._stopped = False

    @property
    def blocks_training(self) -> bool:
        """Whether a batch would change weights that are still to be copied."""
        return self._pending is not None or self._copying is not None

    @property
    def is_draining(self) -> bool:
        """Whether no sequence may start."""
        if self._partial_rollout:
            return False
        return self._in_transfer is not None or (self._has_copy and not self._evaluations.is_running)

    @property
    def is_idle(self) -> bool:
        """Whether every version has arrived, and no evaluation runs."""
        waiting = (self._pending, self._copying, self._copied, self._in_transfer)
        return all(step is None for step in waiting) and not self._evaluations.is_running

    def version_trained(self, version: int) -> None:
        """Begin to publish a version, all of whose batches have trained."""
        if not self._stopped:
            self._pending = version

    def copied(self, event: on.WeightsCopied) -> None:
        """Note that a version is copied. Raises ValueError for one whose copy was not requested."""
        if event.version != self._copying:
            raise ValueError(f"version {event.version} copied, which was not requested")
        self._copying, self._copied = None, event.version

    def stop(self) -> None:
        """Copy and publish nothing from now on. A version in transfer arrives."""
        self._stopped, self._pending = True, None

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

    def advance(self, actions: list[Action]) -> None:
        """Append every step that is possible now: a version is copied, sent, evaluated, or has arrived."""
        while True:
            if self._in_transfer is not None and self._replicas_behind == 0:
                self._arrive(self._in_transfer, actions)
            self._evaluations.advance(self._buffer.published, actions, in_transfer=self._in_transfer is not None)
            if self._stopped:
                return
            if self._pending is not None and not self._has_copy:
                self._copying, self._pending = self._pending, None
                actions.append(do.CopyWeights(self._copying))
            if self._copied is None or self._in_transfer is not None or self._evaluations.is_running:
                return
            if not self._partial_rollout and self._placement.running:
                return
            self._in_transfer, self._copied = self._copied, None
            replicas = (replica for pool in (self._placement.pool, self._placement.lane) for replica in pool)
            self._replicas_behind = sum(self._is_behind(replica.version) for replica in replicas)
            actions.append(do.PublishWeights(self._in_transfer))

    @property
    def _has_copy(self) -> bool:
        return self._copying is not None or self._copied is not None

    def _arrive(self, version: int, actions: list[Action]) -> None:
        self._in_transfer = None
        self._buffer.publish(version)
        actions.append(VersionPublished(version))

    def _is_behind(self, version: int) -> bool:
        return self._in_transfer is not None and version < self._in_transfer

"""Tracks each version of the weights on its way from the trainer to all replicas, and the evaluations of versions.

    trained ─► pending ──CopyWeights──► copying ──WeightsCopied──► copied ──PublishWeights──► in transfer ──┐
                  │                        │                         │                                      │ VersionLoaded
                  │                        │                         └── waits for the previous version,    │ by all
                  └── waits for a place ───┴── block TrainGroups:        and for its evaluation             ▼
                      for its copy             it changes the weights                                   published

One version is in transfer at a time, and one more may wait as a copy. Only `TrainGroups` waits until a copy is
complete, because only training changes the weights. Without partial rollout, each sequence comes from one version: no
sequence starts between the copy and the arrival of a version, and the copy is sent when no sequence runs.

    EvaluateVersion ─► waits for its version ──published──► running ──all its groups complete or failed──► VersionEvaluated
                          │                                    │
                          └── later weights are on their way   └── the run stops ─► EvaluationSkipped
                              to the replicas, or the run stops ─► EvaluationSkipped

One evaluation runs at a time. No version is published while an evaluation runs, so all tokens of the evaluation come
from one version. A requested evaluation of the published version runs before the next version is sent, even if
evaluations of later versions already wait. If later requests replaced earlier ones, no evaluation would run while the
trainer is faster than the evaluations.
"""

from __future__ import annotations

from collections import deque

from qwen35_trainer.pipeline import commands as do
from qwen35_trainer.pipeline import events as on
from qwen35_trainer.pipeline.buffer import Buffer
from qwen35_trainer.pipeline.commands import Action
from qwen35_trainer.pipeline.notices import EvaluationSkipped, VersionEvaluated, VersionPublished
from qwen35_trainer.pipeline.placement import Placement
from qwen35_trainer.pipeline.requests import EvaluateVersion


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
        """Whether training must wait, because the next batch would change weights that are not copied yet."""
        return self._pending is not None or self._copying is not None

    @property
    def is_draining(self) -> bool:
        """Whether no sequence may start, because a version is on its way to the replicas.

        The version is being copied, has been copied and waits for its transfer, or is in transfer. While an evaluation
        runs, only a version in transfer counts, because the sequences of the evaluation must start. With partial
        rollout the value is always False, because sequences continue with the new weights.
        """
        if self._partial_rollout:
            return False
        return self._in_transfer is not None or (self._has_copy and not self._evaluations.is_running)

    @property
    def is_idle(self) -> bool:
        """Whether no version is on its way to the replicas, and no evaluation runs."""
        waiting = (self._pending, self._copying, self._copied, self._in_transfer)
        return all(step is None for step in waiting) and not self._evaluations.is_running

    def version_trained(self, version: int) -> None:
        """Queue `version` for publication, because its last batch has trained. Does nothing after `stop`."""
        if not self._stopped:
            self._pending = version

    def copied(self, event: on.WeightsCopied) -> None:
        """Record that the copy of a version is complete. Raises ValueError if the copy was not requested."""
        if event.version != self._copying:
            raise ValueError(f"version {event.version} copied, which was not requested")
        self._copying, self._copied = None, event.version

    def stop(self) -> None:
        """Begin no further copy or publication. A version that is already in transfer still arrives."""
        self._stopped, self._pending = True, None

    def replica_joined(self, version: int) -> None:
        """Count a replica that has joined among those that must still load the version in transfer.

        The replica is not counted if it already has this version or a later one. version: version of its weights.
        """
        self._replicas_behind += self._is_behind(version)

    def replica_lost(self, version: int) -> None:
        """Stop counting a lost replica among those that must still load the version in transfer.

        version: version of the weights that the replica had.
        """
        self._replicas_behind -= self._is_behind(version)

    def loaded(self, event: on.VersionLoaded) -> None:
        """Record that a replica has loaded a version.

        A version in transfer waits for this replica until the replica has loaded that version or a later one.
        """
        replica = self._placement.pool_of(event.replica)[event.replica]
        self._replicas_behind -= self._is_behind(replica.version) and not self._is_behind(event.version)
        replica.version = max(replica.version, event.version)

    def advance(self, actions: list[Action]) -> None:
        """Take every step of a publication or evaluation that is possible now, and append the actions to `actions`."""
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


class EvaluationQueue:
    """The requested evaluations, in order. Each ends in exactly one `VersionEvaluated` or `EvaluationSkipped`."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._waiting: deque[EvaluateVersion] = deque()
        self._running: EvaluateVersion | None = None
        self._unfinished: set[int] = set()  # groups of the running evaluation

    @property
    def is_running(self) -> bool:
        return self._running is not None

    def request(self, request: EvaluateVersion) -> None:
        """Enqueue an evaluation. `advance` starts it once its version is published."""
        self._waiting.append(request)

    def advance(self, published: int, actions: list[Action], *, in_transfer: bool) -> None:
        """Skip evaluations of versions older than `published`. If no evaluation runs, start the next one of `published`.

        actions: list to which the actions are appended. in_transfer: whether a later version is on its way to the
        replicas. If so, evaluations of `published` are skipped too, because some replicas may already have the later
        version.
        """
        later: deque[EvaluateVersion] = deque()
        while self._waiting:
            request = self._waiting.popleft()
            if request.version > published:
                later.append(request)
            elif request.version < published or in_transfer:
                actions.append(EvaluationSkipped(request.version))
            elif self._running is not None:
                later.append(request)
            else:
                self._start(request, actions)
        self._waiting = later

    def group_ended(self, number: int, actions: list[Action]) -> None:
        """Record that a group of the running evaluation is complete or has failed.

        The last such group ends the evaluation. number: number of the group. actions: list to which the actions are
        appended.
        """
        del self._placement.groups[number]
        self._unfinished.discard(number)
        self._end_if_complete(actions)

    def skip_all(self, actions: list[Action]) -> None:
        """Skip all waiting evaluations, cancel the running one, and append the actions to `actions`."""
        if self._running is not None:
            self._placement.drop(sorted(self._unfinished), actions)
            for number in self._unfinished:
                del self._placement.groups[number]
            self._unfinished.clear()
            actions.append(EvaluationSkipped(self._running.version))
            self._running = None
        actions += [EvaluationSkipped(request.version) for request in self._waiting]
        self._waiting.clear()

    def _start(self, request: EvaluateVersion, actions: list[Action]) -> None:
        self._running = request
        self._unfinished.update(request.groups)
        self._placement.add_evaluation(request.groups, request.samples)
        self._end_if_complete(actions)

    def _end_if_complete(self, actions: list[Action]) -> None:
        if self._running is not None and not self._unfinished:
            actions.append(VersionEvaluated(self._running.version))
            self._running = None

"""The evaluations that a run has requested: each is carried out on one version, or skipped.

    request ─► waits for its version ──published──► running ──all its groups complete or failed──► VersionEvaluated
                  │                                    │
                  └── later weights are on their way   └── the run stops ─► EvaluationSkipped
                      to the replicas, or the run stops ─► EvaluationSkipped

No version is published while an evaluation runs, so all of its tokens come from one version. A version that has arrived is
therefore evaluated before the next one is published, however many evaluations wait: none is dropped in favour of a later one,
because then none would run while the trainer is faster than evaluations are. One runs at a time.
"""

from __future__ import annotations

from collections import deque

from qwen35_trainer.pipeline.actions import Action
from qwen35_trainer.pipeline.notices import EvaluationSkipped, VersionEvaluated
from qwen35_trainer.pipeline.placement import Placement
from qwen35_trainer.pipeline.requests import EvaluateVersion


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
        """Enqueue an evaluation. The next `advance` starts it if its version is published."""
        self._waiting.append(request)

    def advance(self, published: int, actions: list[Action], *, in_transfer: bool) -> None:
        """Start the next evaluation of version `published`, and skip those of versions that replicas no longer have.

        in_transfer: whether a later version is on its way, so that some replicas may have it already.
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
        """Note that a group of the running evaluation is complete or has failed."""
        del self._placement.groups[number]
        self._unfinished.discard(number)
        self._end_if_complete(actions)

    def skip_all(self, actions: list[Action]) -> None:
        """Skip every evaluation: those that wait, and the running one, whose sequences are cancelled."""
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

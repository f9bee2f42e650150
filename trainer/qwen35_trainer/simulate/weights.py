"""New weights on their way to the engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from qwen35_trainer.pipeline.events import Loaded
from qwen35_trainer.simulate.clock import Clock
from qwen35_trainer.simulate.engine import Replica
from qwen35_trainer.simulate.hardware import Prefill, Publication


class Weights:
    """Publications: a transfer, then a pause of every engine, then what it decodes is of the new version."""

    def __init__(
        self,
        publication: Publication,
        prefill: Prefill,
        clock: Clock,
        replicas: Mapping[int, Replica],
        tell: Callable[[Loaded], None],
    ) -> None:
        self.newest = 0
        """The last version that was published: what comes to the pool comes with it."""
        self._publication, self._prefill, self._clock = publication, prefill, clock
        self._replicas, self._tell = replicas, tell

    def publish(self, version: int) -> None:
        """A version sets out for every engine."""
        self.newest = version
        self._clock.after(self._publication.transfer, self._arrive, version)

    def _arrive(self, version: int) -> None:
        pause = self._publication.pause if self._publication.rolling else 0.0
        behind = [replica for replica in self._replicas.values() if replica.version < version]
        for place, replica in enumerate(behind):
            self._clock.after(place * pause, self._pause, (replica, version))

    def _pause(self, argument: tuple[Replica, int]) -> None:
        replica = argument[0]
        replica.advance(self._clock.now)
        replica.stop(self._publication.pause)
        self._clock.after(self._publication.pause, self._load, argument)

    def _load(self, argument: tuple[Replica, int]) -> None:
        replica, version = argument
        if replica.lost:
            return
        replica.advance(self._clock.now)
        replica.load(version)
        if self._publication.recompute:
            prompts = self._prefill.prompt_tokens * len(replica.held)
            replica.stop(self._prefill.seconds(prompts + replica.computed()))
        self._tell(Loaded(replica.number, version))

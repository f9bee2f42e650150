"""A rollout worker that records the times of its engine. Ray's workers import it, so it is a module of its own."""

from __future__ import annotations

from benchmarks.replica_pauses import EngineTimes, RecordedEngine
from qwen35_trainer.rollout.rollout_engine import RolloutEngine
from qwen35_trainer.runtime.rollout_worker import RolloutWorker


class RecordedWorker(RolloutWorker):
    """The actor of one replica, as in a training."""

    _recorded: RecordedEngine

    def _build(self) -> RolloutEngine:
        engine = super()._build()
        self._recorded = RecordedEngine(engine)
        self._recorded.record()
        return engine

    async def take_times(self) -> EngineTimes:
        """Return the times of the engine since the previous call."""
        return self._recorded.take()

"""A simulation in which every event is checked."""

from collections import Counter

from qwen35_trainer.pipeline import commands as do
from qwen35_trainer.pipeline import notices
from qwen35_trainer.pipeline.events import Event
from qwen35_trainer.simulate.simulation import Simulation
from qwen35_trainer.simulate.workload import BatchPolicy, MissedDeadlinePolicy, Workload


class Watched(Simulation):
    """Asserts, during the run, that the nested inequalities hold, and keeps account of every group and token."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self.dispatched: dict[int, int] = {}
        """Group → prompt."""
        self.exits: Counter[int] = Counter()
        """Group → how often it left."""
        self.trained: dict[int, list[int]] = {}
        """Prompt → batches that it trained in."""
        self.oldest: list[int] = []
        """The maximum lag of any token, for each batch."""
        self.waits = (
            workload.on_missed_deadline is MissedDeadlinePolicy.WAIT and workload.policy is BatchPolicy.DEADLINE_FIRST
        )

    def send(self, event: Event) -> None:
        super().send(event)
        if self.waits:
            assert self.coordinator.buffer.excess() == 0, event

    def _group_dispatched(self, action: notices.GroupDispatched) -> None:
        super()._group_dispatched(action)
        assert action.group not in self.dispatched
        self.dispatched[action.group] = action.position

    def _group_left(self, action: notices.GroupLeft) -> None:
        super()._group_left(action)
        self.exits[action.group] += 1

    def _train_batch(self, action: do.TrainGroups) -> None:
        oldest = 0
        for group in action.groups:
            self.exits[group] += 1
            self.trained.setdefault(self.dispatched[group], []).append(action.batch)
            for sequence in self._groups[group].sequences:
                assert abs(sum(tokens for _, tokens in sequence.spans) - sequence.length) < 1e-3, sequence.name
                oldest = max(oldest, *(action.version - born for born, _ in sequence.spans))
        self.oldest.append(oldest)
        super()._train_batch(action)

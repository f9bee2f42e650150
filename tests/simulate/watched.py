"""A world whose every event is checked."""

from collections import Counter

from qwen35_trainer.pipeline import actions as do
from qwen35_trainer.pipeline.events import Event
from qwen35_trainer.simulate.load import Load, OnMissedDeadline, Policy
from qwen35_trainer.simulate.world import World


class Watched(World):
    """Asserts, as the run goes on, that the nested inequalities hold, and keeps account of every group and token."""

    def __init__(self, load: Load) -> None:
        super().__init__(load)
        self.dispatched: dict[int, int] = {}
        """Group → prompt."""
        self.exits: Counter[int] = Counter()
        """Group → how often it left."""
        self.trained: dict[int, list[int]] = {}
        """Prompt → batches that it trained in."""
        self.oldest: list[int] = []
        """Of each batch, the greatest lag of any token."""
        self.waits = load.on_missed_deadline is OnMissedDeadline.WAIT and load.policy is Policy.DEADLINE_FIRST

    def tell(self, event: Event) -> None:
        super().tell(event)
        if self.waits:
            assert self.coordinator.buffer.excess() == 0, event

    def _dispatched(self, action: do.Dispatched) -> None:
        super()._dispatched(action)
        assert action.group not in self.dispatched
        self.dispatched[action.group] = action.position

    def _left(self, action: do.Left) -> None:
        super()._left(action)
        self.exits[action.group] += 1

    def _train(self, action: do.Train) -> None:
        oldest = 0
        for group in action.groups:
            self.exits[group] += 1
            self.trained.setdefault(self.dispatched[group], []).append(action.batch)
            for sequence in self._groups[group].sequences:
                assert abs(sum(tokens for _, tokens in sequence.spans) - sequence.length) < 1e-3, sequence.name
                oldest = max(oldest, *(action.version - born for born, _ in sequence.spans))
        self.oldest.append(oldest)
        super()._train(action)

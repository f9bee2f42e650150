"""The rules: the project's own, and those of other projects behind the same interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import floor, inf

from qwen35_trainer.pipeline.buffer import Batch, Buffer
from qwen35_trainer.pipeline.window import Window
from qwen35_trainer.simulate.load import Load, Policy


class Peer(Buffer, ABC):
    """A buffer that knows an order of dispatch and an order of completion, and no deadlines."""

    def __init__(self, window: Window) -> None:
        super().__init__(window)
        self._order: dict[int, bool] = {}  # in the order of dispatch: has it finished
        self._completed: dict[int, None] = {}  # in the order of completion

    @property
    def held(self) -> int:
        return len(self._order)

    @property
    def pending(self) -> tuple[int, ...]:
        return tuple(self._order)

    @property
    def finished(self) -> int:
        return len(self._completed)

    @property
    def counted(self) -> int:
        trained = self._batch - self._published * self.window.batches_per_version
        return len(self._order) + trained * self.window.groups_per_batch

    def deadline(self, group: int) -> int:
        """Of stragglers, the one that was dispatched first goes to the lane first."""
        return group

    def dispatch(self, group: int, version: int) -> None:
        self._order[group] = False

    def born(self, group: int, version: int) -> None:
        """No news: nothing here has an age."""

    def finish(self, group: int) -> None:
        self._order[group] = True
        self._completed[group] = None

    def leave(self, group: int) -> None:
        del self._order[group]

    def excess(self) -> int:
        return 0

    def take(self) -> Batch | None:
        size = self.window.groups_per_batch
        groups = self._choose(size) if len(self._completed) >= size else []
        if len(groups) < size:
            return None
        for group in groups:
            del self._order[group], self._completed[group]
        self._batch += 1
        return Batch(tuple(groups))

    @abstractmethod
    def _choose(self, size: int) -> list[int]:
        """So many finished groups; fewer when the rule makes the batch wait. There are enough of them."""


class Completion(Peer):
    """What finishes first trains first."""

    def _choose(self, size: int) -> list[int]:
        return [group for group, _ in zip(self._completed, range(size), strict=False)]


class WindowedFifo(Peer):
    """In the order of dispatch; what has finished may leave if it was dispatched less than `reach` groups after the first one
    that still runs. With a reach of 1 it is strict FIFO.
    """

    def __init__(self, window: Window, reach: int) -> None:
        super().__init__(window)
        self._reach = reach
        self._blocked_at = -1  # finished groups when it last found too few: with as many there are too few still

    def _choose(self, size: int) -> list[int]:
        if self._blocked_at == len(self._completed):
            return []
        chosen: list[int] = []
        end = inf
        for group, finished in self._order.items():  # groups are numbered in the order of dispatch
            if group >= end or len(chosen) == size:
                break
            if finished:
                chosen.append(group)
            else:
                end = min(end, group + self._reach)
        self._blocked_at = -1 if len(chosen) == size else len(self._completed)
        return chosen


def buffer_of(load: Load) -> Buffer | None:
    """The buffer whose rule `load.policy` names; None stands for the coordinator's own."""
    window = load.settings.window
    match load.policy:
        case Policy.FIFO:
            return WindowedFifo(window, 1)
        case Policy.WINDOWED_FIFO:
            return WindowedFifo(window, max(1, floor(load.window_fraction * window.limit)))
        case Policy.COMPLETION:
            return Completion(window)
        case _:
            return None

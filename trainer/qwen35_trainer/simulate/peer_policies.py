"""The rules by which other projects choose the groups of a batch, for comparison.

Each rule is a subclass of this project's `Buffer`, so that the same coordinator can use it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import floor, inf

from qwen35_trainer.pipeline.buffer import Batch, Buffer
from qwen35_trainer.pipeline.window import Window
from qwen35_trainer.simulate.workload import BatchPolicy, Workload


class PeerBuffer(Buffer, ABC):
    """A buffer that chooses groups by a rule of another project, for comparison. Such a rule has no deadlines."""

    def __init__(self, window: Window) -> None:
        super().__init__(window)
        self._order: dict[int, bool] = {}  # group → whether it has finished, in order of dispatch
        self._completed: dict[int, None] = {}  # in order of completion

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
        """Return the number of the group as a substitute for a deadline.

        The rules of other projects have no deadlines. The coordinator uses the number to order the sequences that may
        move to the straggler lane.
        """
        return group

    def dispatch(self, group: int, version: int) -> None:
        self._order[group] = False

    def born(self, group: int, version: int) -> None:
        """Ignore the version of a group's first token, because the rules of other projects do not use it."""

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
        """Return `size` finished groups. Return fewer if the rule requires the batch to wait.

        The method is called only when at least `size` groups have finished.
        """


class CompletionOrder(PeerBuffer):
    """A buffer with the rule that a batch takes groups in order of completion."""

    def _choose(self, size: int) -> list[int]:
        return [group for group, _ in zip(self._completed, range(size), strict=False)]


class WindowedFifo(PeerBuffer):
    """A buffer with the rule that a batch takes finished groups in order of dispatch, and may skip unfinished ones.

    After the first unfinished group, a batch considers only the next `reach` - 1 groups in order of dispatch. With a
    reach of 1, it takes nothing after an unfinished group (strict FIFO).
    """

    def __init__(self, window: Window, reach: int) -> None:
        super().__init__(window)
        self._reach = reach
        self._blocked_at = (
            -1
        )  # number of finished groups at the last failed choice, which fails again with the same number

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


def buffer_of(workload: Workload) -> Buffer | None:
    """Return a new buffer for the workload's policy; None if the policy uses the coordinator's own buffer."""
    window = workload.settings.window
    match workload.policy:
        case BatchPolicy.FIFO:
            return WindowedFifo(window, 1)
        case BatchPolicy.WINDOWED_FIFO:
            return WindowedFifo(window, max(1, floor(workload.window_fraction * window.limit)))
        case BatchPolicy.COMPLETION:
            return CompletionOrder(window)
        case _:
            return None

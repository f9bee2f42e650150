"""What is dispatched and not yet trained, and which of it the next batch takes: deadline-first.

    dispatch ─► running ──finish──► finished ──take──► trained
                   └────────────── discard ──────────► discarded          every group leaves exactly once

Before batch b may leave, for every d ≥ b at least |D(d)| - (d - b)·P groups of D(d) must be in it, where D(d) are the
held groups with deadline ≤ d and P is the batch's size. They are taken first, earliest deadline first; the rest of the
batch fills in the order of completion. When a group that must go has not finished, the missed-deadline policy decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from qwen35_trainer.pipeline.window import Window


class OnMissedDeadline(StrEnum):
    """What happens when a group that must go has not finished (values of `spec.async.onMissedDeadline`)."""

    WAIT = "Wait"
    """The batch waits for it: the bound holds for every token."""
    MASK_TOKENS = "MaskTokens"
    """The batch goes without it; when it trains later, its tokens older than the bound are left out of the loss."""
    DISCARD = "Discard"
    """The batch goes without it. What cannot train by its deadline leaves, finished or not, and its prompt is dispatched
    again: biased against long answers, for comparison only."""


@dataclass(frozen=True)
class Batch:
    """Groups to train now, and groups that leave without being trained."""

    groups: tuple[int, ...]
    discarded: tuple[int, ...] = ()


@dataclass(frozen=True)
class Blocked:
    """No batch can leave yet. `due` are running groups that it must contain; empty when there is just too little."""

    finished: int
    needed: int
    due: tuple[int, ...] = ()


@dataclass
class _Held:
    group: int
    deadline: int
    completed: int | None = None


class Buffer:
    """Groups between dispatch and training. Deterministic: the same calls give the same batches."""

    def __init__(self, window: Window, on_missed_deadline: OnMissedDeadline = OnMissedDeadline.WAIT) -> None:
        self._window = window
        self._policy = on_missed_deadline
        self._held: dict[int, _Held] = {}
        self._completions = 0
        self._published = 0
        self._batch = 0

    @property
    def batch(self) -> int:
        """Number of the next batch."""
        return self._batch

    @property
    def pending(self) -> tuple[int, ...]:
        """Groups dispatched and not yet left, in order of dispatch."""
        return tuple(self._held)

    @property
    def counted(self) -> int:
        """Groups that count against the window: held, or trained at the version that replicas have, or a later one."""
        trained = self._batch - self._published * self._window.batches_per_version
        return len(self._held) + trained * self._window.groups_per_batch

    @property
    def room(self) -> int:
        """Groups that may be dispatched now."""
        return self._window.limit - self.counted

    def start_at(self, batch: int) -> None:
        """Continue an earlier run: `batch` is the next one. Only before the first dispatch."""
        assert not self._held, "start_at comes before the first dispatch"
        self._batch = batch
        self._published = self._window.version_of(batch)

    def dispatch(self, group: int, version: int) -> None:
        """A group enters. `version`: every replica has at least these weights, so it cannot be born earlier."""
        if self.room < 1:
            raise ValueError(f"group {group} dispatched into a full window ({self.counted} of {self._window.limit})")
        if group in self._held:
            raise ValueError(f"group {group} dispatched twice")
        self._held[group] = _Held(group, self._window.deadline(version))

    def born(self, group: int, version: int) -> None:
        """The group's first token comes from `version`: that sets its deadline."""
        if group in self._held:
            self._held[group].deadline = self._window.deadline(version)

    def finish(self, group: int) -> None:
        """All sequences of the group are complete and scored."""
        held = self._held[group]
        if held.completed is not None:
            raise ValueError(f"group {group} finished twice")
        held.completed = self._completions
        self._completions += 1

    def publish(self, version: int) -> None:
        """Every replica has `version`: what trained before it counts no longer.

        The next batch may be training already while its predecessors' weights travel; it goes on counting.
        """
        # Rounded up: the last version of a run may be cut short.
        if not self._published < version <= -(-self._batch // self._window.batches_per_version):
            raise ValueError(f"version {version} published after {self._published}, with {self._batch} batches trained")
        self._published = version

    def take(self) -> Batch | Blocked:
        """The next batch, which thereby leaves the buffer, or why there is none yet."""
        size = self._window.groups_per_batch
        chosen, due = self._required()
        finished = sorted((h for h in self._held.values() if h.completed is not None), key=_completion)
        if (due and self._policy is OnMissedDeadline.WAIT) or len(finished) < size:
            return Blocked(len(finished), size, tuple(due) if self._policy is OnMissedDeadline.WAIT else ())
        for held in finished:
            if len(chosen) < size:
                chosen.setdefault(held.group)
        for group in chosen:
            del self._held[group]
        discarded = self._missed() if self._policy is OnMissedDeadline.DISCARD else ()
        for group in discarded:
            del self._held[group]
        self._batch += 1
        return Batch(tuple(chosen), discarded)

    def _required(self) -> tuple[dict[int, None], list[int]]:
        """Finished groups that the batch must contain, and running ones without which it may not leave."""
        size = self._window.groups_per_batch
        chosen: dict[int, None] = {}
        candidates: list[_Held] = []
        waiting: list[int] = []
        due: list[int] = []
        nested = 0  # |D(d)|
        for deadline, members in self._by_deadline():
            nested += len(members)
            required = min(nested - (deadline - self._batch) * size, size)
            waiting += [h.group for h in members if h.completed is None]
            candidates += sorted((h for h in members if h.completed is not None), key=_completion)
            while len(chosen) < required and candidates:
                chosen[candidates.pop(0).group] = None
            if len(chosen) < required and not due:
                due = list(waiting)
        return chosen, due

    def _by_deadline(self) -> list[tuple[int, list[_Held]]]:
        """Held groups by deadline, the earliest first, without running ones whose deadline has passed already."""
        groups: dict[int, list[_Held]] = {}
        for held in self._held.values():
            if held.completed is not None or held.deadline >= self._batch:
                groups.setdefault(max(held.deadline, self._batch), []).append(held)
        return sorted(groups.items())

    def _missed(self) -> tuple[int, ...]:
        return tuple(h.group for h in self._held.values() if h.deadline < self._batch + 1)


def _completion(held: _Held) -> int:
    assert held.completed is not None
    return held.completed

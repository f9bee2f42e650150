"""A run in virtual time: the real coordinator, and a model of everything that it talks to.

Coordinator ── actions ──► World ──► Rollout, a trainer ──► Clock
     ▲                       │                                │
     └────────── events ─────┴──────────── time passes ◄──────┘
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qwen35_trainer.pipeline import actions as do
from qwen35_trainer.pipeline import events as on
from qwen35_trainer.pipeline.coordinator import Coordinator
from qwen35_trainer.pipeline.events import Event
from qwen35_trainer.simulate.clock import Clock
from qwen35_trainer.simulate.engine import Sequence
from qwen35_trainer.simulate.lengths import Groups
from qwen35_trainer.simulate.load import Load
from qwen35_trainer.simulate.measures import Measures
from qwen35_trainer.simulate.policies import buffer_of
from qwen35_trainer.simulate.result import Result
from qwen35_trainer.simulate.rollout import Rollout


class _Group:
    __slots__ = ("running", "sequences", "signal")

    def __init__(self, sequences: list[Sequence], signal: bool) -> None:
        self.sequences, self.signal = sequences, signal
        self.running = len(sequences)


class World:
    """One run of a load."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.clock = Clock()
        self.coordinator = Coordinator(load.settings, buffer=buffer_of(load))
        self.rollout = Rollout(load, self.clock, self.tell, self._finished)
        self._draw = Groups(load.lengths, load.group_size, load.correlation, load.drift, load.signal, load.seed)
        self.measures = Measures(load, self._draw, self.rollout)
        self._trainer = load.train_pool
        self._groups: dict[int, _Group] = {}
        self._events = self._publications = 0
        self._ended = False
        self._actions: dict[type, Callable[[Any], None]] = {
            do.Dispatched: self._dispatched,
            do.Left: self._left,
            do.Start: self._start,
            do.Move: self.rollout.move,
            do.Cancel: self.rollout.cancel,
            do.Train: self._train,
            do.Copy: self._nothing,
            do.Publish: self._publish,
            do.Published: self._published,
            do.Evaluated: self._nothing,
            do.Checkpoint: self._checkpoint,
            do.Ended: self._end,
        }

    def run(self) -> Result:
        """Play it to its end."""
        self.rollout.begin()
        while not self._ended:
            if not self.clock.step():
                raise RuntimeError(
                    f"nothing can happen at {self.clock.now} and the run has not ended: batch {self.coordinator.buffer.batch}, "
                    f"{self.coordinator.running} sequences run, {self.coordinator.waiting} wait"
                )
        return self.measures.result(self.coordinator.left, self._publications, self._events)

    def tell(self, event: Event) -> None:
        """The coordinator hears of it, and what it asks for is done."""
        self._events += 1
        for action in self.coordinator.handle(event):
            self._actions[type(action)](action)

    def _finished(self, sequence: Sequence) -> None:
        number = sequence.name[0]
        self.tell(on.Finished(sequence.name, sequence.length))
        group = self._groups[number]
        group.running -= 1
        if group.running == 0:
            self.tell(on.Scored(number, group.signal))

    # Actions.

    def _dispatched(self, action: do.Dispatched) -> None:
        lengths, signal = self._draw.draw(action.position, self.coordinator.buffer.batch)
        sequences = [Sequence((action.group, index), length) for index, length in enumerate(lengths)]
        self._groups[action.group] = _Group(sequences, signal)

    def _left(self, action: do.Left) -> None:
        del self._groups[action.group]

    def _start(self, action: do.Start) -> None:
        groups = self._groups
        self.rollout.start(
            action.worker, [(groups[name[0]].sequences[name[1]], kept) for name, kept in action.sequences]
        )

    def _train(self, action: do.Train) -> None:
        groups = [self._groups.pop(group).sequences for group in action.groups]
        self.measures.batch_begins(self.clock.now, action.batch, action.version, groups)
        tokens = sum(sequence.length for group in groups for sequence in group)
        seconds = self._trainer.seconds(tokens)
        self.clock.after(seconds, self._trained, (action.batch, seconds))

    def _trained(self, argument: tuple[int, float]) -> None:
        batch, seconds = argument
        self.measures.batch_done(self.clock.now, batch, seconds)
        self.tell(on.Trained(batch))

    def _publish(self, action: do.Publish) -> None:
        self.rollout.weights.publish(action.version)

    def _published(self, action: do.Published) -> None:
        self._publications += 1

    def _checkpoint(self, action: do.Checkpoint) -> None:
        self.clock.after(0.0, self.tell, on.Checkpointed(action.snapshot.batch))

    def _end(self, action: do.Ended) -> None:
        self._ended = True

    def _nothing(self, action: do.Action) -> None:
        """It takes no time here."""

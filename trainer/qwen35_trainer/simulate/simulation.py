"""A run in virtual time: the real coordinator, and models of everything that it controls.

Coordinator ── actions ──► Simulation ──► SimulatedRollout, the trainer's cost ──► VirtualClock
     ▲                         │                                                       │
     └──────── events ─────────┴───────────────────── time passes ◄────────────────────┘
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qwen35_trainer.pipeline import actions as do
from qwen35_trainer.pipeline import events as on
from qwen35_trainer.pipeline.coordinator import Coordinator, NothingToTrain
from qwen35_trainer.simulate.peer_policies import buffer_of
from qwen35_trainer.simulate.response_lengths import GroupSampler
from qwen35_trainer.simulate.simulated_replica import SimulatedSequence
from qwen35_trainer.simulate.simulated_rollout import SimulatedRollout
from qwen35_trainer.simulate.simulation_result import Measurement, SimulationResult
from qwen35_trainer.simulate.virtual_clock import VirtualClock
from qwen35_trainer.simulate.workload import Workload


def simulate(workload: Workload) -> SimulationResult:
    """Simulate a workload. Deterministic: equal workloads give equal results.

    Raises ValueError if the run cannot end because groups have a signal too rarely.
    """
    try:
        return Simulation(workload).run()
    except NothingToTrain as error:
        raise ValueError(f"signal {workload.signal} is too rare for dynamic_sampling: {error}") from error


class _SimulatedGroup:
    __slots__ = ("sequences", "signal", "unfinished")

    def __init__(self, sequences: list[SimulatedSequence], signal: bool) -> None:
        self.sequences, self.signal = sequences, signal
        self.unfinished = len(sequences)


class Simulation:
    """One simulated run of a workload, with the coordinator of real runs in virtual time."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.clock = VirtualClock()
        self.coordinator = Coordinator(workload.settings, buffer=buffer_of(workload))
        self.rollout = SimulatedRollout(workload, self.clock, self.send, self._sequence_finished)
        self._sampler = GroupSampler(
            workload.lengths,
            workload.group_size,
            workload.correlation,
            workload.drift,
            workload.signal,
            workload.seed,
        )
        self.measurement = Measurement(workload, self._sampler, self.rollout)
        self._trainer = workload.train_pool
        self._groups: dict[int, _SimulatedGroup] = {}
        self._events = self._publications = 0
        self._ended = False
        self._handlers: dict[type, Callable[[Any], None]] = {
            do.GroupDispatched: self._group_dispatched,
            do.GroupLeft: self._group_left,
            do.StartSequences: self._start_sequences,
            do.MoveSequence: self.rollout.move,
            do.CancelSequences: self.rollout.cancel,
            do.TrainGroups: self._train_batch,
            do.CopyWeights: self._take_no_time,
            do.PublishWeights: self._publish_weights,
            do.VersionPublished: self._version_published,
            do.VersionEvaluated: self._take_no_time,
            do.SaveCheckpoint: self._save_checkpoint,
            do.RunEnded: self._run_ended,
        }

    def run(self) -> SimulationResult:
        """Simulate the whole run."""
        self.rollout.begin()
        while not self._ended:
            if not self.clock.step():
                raise RuntimeError(
                    f"the simulation is stuck at {self.clock.now}: batch {self.coordinator.buffer.batch}, "
                    f"{self.coordinator.running} sequences run, {self.coordinator.waiting} wait"
                )
        return self.measurement.result(self.coordinator.left_by_reason, self._publications, self._events)

    def send(self, event: on.Event) -> None:
        """Pass an event to the coordinator and carry out its actions."""
        self._events += 1
        for action in self.coordinator.handle(event):
            self._handlers[type(action)](action)

    def _sequence_finished(self, sequence: SimulatedSequence) -> None:
        number = sequence.name[0]
        self.send(on.SequenceFinished(sequence.name, sequence.length))
        group = self._groups[number]
        group.unfinished -= 1
        if group.unfinished == 0:
            self.send(on.GroupScored(number, group.signal))

    # Actions of the coordinator.

    def _group_dispatched(self, action: do.GroupDispatched) -> None:
        lengths, signal = self._sampler.draw(action.position, self.coordinator.buffer.batch)
        sequences = [SimulatedSequence((action.group, index), length) for index, length in enumerate(lengths)]
        self._groups[action.group] = _SimulatedGroup(sequences, signal)

    def _group_left(self, action: do.GroupLeft) -> None:
        del self._groups[action.group]

    def _start_sequences(self, action: do.StartSequences) -> None:
        groups = self._groups
        sequences = [(groups[group].sequences[index], kept) for (group, index), kept in action.sequences]
        self.rollout.start(action.replica, sequences)

    def _train_batch(self, action: do.TrainGroups) -> None:
        groups = [self._groups.pop(group).sequences for group in action.groups]
        self.measurement.batch_begins(self.clock.now, action.batch, action.version, groups)
        tokens = sum(sequence.length for group in groups for sequence in group)
        seconds = self._trainer.seconds(tokens)
        self.clock.after(seconds, self._batch_trained, (action.batch, seconds))

    def _batch_trained(self, argument: tuple[int, float]) -> None:
        batch, seconds = argument
        self.measurement.batch_trained(self.clock.now, batch, seconds)
        self.send(on.BatchTrained(batch))

    def _publish_weights(self, action: do.PublishWeights) -> None:
        self.rollout.publication.publish(action.version)

    def _version_published(self, action: do.VersionPublished) -> None:
        self._publications += 1

    def _save_checkpoint(self, action: do.SaveCheckpoint) -> None:
        self.clock.after(0.0, self.send, on.CheckpointCompleted(action.snapshot.batch))

    def _run_ended(self, action: do.RunEnded) -> None:
        self._ended = True

    def _take_no_time(self, action: do.Action) -> None:
        """Do nothing: the simulation has no cost for this action."""

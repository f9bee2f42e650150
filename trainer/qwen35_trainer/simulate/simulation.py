"""A run in virtual time: the real coordinator, and models of everything that it controls.

Coordinator ── actions ──► Simulation ──► SimulatedRollout, the trainer's cost ──► VirtualClock
     ▲                         │                                                       │
     └──────── events ─────────┴───────────────────── time passes ◄────────────────────┘
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qwen35_trainer.pipeline import commands as do
from qwen35_trainer.pipeline import events as on
from qwen35_trainer.pipeline import notices
from qwen35_trainer.pipeline.coordinator import Coordinator, NothingToTrain
from qwen35_trainer.simulate.peer_policies import buffer_of
from qwen35_trainer.simulate.response_lengths import GroupSampler
from qwen35_trainer.simulate.simulated_replica import SimulatedSequence, VirtualClock
from qwen35_trainer.simulate.simulated_rollout import SimulatedRollout
from qwen35_trainer.simulate.simulation_result import Measurement, SimulationResult
from qwen35_trainer.simulate.workload import Workload


def simulate(workload: Workload) -> SimulationResult:
    """Simulate a workload, and return the measures of the run. Equal workloads give equal results.

    Raises ValueError if the run cannot end, because with dynamic sampling too few groups
    have signal (rewards that differ).
    """
    try:
        return Simulation(workload).run()
    except NothingToTrain as error:
        raise ValueError(f"signal {workload.signal} is too rare for dynamic_sampling: {error}") from error


class _SimulatedGroup:
    __slots__ = ("replicas", "sequences", "signal", "unfinished")

    def __init__(self, sequences: list[SimulatedSequence], signal: bool) -> None:
        self.sequences, self.signal = sequences, signal
        self.unfinished = len(sequences)
        self.replicas: set[int] = set()
        """The numbers of the replicas on which sequences of the group started."""


class Simulation:
    """One simulated run of a workload: the coordinator of real runs with a virtual clock and models of the pools."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.clock = VirtualClock()
        self.coordinator = Coordinator(
            workload.settings,
            prompt_tokens_of=lambda position: workload.prefill.prompt_tokens,
            buffer=buffer_of(workload),
        )
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
            notices.GroupDispatched: self._group_dispatched,
            notices.GroupLeft: self._group_left,
            do.StartSequences: self._start_sequences,
            do.MoveSequences: self.rollout.move,
            do.CancelSequences: self.rollout.cancel,
            do.TrainGroups: self._train_batch,
            do.CopyWeights: self._copy_weights,
            do.PublishWeights: self._publish_weights,
            notices.VersionPublished: self._version_published,
            do.SaveCheckpoint: self._save_checkpoint,
            notices.RunEnded: self._run_ended,
        }

    def run(self) -> SimulationResult:
        """Simulate the whole run, and return its measures. May be called once.

        Raises RuntimeError if no further call is scheduled although the run has not ended.
        """
        self.rollout.begin()
        while not self._ended:
            if not self.clock.step():
                raise RuntimeError(
                    f"the simulation is stuck at {self.clock.now}: batch {self.coordinator.buffer.batch}, "
                    f"{self.coordinator.running} sequences run, {self.coordinator.waiting} wait"
                )
        return self.measurement.result(self.coordinator.left_by_reason, self._publications, self._events)

    def send(self, event: on.Event) -> None:
        """Pass an event to the coordinator, and carry out the actions that it returns."""
        self._events += 1
        for action in self.coordinator.handle(event):
            self._handlers[type(action)](action)

    def _sequence_finished(self, sequence: SimulatedSequence) -> None:
        number = sequence.name[0]
        self.send(on.SequenceFinished(sequence.name, sequence.length))
        group = self._groups[number]
        group.unfinished -= 1
        if group.unfinished == 0:
            scored = on.GroupScored(number, group.signal)
            if self.workload.scoring_latency:
                self.clock.after(self.workload.scoring_latency, self.send, scored)
            else:
                self.send(scored)

    # Actions of the coordinator.

    def _group_dispatched(self, action: notices.GroupDispatched) -> None:
        lengths, signal = self._sampler.draw(action.position, self.coordinator.buffer.batch)
        sequences = [SimulatedSequence((action.group, index), length) for index, length in enumerate(lengths)]
        self._groups[action.group] = _SimulatedGroup(sequences, signal)

    def _group_left(self, action: notices.GroupLeft) -> None:
        del self._groups[action.group]

    def _start_sequences(self, action: do.StartSequences) -> None:
        groups = self._groups
        sequences = [(groups[group].sequences[index], kept) for (group, index), kept in action.sequences]
        for (group, _), _ in action.sequences:
            groups[group].replicas.add(action.replica)
        self.rollout.start(action.replica, sequences)

    def _train_batch(self, action: do.TrainGroups) -> None:
        trained = [self._groups.pop(group) for group in action.groups]
        groups = [group.sequences for group in trained]
        replicas = sum(len(group.replicas) for group in trained)
        self.measurement.batch_begins(self.clock.now, action.batch, action.version, groups, replicas)
        tokens = sum(sequence.length for group in groups for sequence in group)
        seconds = self._trainer.seconds(tokens)
        self.clock.after(seconds, self._batch_trained, (action.batch, seconds))

    def _batch_trained(self, argument: tuple[int, float]) -> None:
        batch, seconds = argument
        self.measurement.batch_trained(self.clock.now, batch, seconds)
        self.send(on.BatchTrained(batch))

    def _copy_weights(self, action: do.CopyWeights) -> None:
        self.clock.after(self.workload.publication.copy, self._weights_copied, action.version)

    def _weights_copied(self, version: int) -> None:
        self.measurement.copy_seconds += self.workload.publication.copy
        self.send(on.WeightsCopied(version))

    def _publish_weights(self, action: do.PublishWeights) -> None:
        self.rollout.publication.publish(action.version)

    def _version_published(self, action: notices.VersionPublished) -> None:
        self._publications += 1

    def _save_checkpoint(self, action: do.SaveCheckpoint) -> None:
        self.clock.after(0.0, self.send, on.CheckpointCompleted(action.snapshot.batch))

    def _run_ended(self, action: notices.RunEnded) -> None:
        self._ended = True

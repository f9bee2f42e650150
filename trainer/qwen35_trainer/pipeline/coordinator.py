"""The coordinator: turns events and requests into commands and notices. It has no clock, no thread and no I/O.

    prompts ─► GroupDispatched ─► queue ─► StartSequences ─► SequenceFinished ─► GroupScored ─► buffer ─► TrainGroups
                      ▲             ▲            │                    │               │                        │
                      │             └─── lost ◄──┼──► lane            └ GroupLeft:    └ GroupLeft:             ▼
                      │                     MoveSequences               failed          filtered          BatchTrained
                      │                                                                                        │
                      │                                                                  SaveCheckpoint ◄──────┤
                      │                                                                                        ▼
       room in the window ◄── VersionPublished ◄── VersionLoaded by all ◄── PublishWeights ◄── WeightsCopied ◄── CopyWeights

waits                 for                                                              then
a prompt              no reason in `why_no_dispatch`, a free slot, an empty queue      GroupDispatched, StartSequences
a sequence            a free slot; the earliest birth (`Placement`) first              StartSequences
a straggler (a long   room on a replica of the lane, if it gains time there; the       MoveSequences
sequence)             earliest deadline first
a batch               enough finished groups, among them the due ones (`Buffer`);      TrainGroups
                      an idle trainer; the copy of a version whose batches have
                      trained; if the pools take turns, the end of generation
a copied version      the previous version: loaded by all, and evaluated               PublishWeights
a checkpoint          the batch in training; the previous checkpoint; if the pools     SaveCheckpoint
                      take turns, the end of generation
the end               the batch in training; a checkpoint of everything trained;       RunEnded
                      unless the run was stopped, the last publication and evaluation

The lane is a set of replicas that are reserved for long sequences and decode them faster.

All inputs of one call are applied before any decision is made. For example, if two replicas are lost in one call, no
sequence of one is placed on the other. A checkpoint is written while the next batch trains. The simulator drives the
coordinator in virtual time, the runtime in real time. docs/design/staleness.md states and proves the coordinator's
guarantees.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qwen35_trainer.failure_reasons import FailureReason
from qwen35_trainer.pipeline import commands as do
from qwen35_trainer.pipeline import events as on
from qwen35_trainer.pipeline import requests
from qwen35_trainer.pipeline.adaptive import AdaptiveDispatch
from qwen35_trainer.pipeline.buffer import Batch, Buffer
from qwen35_trainer.pipeline.commands import Action, SchedulingSnapshot
from qwen35_trainer.pipeline.coordinator_settings import CoordinatorSettings
from qwen35_trainer.pipeline.notices import EvaluationSkipped, GroupDispatched, GroupLeft, LeaveReason, RunEnded
from qwen35_trainer.pipeline.placement import Placement
from qwen35_trainer.pipeline.prompt_feed import PromptFeed
from qwen35_trainer.pipeline.publication_state import EvaluationQueue, PublicationState


class NothingToTrain(RuntimeError):
    """Too many groups in a row left the pipeline untrained. The run ends, because it might never train a group."""

    failure = FailureReason.NOTHING_TO_TRAIN


class Coordinator:
    """Schedules one run: turns events and requests into actions. The same inputs always give the same actions."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        start: SchedulingSnapshot = SchedulingSnapshot(),  # noqa: B008, frozen
        *,
        source_of: Callable[[int], str] = lambda position: "",
        prompt_tokens_of: Callable[[int], int] = lambda position: 0,
        buffer: Buffer | None = None,
    ) -> None:
        """Create the coordinator of a run.

        start: the state from which the run starts or continues. source_of: returns the data source of the prompt at a
        position. prompt_tokens_of: returns the number of tokens of the prompt at a position. buffer: a buffer with
        another staleness rule, to compare rules; None: the default buffer.
        """
        self.settings = settings
        self.buffer = buffer or Buffer(settings.window, settings.on_missed_deadline, batch=start.batch)
        self.left_by_reason: dict[LeaveReason, int] = dict.fromkeys(LeaveReason, 0)
        """Number of groups that have left the pipeline, by reason."""
        self._source_of = source_of
        self._feed = PromptFeed(start.position, start.pending)
        self._next_group = start.group
        self._placement = Placement(self.buffer, settings, prompt_tokens_of)
        self._evaluations = EvaluationQueue(self._placement)
        self._publication = PublicationState(
            self.buffer, self._placement, self._evaluations, partial_rollout=settings.partial_rollout
        )
        self._adaptive = AdaptiveDispatch(settings.window) if settings.adaptive else None
        self._trained = start.batch  # the next batch after the last trained one
        self._saved = start.batch  # the next batch after the last checkpoint
        self._training = self._ended = False
        self._saving: int | None = None  # the next batch after the checkpoint that is being written
        self._checkpoint_requested = self._stopping = False
        self._untrained_in_a_row = 0  # groups
        placement, publication = self._placement, self._publication
        self._handlers: dict[type, Callable[[Any, list[Action]], object]] = {
            on.ReplicaJoined: self._joined,
            on.ReplicaLeaving: lambda event, _: placement.set_leaving(event),
            on.ReplicaMeasured: lambda event, _: placement.measured(event),
            on.ReplicaLost: self._lost,
            on.SequenceRefused: lambda event, _: placement.refused(event, keep=settings.partial_rollout),
            on.ReplicaTrusted: lambda event, _: placement.set_doubted(event.replica, doubted=False),
            on.SequenceStarted: lambda event, _: placement.started(event),
            on.SequencesProgressed: lambda event, _: placement.progressed(event),
            on.SequenceFinished: self._finished,
            on.GroupScored: self._scored,
            on.GroupFailed: self._failed,
            on.BatchTrained: self._batch_trained,
            on.WeightsCopied: lambda event, _: publication.copied(event),
            on.VersionLoaded: self._loaded,
            on.CheckpointCompleted: self._checkpoint_completed,
            requests.EvaluateVersion: self._evaluate,
            requests.TakeCheckpoint: self._take_checkpoint,
            requests.StopTraining: self._stop,
        }

    def handle(self, *inputs: on.Event | requests.Request) -> list[Action]:
        """Process the events and requests of one moment, and return the actions to carry out now, in order.

        First applies all inputs in order. Then decides once about publications, checkpoints, batches and sequences.
        After the end of the run all inputs are ignored. Raises NothingToTrain if too many groups in a row left the
        pipeline untrained, and ValueError for an event that contradicts earlier events or actions.
        """
        actions: list[Action] = []
        if self._ended:
            return actions
        for each in inputs:
            self._handlers[type(each)](each, actions)
        self._publication.advance(actions)
        self._next_batch(actions)
        self._assign_slots(actions)
        return actions

    @property
    def version(self) -> int:
        """The newest version that every replica has loaded.

        Replicas that joined late and still catch up do not count.
        """
        return self.buffer.published

    @property
    def drained(self) -> frozenset[int]:
        """The numbers of leaving replicas that hold no sequences: their hosts can be removed without any loss."""
        return self._placement.drained

    @property
    def running(self) -> int:
        """The number of sequences on replicas."""
        return self._placement.running

    @property
    def waiting(self) -> int:
        """The number of sequences that wait for a replica."""
        return self._placement.waiting

    @property
    def snapshot(self) -> SchedulingSnapshot:
        """The scheduling state from which a run can continue.

        The value is valid only while no batch trains, because a batch in training already counts as trained here.
        """
        held = (self._placement.groups[group].position for group in self.buffer.pending)
        pending = (*held, *self._feed.returned)
        return SchedulingSnapshot(self.buffer.batch, self._feed.position, pending, self._next_group)

    # Replicas. Events about replicas that are lost are ignored.

    def _joined(self, event: on.ReplicaJoined, actions: list[Action]) -> None:
        # While no replica exists, a copied version is published immediately. A replacement that joins at that moment may
        # still have an older version: it is behind, and the pool sends it the published one.
        if self._placement.join(event):
            self._publication.replica_joined(event.version)

    def _loaded(self, event: on.VersionLoaded, actions: list[Action]) -> None:
        if event.replica not in self._placement.behind:
            if event.replica in self._placement.pool_of(event.replica):
                self._publication.loaded(event)
        elif self._placement.catch_up(event.replica, event.version):
            self._publication.replica_joined(event.version)

    def _lost(self, event: on.ReplicaLost, actions: list[Action]) -> None:
        """Remove a lost replica, and enqueue the replica's sequences again.

        With `async.partialRollout` the sequences keep the tokens that are still available; otherwise they start over.
        """
        if event.replica in self._placement.behind:
            self._placement.behind.remove(event.replica)
            return
        if event.replica not in self._placement.pool_of(event.replica):
            return
        replica = self._placement.lose(event, keep=self.settings.partial_rollout)
        self._publication.replica_lost(replica.version)

    def _assign_slots(self, actions: list[Action]) -> None:
        """Move stragglers to the lane, and start waiting sequences and new groups on free slots."""
        if self._ended:
            return
        self._placement.move_stragglers(actions)
        if not (self._publication.is_draining or self._is_training_turn):
            self._placement.place(actions, self._dispatch)

    # Groups, from dispatch to their end. Events about groups that have left are ignored.

    def _dispatch(self, actions: list[Action]) -> int | None:
        """Dispatch a new group and return its number, or return None if no group may be dispatched."""
        if self.why_no_dispatch is not None:
            return None
        number, self._next_group = self._next_group, self._next_group + 1
        position = self._feed.take()
        self.buffer.dispatch(number, self.buffer.published)
        self._placement.add(number, position, self.settings.group_size)
        if self._adaptive:
            self._adaptive.dispatched(number, self._source_of(position), self.buffer.batch)
        actions.append(GroupDispatched(number, position))
        return number

    @property
    def why_no_dispatch(self) -> str | None:
        """The reason why no new group may be dispatched; None if dispatch is allowed.

        Free slots are not considered here.
        """
        window, buffer = self.settings.window, self.buffer
        if self._stopping or self._ended:
            return "the run is stopping"
        if buffer.room < 1:
            return f"the window is full: {buffer.counted} of {window.limit} groups"
        if buffer.held >= (self.settings.batches - buffer.batch) * window.groups_per_batch:
            return "the remaining batches have all their groups"
        if self._adaptive and buffer.held - buffer.finished >= self._adaptive.limit:
            return f"adaptive dispatch holds at {self._adaptive.limit} groups in flight"
        return None

    def _finished(self, event: on.SequenceFinished, actions: list[Action]) -> None:
        number = event.sequence[0]
        if self._placement.finished(event) and self._placement.groups[number].is_evaluation:
            self._evaluations.group_ended(number, actions)

    def _scored(self, event: on.GroupScored, actions: list[Action]) -> None:
        group = self._placement.groups.get(event.group)
        if group is None:
            return
        if group.unfinished:
            raise ValueError(f"group {event.group} scored with {group.unfinished} sequences unfinished")
        if self._adaptive:
            longest = max(sequence.tokens for sequence in group.sequences)
            self._adaptive.finished(event.group, longest, self.buffer.batch)
        if event.signal or not self.settings.dynamic_sampling:
            self._untrained_in_a_row = 0
            self.buffer.finish(event.group)
        else:
            self._leave(event.group, LeaveReason.FILTERED, actions)
            self._count_untrained(
                "had no signal (algorithm.dynamicSampling leaves out a group whose rewards are all equal): the prompts are "
                "all too easy or too hard, or the reward is constant"
            )

    def _failed(self, event: on.GroupFailed, actions: list[Action]) -> None:
        group = self._placement.groups.get(event.group)
        if group is None:
            return
        self._placement.drop([event.group], actions)
        if group.is_evaluation:
            self._evaluations.group_ended(event.group, actions)
        else:
            self._leave(event.group, LeaveReason.FAILED, actions)
            self._count_untrained(f"failed: {event.cause or 'the log gives the reason'}")

    def _leave(self, number: int, reason: LeaveReason, actions: list[Action]) -> None:
        """Remove an unfinished group that will never train."""
        self.buffer.leave(number)
        self._record_leave(number, reason, actions)

    def _record_leave(self, number: int, reason: LeaveReason, actions: list[Action]) -> int:
        """Record that a group has left the buffer untrained, for `reason`. Returns the position of its prompt."""
        if self._adaptive:
            self._adaptive.left(number)
        self.left_by_reason[reason] += 1
        position = self._placement.groups.pop(number).position
        actions.append(GroupLeft(number, position, reason))
        return position

    def _count_untrained(self, why: str) -> None:
        """Count a group that left untrained. Raises NothingToTrain after `settings.patience` such groups in a row."""
        self._untrained_in_a_row += 1
        if self._untrained_in_a_row >= self.settings.patience:
            raise NothingToTrain(f"{self._untrained_in_a_row} groups in a row left untrained; the last one {why}")

    # The trainer: batches, checkpoints, the end.

    @property
    def _is_training_turn(self) -> bool:
        """Whether the pools take turns on shared devices, and a batch trains."""
        return self.settings.taking_turns and self._training

    @property
    def _is_generation_turn(self) -> bool:
        """Whether the pools take turns on shared devices, and some group is still being generated or scored."""
        generating = self._evaluations.is_running or self.buffer.finished < self.buffer.held
        return self.settings.taking_turns and generating

    def _batch_trained(self, event: on.BatchTrained, actions: list[Action]) -> None:
        if not self._training or event.batch != self._trained:
            raise ValueError(f"batch {event.batch} trained, which was not requested")
        self._training = False
        self._trained += 1
        version, batches_after = divmod(self._trained, self.settings.window.batches_per_version)
        if batches_after == 0 or self._trained == self.settings.batches:
            self._publication.version_trained(version + (batches_after > 0))
        if self._adaptive:
            self._adaptive.trained(self._trained, idle=self._placement.pool.least_loaded() is not None)

    def _next_batch(self, actions: list[Action]) -> None:
        """If no batch trains, save a checkpoint if one is needed, and then end the run or train the next batch.

        Each of these happens only if everything that it waits for has happened.
        """
        if self._training:
            return
        complete = self._stopping or self._trained >= self.settings.batches
        save = self._checkpoint_requested or (complete and self._saved < self._trained)
        starts = self.settings.taking_turns and self.why_no_dispatch is None
        if (self._is_generation_turn or starts) and not self._stopping:
            save = False  # the train pool gets its turn when no sequence runs, and none starts now
        if save and self._saving is None:
            self._saving, self._checkpoint_requested = self._trained, False
            actions.append(do.SaveCheckpoint(self.snapshot))
        if complete:
            if self._saving is None and (self._stopping or self._publication.is_idle):
                self._end(actions)
        elif self._publication.blocks_training or self._is_generation_turn:
            return
        elif (batch := self.buffer.take()) is not None:
            self._train(batch, actions)

    def _end(self, actions: list[Action]) -> None:
        self._evaluations.skip_all(actions)  # those of versions that will never be published
        self._ended = True
        actions.append(RunEnded())

    def _train(self, batch: Batch, actions: list[Action]) -> None:
        self._training = True
        number = self.buffer.batch - 1
        for group in batch.groups:
            del self._placement.groups[group]
        self.left_by_reason[LeaveReason.TRAINED] += len(batch.groups)
        actions.append(do.TrainGroups(number, self.settings.window.version_of(number), batch.groups))
        self._placement.drop(batch.discarded, actions)
        for group in batch.discarded:
            self._feed.give_back(self._record_leave(group, LeaveReason.DISCARDED, actions))

    def _checkpoint_completed(self, event: on.CheckpointCompleted, actions: list[Action]) -> None:
        if event.batch != self._saving:
            raise ValueError(f"a checkpoint before batch {event.batch} is complete, which was not requested")
        self._saving, self._saved = None, event.batch

    # Requests of the run.

    def _take_checkpoint(self, request: requests.TakeCheckpoint, actions: list[Action]) -> None:
        # If a checkpoint of the present state is already being written, it answers the request.
        self._checkpoint_requested |= self._training or self._saving != self._trained

    def _evaluate(self, request: requests.EvaluateVersion, actions: list[Action]) -> None:
        if self._stopping:
            actions.append(EvaluationSkipped(request.version))
        else:
            self._evaluations.request(request)

    def _stop(self, request: requests.StopTraining, actions: list[Action]) -> None:
        """Begin to stop the run, which ends when the batch in training has trained and a checkpoint contains it.

        The run does not wait for copies, publications and evaluations.
        """
        self._stopping = True
        self._publication.stop()
        self._evaluations.skip_all(actions)

"""The coordinator: told what has happened, it says what is to be done. No clock, no thread, no I/O.

    prompts ─► Dispatched ─► queue ─► Start ─► Finished ─► Scored ─► buffer ─► Train ─► Trained ─► Copy ─► Publish ─► Loaded
                  ▲            ▲         │                  │  │                 ▲          │                            │
                  │            └─ lost ◄─┤                  │  └ Left: filtered  │          ├─► Checkpoint, beside Train │
                  │               lane ◄─┘ Move             └──── Left: failed   └──────────┘                            │
                  └─────────────────────────── room in the window ◄── Published ◄────────────────────────────────────────┘

what waits            for                                                              then
a prompt              room in the window, a free slot, an empty queue                  Dispatched, Start
a sequence            a free slot; those of the earliest birth first                   Start
a straggler           a free slot of the lane; the earliest deadline first             Move
a batch               P finished groups, what is due among them; an idle trainer       Train
the next batch        the copy of a version that is complete                           Copy
a copied version      the one before it: loaded by all, and evaluated                  Publish
a checkpoint          the batch that trains; the checkpoint before it                  Checkpoint
the end               the batch that trains; a checkpoint of all that has trained      Ended

The simulator drives it in virtual time, the runtime for real. docs/design/staleness.md proves what it guarantees.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qwen35_trainer.pipeline import actions as do
from qwen35_trainer.pipeline import events as on
from qwen35_trainer.pipeline.actions import Action, Reason
from qwen35_trainer.pipeline.adaptive import Adaptive
from qwen35_trainer.pipeline.buffer import Batch, Buffer
from qwen35_trainer.pipeline.events import Event
from qwen35_trainer.pipeline.placement import Placement
from qwen35_trainer.pipeline.prompts import PromptFeed
from qwen35_trainer.pipeline.publication import Publication
from qwen35_trainer.pipeline.settings import Settings
from qwen35_trainer.pipeline.snapshot import Snapshot


class NothingToTrain(RuntimeError):
    """Group after group left untrained: the run would go on for ever."""


class Coordinator:
    """One run. Deterministic: the same events give the same actions."""

    def __init__(
        self,
        settings: Settings,
        start: Snapshot = Snapshot(),  # noqa: B008, frozen
        *,
        source_of: Callable[[int], str] = lambda position: "",
        buffer: Buffer | None = None,
    ) -> None:
        """source_of: the name of the data source of a position. buffer: one with another rule, to compare with."""
        self.settings = settings
        self.buffer = buffer or Buffer(settings.window, settings.on_missed_deadline, batch=start.batch)
        self.left: dict[Reason, int] = dict.fromkeys(Reason, 0)
        """Groups that have left, by reason."""
        self._source_of = source_of
        self._feed = PromptFeed(start.position, start.pending)
        self._next_group = start.group
        self._placement = Placement(self.buffer, settings.lane_after)
        self._publication = Publication(self.buffer, self._placement, partial_rollout=settings.partial_rollout)
        self._adaptive = Adaptive(settings.window) if settings.adaptive else None
        self._trained = self._saved = start.batch
        self._training = self._ended = False
        self._saving: int | None = None  # the next batch after the checkpoint that is being written
        self._checkpoint_asked = self._stopping = False
        self._fruitless = 0  # groups in a row that left untrained
        placement, publication = self._placement, self._publication
        self._handlers: dict[type, Callable[[Any, list[Action]], object]] = {
            on.WorkerJoined: self._joined,
            on.WorkerLeaving: lambda event, _: placement.with_worker(event.worker).leave(event.worker, event.leaving),
            on.WorkerLost: self._lost,
            on.Started: lambda event, _: placement.started(event),
            on.Progressed: lambda event, _: placement.progressed(event),
            on.Finished: self._finished,
            on.Scored: self._scored,
            on.Failed: self._failed,
            on.Trained: self._batch_trained,
            on.Loaded: self._loaded,
            on.EvaluationAsked: lambda event, _: publication.ask_for_evaluation(event),
            on.CheckpointAsked: self._checkpoint_wanted,
            on.Checkpointed: self._checkpointed,
            on.StopAsked: self._stop_wanted,
        }

    def handle(self, event: Event) -> list[Action]:
        """Take note of an event. Returns what is to be done now, in this order."""
        actions: list[Action] = []
        self._handlers[type(event)](event, actions)
        self._publication.advance(actions)
        self._next_batch(actions)
        self._placement.hand_over(actions)
        if not (self._publication.drains or self._in_turn_of_training):
            self._placement.place(actions, self._dispatch)
        return actions

    @property
    def version(self) -> int:
        """The version that every worker has, except workers that joined with older weights and have not caught up."""
        return self.buffer.published

    @property
    def running(self) -> int:
        """Sequences on workers."""
        return self._placement.running

    @property
    def waiting(self) -> int:
        """Sequences without a worker."""
        return self._placement.waiting

    @property
    def snapshot(self) -> Snapshot:
        """What a run that goes on from here needs to know. Of use between two batches."""
        held = (self._placement.groups[group].position for group in self.buffer.pending)
        pending = (*held, *self._feed.returned)
        return Snapshot(self.buffer.batch, self._feed.position, pending, self._next_group)

    # Workers.

    def _joined(self, event: on.WorkerJoined, actions: list[Action]) -> None:
        # Without a worker to load it, a version is published at once. A worker that joins at that moment, in place of the one that was
        # lost, has still loaded the version before: it is behind, and the pool sends it the published one.
        if self._placement.join(event):
            self._publication.joined(event.version)

    def _loaded(self, event: on.Loaded, actions: list[Action]) -> None:
        if event.worker not in self._placement.behind:
            self._publication.loaded(event)
        elif self._placement.caught_up(event.worker, event.version):
            self._publication.joined(event.version)

    def _lost(self, event: on.WorkerLost, actions: list[Action]) -> None:
        if event.worker in self._placement.behind:
            self._placement.behind.lose(event.worker)
            return
        worker = self._placement.lose(event, keep=self.settings.partial_rollout)
        self._publication.lost(worker.version)

    # Groups, from dispatch to their end. An event about a group that has left already is ignored.

    def _dispatch(self, actions: list[Action]) -> bool:
        """A new group, if there may be one."""
        if self.why_no_dispatch is not None:
            return False
        number, self._next_group = self._next_group, self._next_group + 1
        position = self._feed.take()
        self.buffer.dispatch(number, self.buffer.published)
        self._placement.add(number, position, self.settings.group_size)
        if self._adaptive:
            self._adaptive.dispatched(number, self._source_of(position), self.buffer.batch)
        actions.append(do.Dispatched(number, position))
        return True

    @property
    def why_no_dispatch(self) -> str | None:
        """Why no new group may enter, slots aside; None when one may."""
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

    def _finished(self, event: on.Finished, actions: list[Action]) -> None:
        number = event.sequence[0]
        if self._placement.finished(event) and self._placement.groups[number].is_evaluation:
            self._publication.evaluated(number, actions)

    def _scored(self, event: on.Scored, actions: list[Action]) -> None:
        group = self._placement.groups.get(event.group)
        if group is None:
            return
        if group.unfinished:
            raise ValueError(f"group {event.group} scored with {group.unfinished} sequences unfinished")
        if self._adaptive:
            longest = max(sequence.tokens for sequence in group.sequences)
            self._adaptive.finished(event.group, longest, self.buffer.batch)
        if event.signal or not self.settings.dynamic_sampling:
            self._fruitless = 0
            self.buffer.finish(event.group)
        else:
            self._leave(event.group, Reason.FILTERED, actions)
            self._lose_patience(
                "had no signal (algorithm.dynamicSampling leaves out a group whose rewards are all equal): the prompts are "
                "all too easy or too hard, or the reward is constant"
            )

    def _failed(self, event: on.Failed, actions: list[Action]) -> None:
        group = self._placement.groups.get(event.group)
        if group is None:
            return
        self._placement.drop([event.group], actions)
        if group.is_evaluation:
            self._publication.evaluated(event.group, actions)
        else:
            self._leave(event.group, Reason.FAILED, actions)
            self._lose_patience("failed: the log says why each did")

    def _leave(self, number: int, reason: Reason, actions: list[Action]) -> None:
        """A running group leaves untrained, for good."""
        self.buffer.leave(number)
        self._count_out(number, reason, actions)

    def _count_out(self, number: int, reason: Reason, actions: list[Action]) -> int:
        """A group has left the buffer untrained. Returns its position."""
        if self._adaptive:
            self._adaptive.left(number)
        self.left[reason] += 1
        position = self._placement.groups.pop(number).position
        actions.append(do.Left(number, position, reason))
        return position

    def _lose_patience(self, why: str) -> None:
        """Nothing to train came of one more group. Raises NothingToTrain when that never ends."""
        self._fruitless += 1
        if self._fruitless >= self.settings.patience:
            raise NothingToTrain(f"{self._fruitless} groups in a row left untrained; the last one {why}")

    # The trainer: batches, checkpoints, the end.

    @property
    def _in_turn_of_training(self) -> bool:
        return self.settings.taking_turns and self._training

    @property
    def _in_turn_of_generation(self) -> bool:
        """Whether anything is dispatched and not finished, where the pools take turns."""
        generating = self._publication.evaluates or self.buffer.finished < self.buffer.held
        return self.settings.taking_turns and generating

    def _batch_trained(self, event: on.Trained, actions: list[Action]) -> None:
        if not self._training or event.batch != self._trained:
            raise ValueError(f"batch {event.batch} trained, which was not asked for")
        self._training = False
        self._trained += 1
        version, rest = divmod(self._trained, self.settings.window.batches_per_version)
        if rest == 0 or self._trained == self.settings.batches:
            self._publication.want(version + (rest > 0))
        if self._adaptive:
            self._adaptive.trained(self._trained, idle=self._placement.pool.least_loaded() is not None)

    def _next_batch(self, actions: list[Action]) -> None:
        """What an idle trainer does next."""
        if self._training or self._ended or self._publication.holds_trainer:
            return
        over = self._trained >= self.settings.batches
        ending = self._stopping or (over and self._publication.rests)
        wanted = self._checkpoint_asked or (ending and self._saved < self._trained)
        if wanted and self._saving is None:
            self._saving, self._checkpoint_asked = self._trained, False
            actions.append(do.Checkpoint(self.snapshot))
        if ending:
            if self._saving is None:
                self._ended = True
                actions.append(do.Ended())
        elif not over and not self._in_turn_of_generation and (batch := self.buffer.take()) is not None:
            self._train(batch, actions)

    def _train(self, batch: Batch, actions: list[Action]) -> None:
        self._training = True
        number = self.buffer.batch - 1
        for group in batch.groups:
            del self._placement.groups[group]
        self.left[Reason.TRAINED] += len(batch.groups)
        actions.append(do.Train(number, self.settings.window.version_of(number), batch.groups))
        self._placement.drop(batch.discarded, actions)
        for group in batch.discarded:
            self._feed.give_back(self._count_out(group, Reason.DISCARDED, actions))

    def _checkpoint_wanted(self, event: on.CheckpointAsked, actions: list[Action]) -> None:
        # One of this very state may be under way: that is what was asked for.
        self._checkpoint_asked |= self._training or self._saving != self._trained

    def _checkpointed(self, event: on.Checkpointed, actions: list[Action]) -> None:
        if event.batch != self._saving:
            raise ValueError(f"a checkpoint before batch {event.batch} is complete, which was not asked for")
        self._saving, self._saved = None, event.batch

    def _stop_wanted(self, event: on.StopAsked, actions: list[Action]) -> None:
        self._stopping = True

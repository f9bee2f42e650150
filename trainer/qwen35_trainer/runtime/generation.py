"""The part of the loop that generates: passes the coordinator's actions to replicas, and their results back.

    StartSequences ─► submit ─► replica ─► started, progress, finished ─► events ─► coordinator
    MoveSequence ──► take, submit ──┘                        │
                                            all samples of a group ─► score ─► GroupScored

Reported tokens of unfinished sequences are kept here, so that they are not lost with their replica; without
async.partialRollout the coordinator starts such sequences over. Reports about a sequence count only when they come from the
replica that has it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from qwen35_trainer.data.encode import EncodedPrompt
from qwen35_trainer.data.prompt_set import PromptOrder
from qwen35_trainer.manifest import TrainingSpec
from qwen35_trainer.pipeline import actions as do
from qwen35_trainer.pipeline import events as on
from qwen35_trainer.pipeline.events import SequenceId
from qwen35_trainer.progress.recorder import Recorder
from qwen35_trainer.progress.records import SpanRecord
from qwen35_trainer.rewards.failures import Failures
from qwen35_trainer.rewards.reward import CombinedScore, GroupScorer, ResponseTokens
from qwen35_trainer.rollout.rollout_engine import Completed, GeneratedTokens, Sampling, SequenceRequest
from qwen35_trainer.runtime.assembly import ScoredGroup
from qwen35_trainer.runtime.rollout_pool import RolloutPool, RolloutReplica
from qwen35_trainer.runtime.rollout_worker import Collected
from qwen35_trainer.runtime.timing import PoolMeter, TrainingClock

FIRST_EVALUATION_GROUP = 1 << 40
"""Groups of evaluations are numbered from here, so that they never enter the window."""


@dataclass(frozen=True)
class GenerationParts:
    """The parts of a run that generation uses."""

    spec: TrainingSpec
    prompts: Sequence[EncodedPrompt]
    validation: Sequence[EncodedPrompt]
    order: PromptOrder
    scoring: GroupScorer
    recorder: Recorder
    clock: TrainingClock
    tell: Callable[[on.Event], None]
    """Sends an event to the coordinator."""


@dataclass(eq=False)
class _PendingGroup:
    """A group that no batch or evaluation has taken yet. Its sequences finish in any order."""

    prompt: EncodedPrompt
    samples: int
    sampling: Sampling
    completed: dict[int, Completed] = field(default_factory=dict)
    scores: tuple[CombinedScore, ...] | None = None

    @property
    def sequences(self) -> tuple[Completed, ...]:
        """All sequences in order. The group must be complete."""
        return tuple(self.completed[index] for index in range(self.samples))


class Generation:
    """Carries out the coordinator's actions on the rollout pool, and reports the pool's events to the coordinator."""

    pool: RolloutPool

    def __init__(self, parts: GenerationParts, replicas: int) -> None:
        self._parts = parts
        self.meter = PoolMeter(replicas)
        self.failures = Failures()
        """Failures of rewards in groups for training, since they were last read."""
        self._groups: dict[int, _PendingGroup] = {}
        self._partial: dict[SequenceId, list[GeneratedTokens]] = {}
        self._holders: dict[SequenceId, int] = {}  # the replica that each sequence runs on
        self._moving: dict[SequenceId, int] = {}  # the replica that it is on its way to
        self._tasks: asyncio.TaskGroup | None = None
        self._evaluations = FIRST_EVALUATION_GROUP

    def run(self, tasks: asyncio.TaskGroup) -> None:
        """Set the task group in which this object starts its tasks from now on. Call it before all actions."""
        self._tasks = tasks

    # Actions of the coordinator.

    def dispatched(self, action: do.GroupDispatched) -> None:
        rollout, algorithm = self._parts.spec.rollout, self._parts.spec.algorithm
        assert rollout is not None
        prompt = self._parts.prompts[self._parts.order.prompt_index(action.position)]
        sampling = Sampling(rollout.temperature, rollout.topP, rollout.topK)
        self._groups[action.group] = _PendingGroup(prompt, algorithm.groupSize, sampling)

    def start(self, action: do.StartSequences) -> None:
        for name, _ in action.sequences:
            self._moving.pop(name, None)  # it was moving to a replica that is lost
            self._holders[name] = action.replica
        self.pool.submit(action.replica, [self._request(name, keep) for name, keep in action.sequences])

    def move(self, action: do.MoveSequence) -> None:
        assert self._tasks is not None
        self._moving[action.sequence] = action.target
        self._tasks.create_task(self._transfer(action))

    def cancel(self, action: do.CancelSequences) -> None:
        for name in action.sequences:
            self._release(name)
        self.pool.cancel(action.replica, action.sequences)

    def forget(self, group: int) -> None:
        """Drop a group that left the pipeline."""
        dropped = self._groups.pop(group)
        for index in range(dropped.samples):
            self._partial.pop((group, index), None)
            self._release((group, index))

    def take(self, groups: Sequence[int]) -> list[ScoredGroup]:
        """Remove the groups of a batch from this object, and return them with their rewards."""
        taken = []
        for number in groups:
            group = self._groups[number]
            assert group.scores is not None
            taken.append(ScoredGroup(number, group.prompt, group.sequences, group.scores))
            self.forget(number)
        return taken

    def evaluation(self) -> tuple[int, ...]:
        """Create the groups of an evaluation of the held-out prompts. Returns their numbers."""
        settings = self._parts.spec.evaluation
        first, self._evaluations = self._evaluations, self._evaluations + len(self._parts.validation)
        for number, prompt in enumerate(self._parts.validation, first):
            self._groups[number] = _PendingGroup(prompt, settings.samplesPerPrompt, Sampling(settings.temperature))
        return tuple(range(first, self._evaluations))

    async def results(self, groups: Sequence[int]) -> list[ScoredGroup]:
        """Score the groups of an evaluation, whose sequences are complete, and remove them."""
        finished = [self._groups[number] for number in groups]
        scores = await asyncio.gather(*(self._score_all(group, in_trial=False) for group in finished))
        for number in groups:
            self.forget(number)
        return [
            ScoredGroup(number, group.prompt, group.sequences, scored)
            for number, group, scored in zip(groups, finished, scores, strict=True)
        ]

    # Reports of the pool.

    def tell(self, event: on.Event) -> None:
        self._parts.tell(event)

    def collected(self, replica: RolloutReplica, collected: Collected) -> None:
        self.meter.tokens += collected.tokens
        for start, end in collected.busy:
            self.meter.add(start, end)
            at = self._parts.clock.at
            self._parts.recorder.append(SpanRecord(lane=replica.name, kind="generate", start=at(start), end=at(end)))
        here = replica.number
        for name, version in collected.started.items():
            if self._holders.get(name) == here:
                self.tell(on.SequenceStarted(name, version))
        for completed in collected.finished:
            if self._holders.get(completed.sequence) == here:
                self._finish(completed)
        lengths: dict[SequenceId, int] = {}
        for name, parts in collected.progress.items():
            if self._holders.get(name) == here:
                tokens = self._partial.setdefault(name, [])
                tokens.extend(parts)
                lengths[name] = sum(map(len, tokens))
        if lengths:
            self.tell(on.SequencesProgressed(lengths))

    def lost(self, replica: RolloutReplica) -> None:
        gone = replica.number
        held = [name for name, number in self._holders.items() if self._moving.get(name, number) == gone]
        for name in held:
            self._release(name)
        self.tell(on.ReplicaLost(gone, {name: self._kept(name) for name in held}))
        # Sequences that were moving away from this replica continue at their target.
        for name, target in self._moving.items():
            if self._holders.get(name) == gone:
                self.move(do.MoveSequence(name, gone, target))

    def _release(self, name: SequenceId) -> None:
        """Record that no replica has the sequence."""
        self._holders.pop(name, None)
        self._moving.pop(name, None)

    def _kept(self, name: SequenceId) -> int:
        return sum(map(len, self._partial.get(name, ())))

    def _request(self, name: SequenceId, keep: int) -> SequenceRequest:
        group = self._groups[name[0]]
        kept = GeneratedTokens.join(self._partial.pop(name, ()))[:keep]
        self._partial[name] = [kept]
        limit = self._parts.spec.data.maxResponseTokens
        return SequenceRequest(name, group.prompt.token_ids, limit, group.sampling, kept)

    async def _transfer(self, action: do.MoveSequence) -> None:
        """Move a sequence from one replica to another. If the first one is lost, continue from the tokens that it had reported."""
        name = action.sequence
        taken = await self.pool.take(action.source, [name])
        if self._moving.get(name) != action.target:
            return  # it has finished or left, or its target is lost and it has another one
        if taken is not None and name not in taken:
            return  # it has just finished, and the source will report its tokens
        del self._moving[name]
        if taken is not None:
            self._partial[name] = [taken[name]]
        self._holders[name] = action.target
        self.pool.submit(action.target, [self._request(name, self._kept(name))])

    def _finish(self, completed: Completed) -> None:
        assert self._tasks is not None
        name = completed.sequence
        self._release(name)
        self._partial.pop(name, None)
        group = self._groups[name[0]]
        group.completed[name[1]] = completed
        self.tell(on.SequenceFinished(name, len(completed.tokens)))
        if len(group.completed) == group.samples and name[0] < FIRST_EVALUATION_GROUP:
            self._tasks.create_task(self._score_group(name[0], group))

    async def _score_group(self, number: int, group: _PendingGroup) -> None:
        group.scores = await self._score_all(group)
        for score in group.scores:
            self.failures.add(group.prompt.prompt.id, score)
        if self._groups.get(number) is not group:
            return  # discarded meanwhile
        rewards = [score.value for score in group.scores if score.value is not None]
        if rewards:
            self.tell(on.GroupScored(number, signal=len(set(rewards)) > 1))
        else:
            self.tell(on.GroupFailed(number))

    async def _score_all(self, group: _PendingGroup, *, in_trial: bool = True) -> tuple[CombinedScore, ...]:
        responses = [ResponseTokens(sequence.tokens.ids, sequence.truncated) for sequence in group.sequences]
        return await self._parts.scoring.score_group(group.prompt.prompt, responses, in_trial=in_trial)

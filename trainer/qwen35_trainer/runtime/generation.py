"""The half of the loop that generates: what the coordinator asks of replicas, and what they bring.

    Start ─► submit ─► replica ─► started, progress, finished ─► events ─► coordinator
    Move ──► take, submit ──┘                        │
                                    all samples of a group ─► score ─► Scored

Tokens of unfinished sequences are kept here as they are reported: they outlive their replica. News of a sequence count
only when they come from the replica that has it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from qwen35_trainer.data.encode import EncodedPrompt
from qwen35_trainer.data.prompts import PromptOrder
from qwen35_trainer.data.tokenizer import response_text
from qwen35_trainer.pipeline import actions as do
from qwen35_trainer.pipeline import events as on
from qwen35_trainer.progress.recorder import Recorder
from qwen35_trainer.progress.records import SpanRecord
from qwen35_trainer.rewards.base import Completion
from qwen35_trainer.rewards.failures import Failures
from qwen35_trainer.rewards.scorer import Scored, Scorer
from qwen35_trainer.rollout.base import Completed, Sampling, SequenceId, SequenceRequest, Tokens
from qwen35_trainer.runtime.assembly import ScoredGroup
from qwen35_trainer.runtime.clock import Clock
from qwen35_trainer.runtime.meter import PoolMeter
from qwen35_trainer.runtime.rollout_pool import Replica, RolloutPool
from qwen35_trainer.runtime.rollout_worker import Collected
from qwen35_trainer.spec import TrainingSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FIRST_EVALUATION_GROUP = 1 << 40
"""Groups of evaluations are numbered from here: they never enter the window."""


@dataclass(frozen=True)
class Parts:
    """What generation works with."""

    spec: TrainingSpec
    tokenizer: PreTrainedTokenizerBase
    prompts: Sequence[EncodedPrompt]
    validation: Sequence[EncodedPrompt]
    order: PromptOrder
    scorer: Scorer
    recorder: Recorder
    clock: Clock
    tell: Callable[[on.Event], None]
    """Gives the coordinator an event."""


@dataclass(eq=False)
class _Group:
    """A group that is not taken yet. Sequences come in any order."""

    prompt: EncodedPrompt
    samples: int
    sampling: Sampling
    completed: dict[int, Completed] = field(default_factory=dict)
    scores: tuple[Scored, ...] | None = None

    @property
    def sequences(self) -> tuple[Completed, ...]:
        """All of them, in order, once they are complete."""
        return tuple(self.completed[index] for index in range(self.samples))


class Generation:
    """Carries out actions on `pool`; it is the crew that the pool reports to."""

    pool: RolloutPool

    def __init__(self, parts: Parts, replicas: int) -> None:
        self._parts = parts
        self.meter = PoolMeter(replicas)
        self.failures = Failures()
        """Of rewards, in groups that were scored to be trained, since they were last read."""
        self._groups: dict[int, _Group] = {}
        self._partial: dict[SequenceId, list[Tokens]] = {}
        self._holders: dict[SequenceId, int] = {}  # the replica that each sequence runs on
        self._moving: dict[SequenceId, int] = {}  # the replica that it is on its way to
        self._tasks: asyncio.TaskGroup | None = None
        self._evaluations = FIRST_EVALUATION_GROUP

    def run(self, tasks: asyncio.TaskGroup) -> None:
        """Its tasks belong to `tasks`."""
        self._tasks = tasks

    # What the coordinator asks.

    def dispatched(self, action: do.Dispatched) -> None:
        rollout, algorithm = self._parts.spec.rollout, self._parts.spec.algorithm
        assert rollout is not None
        prompt = self._parts.prompts[self._parts.order.prompt_index(action.position)]
        sampling = Sampling(rollout.temperature, rollout.topP, rollout.topK)
        self._groups[action.group] = _Group(prompt, algorithm.groupSize, sampling)

    def start(self, action: do.Start) -> None:
        for name, _ in action.sequences:
            self._moving.pop(name, None)  # it was on its way to a replica that is lost
            self._holders[name] = action.worker
        self.pool.submit(action.worker, [self._request(name, keep) for name, keep in action.sequences])

    def move(self, action: do.Move) -> None:
        assert self._tasks is not None
        self._moving[action.sequence] = action.target
        self._tasks.create_task(self._hand_over(action))

    def cancel(self, action: do.Cancel) -> None:
        for name in action.sequences:
            self._release(name)
        self.pool.cancel(action.worker, action.sequences)

    def forget(self, group: int) -> None:
        """A group left."""
        gone = self._groups.pop(group)
        for index in range(gone.samples):
            self._partial.pop((group, index), None)
            self._release((group, index))

    def take(self, groups: Sequence[int]) -> list[ScoredGroup]:
        """Groups of a batch, with their rewards."""
        taken = []
        for number in groups:
            group = self._groups[number]
            assert group.scores is not None
            taken.append(ScoredGroup(number, group.prompt, group.sequences, group.scores))
            self.forget(number)
        return taken

    def evaluation(self) -> tuple[int, ...]:
        """Numbers for the groups of one more evaluation of the held-out prompts."""
        settings = self._parts.spec.evaluation
        first, self._evaluations = self._evaluations, self._evaluations + len(self._parts.validation)
        for number, prompt in enumerate(self._parts.validation, first):
            self._groups[number] = _Group(prompt, settings.samplesPerPrompt, Sampling(settings.temperature))
        return tuple(range(first, self._evaluations))

    async def results(self, groups: Sequence[int]) -> list[ScoredGroup]:
        """Score an evaluation whose sequences are all there."""
        finished = [self._groups[number] for number in groups]
        scores = await asyncio.gather(*(self._score_all(group, in_trial=False) for group in finished))
        for number in groups:
            self.forget(number)
        return [
            ScoredGroup(number, group.prompt, group.sequences, scored)
            for number, group, scored in zip(groups, finished, scores, strict=True)
        ]

    # What the pool reports.

    def tell(self, event: on.Event) -> None:
        self._parts.tell(event)

    def collected(self, replica: Replica, news: Collected) -> None:
        self.meter.tokens += news.tokens
        for start, end in news.busy:
            self.meter.add(start, end)
            at = self._parts.clock.at
            self._parts.recorder.append(SpanRecord(lane=replica.name, kind="generate", start=at(start), end=at(end)))
        here = replica.number
        for name, version in news.started.items():
            if self._holders.get(name) == here:
                self.tell(on.Started(name, version))
        for completed in news.finished:
            if self._holders.get(completed.sequence) == here:
                self._finish(completed)
        lengths: dict[SequenceId, int] = {}
        for name, parts in news.progress.items():
            if self._holders.get(name) == here:
                tokens = self._partial.setdefault(name, [])
                tokens.extend(parts)
                lengths[name] = sum(map(len, tokens))
        if lengths:
            self.tell(on.Progressed(lengths))

    def lost(self, replica: Replica) -> None:
        gone = replica.number
        held = [name for name, number in self._holders.items() if self._moving.get(name, number) == gone]
        for name in held:
            self._release(name)
        self.tell(on.WorkerLost(gone, {name: self._kept(name) for name in held}))
        # What had finished there, and was not told of, goes on where it was to be moved.
        for name, target in self._moving.items():
            if self._holders.get(name) == gone:
                self.move(do.Move(name, gone, target))

    def _release(self, name: SequenceId) -> None:
        """Nobody has the sequence now."""
        self._holders.pop(name, None)
        self._moving.pop(name, None)

    def _kept(self, name: SequenceId) -> int:
        return sum(map(len, self._partial.get(name, ())))

    def _request(self, name: SequenceId, keep: int) -> SequenceRequest:
        group = self._groups[name[0]]
        kept = Tokens.join(self._partial.pop(name, ()))[:keep]
        self._partial[name] = [kept]
        limit = self._parts.spec.data.maxResponseTokens
        return SequenceRequest(name, group.prompt.token_ids, limit, group.sampling, kept)

    async def _hand_over(self, action: do.Move) -> None:
        """Take a sequence from one replica and go on with it on another, from what is at hand if the first one dies."""
        name = action.sequence
        taken = await self.pool.take(action.source, [name])
        if self._moving.get(name) != action.target:
            return  # it has finished, or left, or its target is lost and it goes elsewhere
        if taken is not None and name not in taken:
            return  # it has just finished: its tokens are on their way from the source
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
        self.tell(on.Finished(name, len(completed.tokens)))
        if len(group.completed) == group.samples and name[0] < FIRST_EVALUATION_GROUP:
            self._tasks.create_task(self._score_group(name[0], group))

    async def _score_group(self, number: int, group: _Group) -> None:
        group.scores = await self._score_all(group)
        for score in group.scores:
            self.failures.add(group.prompt.prompt.id, score)
        if self._groups.get(number) is not group:
            return  # discarded meanwhile
        rewards = [score.value for score in group.scores if score.value is not None]
        if rewards:
            self.tell(on.Scored(number, signal=len(set(rewards)) > 1))
        else:
            self.tell(on.Failed(number))

    async def _score_all(self, group: _Group, *, in_trial: bool = True) -> tuple[Scored, ...]:
        scoring = (self._score(group.prompt, sequence, in_trial=in_trial) for sequence in group.sequences)
        return tuple(await asyncio.gather(*scoring))

    async def _score(self, prompt: EncodedPrompt, sequence: Completed, *, in_trial: bool) -> Scored:
        text = response_text(self._parts.tokenizer, sequence.tokens.ids.tolist())
        return await self._parts.scorer.score(
            Completion(prompt.prompt, text, token_count=len(sequence.tokens), truncated=sequence.truncated),
            in_trial=in_trial,
        )

"""The half of the loop that fills the buffer: dispatch, collect, score.

    feed ─► dispatch ─► rollout replicas ─► collect ─► score ─► buffer
               ▲ room in the window                        │
               └──────── a publication, or a discard ◄─────┘ (through the loop)

A group's number is given at dispatch; its prompt is a position of the epoch order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from qwen35_trainer.data.encode import EncodedPrompt
from qwen35_trainer.data.prompts import PromptOrder
from qwen35_trainer.pipeline.buffer import Buffer
from qwen35_trainer.progress.recorder import Recorder
from qwen35_trainer.progress.records import SpanRecord
from qwen35_trainer.rewards.base import Completion
from qwen35_trainer.rewards.scorer import Scored, Scorer
from qwen35_trainer.rollout.base import Completed, GroupRequest, GroupResult, Sampling
from qwen35_trainer.runtime.assembly import ScoredGroup
from qwen35_trainer.runtime.changes import Changes
from qwen35_trainer.runtime.clock import Clock
from qwen35_trainer.runtime.meter import PoolMeter
from qwen35_trainer.runtime.prompt_feed import PromptFeed
from qwen35_trainer.runtime.rollout_pool import RolloutPool
from qwen35_trainer.spec import TrainingSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FIRST_EVALUATION_GROUP = 1 << 40
"""Groups of evaluations are numbered from here: they never enter the buffer."""


@dataclass(frozen=True)
class Parts:
    """What generation works with."""

    spec: TrainingSpec
    tokenizer: PreTrainedTokenizerBase
    prompts: Sequence[EncodedPrompt]
    order: PromptOrder
    feed: PromptFeed
    buffer: Buffer
    pool: RolloutPool
    scorer: Scorer
    recorder: Recorder
    clock: Clock


@dataclass
class Generation:
    """Keeps the window full. `changes`: groups that finished."""

    parts: Parts
    changes: Changes = field(default_factory=Changes)
    meter: PoolMeter = field(init=False)
    _finished: dict[int, ScoredGroup] = field(default_factory=dict)
    _positions: dict[int, int] = field(default_factory=dict)
    _evaluations: dict[int, asyncio.Future[tuple[GroupResult, list[Scored]]]] = field(default_factory=dict)
    _evaluated: dict[int, EncodedPrompt] = field(default_factory=dict)
    _next_group: int = 0
    _next_evaluation: int = FIRST_EVALUATION_GROUP

    def __post_init__(self) -> None:
        self.meter = PoolMeter(len(self.parts.pool))

    @property
    def pending_positions(self) -> tuple[int, ...]:
        """Prompts handed out and not yet trained: dispatched, or given back and not yet dispatched again."""
        dispatched = (self._positions[group] for group in self.parts.buffer.pending)
        return (*dispatched, *self.parts.feed.returned)

    @property
    def running(self) -> int:
        """Groups dispatched and not yet scored."""
        return len(self._positions) - len(self._finished)

    async def dispatch(self) -> None:
        """Fill the window."""
        parts, requests = self.parts, []
        while parts.buffer.room > 0 and (position := parts.feed.take()) is not None:
            group, self._next_group = self._next_group, self._next_group + 1
            parts.buffer.dispatch(group, parts.pool.version)
            self._positions[group] = position
            rollout = parts.spec.rollout
            assert rollout is not None
            sampling = Sampling(rollout.temperature, rollout.topP, rollout.topK)
            requests.append(self._request(group, self._prompt(position), parts.spec.algorithm.groupSize, sampling))
        if requests:
            await parts.pool.submit(requests)

    async def discard(self, groups: Sequence[int]) -> None:
        """Stop groups that missed their deadline; their prompts are dispatched again."""
        for group in groups:
            self._finished.pop(group, None)
            self.parts.feed.give_back(self._positions.pop(group))
        await self.parts.pool.cancel(groups)

    def take(self, groups: Sequence[int]) -> list[ScoredGroup]:
        """Groups that a batch took out of the buffer."""
        for group in groups:
            del self._positions[group]
        return [self._finished.pop(group) for group in groups]

    async def evaluate(self, prompts: Sequence[EncodedPrompt]) -> list[tuple[GroupResult, list[Scored]]]:
        """Generate and score `prompts` beside the training groups, with the evaluation's own sampling."""
        settings = self.parts.spec.evaluation
        requests = []
        for prompt in prompts:
            group, self._next_evaluation = self._next_evaluation, self._next_evaluation + 1
            self._evaluated[group] = prompt
            self._evaluations[group] = asyncio.get_running_loop().create_future()
            requests.append(self._request(group, prompt, settings.samplesPerPrompt, Sampling(settings.temperature)))
        answers = [self._evaluations[request.group] for request in requests]
        await self.parts.pool.submit(requests)
        return list(await asyncio.gather(*answers))

    async def collect(self, replica: int) -> None:
        """Take in what one replica brings, until cancelled. Scoring runs beside the next collect."""
        async with asyncio.TaskGroup() as scoring:
            async for collected in self.parts.pool.collect(replica):
                self.meter.tokens += collected.tokens
                for start, end in collected.busy:
                    self.meter.add(start, end)
                    self.parts.recorder.append(
                        SpanRecord(
                            lane=f"rollout-{replica}",
                            kind="generate",
                            start=self.parts.clock.at(start),
                            end=self.parts.clock.at(end),
                        )
                    )
                for group, version in collected.born.items():
                    self.parts.buffer.born(group, version)
                for result in collected.finished:
                    scoring.create_task(self._finish(result))

    async def _finish(self, result: GroupResult) -> None:
        position = self._positions.get(result.group)
        evaluation = self._evaluations.get(result.group)
        if position is None and evaluation is None:
            return  # discarded while its last token was on the way
        prompt = self._evaluated[result.group] if position is None else self._prompt(position)
        scored = await asyncio.gather(*(self._score(prompt, sequence) for sequence in result.sequences))
        if evaluation is not None:
            del self._evaluations[result.group], self._evaluated[result.group]
            evaluation.set_result((result, list(scored)))
        elif result.group in self._positions:
            self._finished[result.group] = ScoredGroup(
                result.group,
                prompt.token_ids,
                result.sequences,
                tuple(score.value for score in scored),
                errors=sum(bool(score.errors) for score in scored),
            )
            self.parts.buffer.finish(result.group)
            self.changes.announce()

    async def _score(self, prompt: EncodedPrompt, sequence: Completed) -> Scored:
        text = self.parts.tokenizer.decode(sequence.tokens.tolist(), skip_special_tokens=True)
        assert isinstance(text, str)
        return await self.parts.scorer.score(
            Completion(prompt.prompt, text, token_count=len(sequence.tokens), truncated=sequence.truncated)
        )

    def _prompt(self, position: int) -> EncodedPrompt:
        return self.parts.prompts[self.parts.order.prompt_index(position)]

    def _request(self, group: int, prompt: EncodedPrompt, samples: int, sampling: Sampling) -> GroupRequest:
        return GroupRequest(group, prompt.token_ids, samples, self.parts.spec.data.maxResponseTokens, sampling)

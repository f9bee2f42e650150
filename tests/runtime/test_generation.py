"""Sequences on their way between replicas, and groups on theirs to the trainer. Pool and scoring are stand-ins; all else is real."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from qwen35_trainer.data.encode import EncodedPrompt
from qwen35_trainer.data.picture_processor import Patching, PictureProcessor
from qwen35_trainer.data.picture_set import PictureSet
from qwen35_trainer.data.prompt import Prompt
from qwen35_trainer.data.prompt_set import PromptOrder
from qwen35_trainer.manifest import load_manifest
from qwen35_trainer.pipeline import commands as do
from qwen35_trainer.pipeline import events as on
from qwen35_trainer.pipeline import notices
from qwen35_trainer.pipeline.events import SequenceId
from qwen35_trainer.pipeline.replica_times import ReplicaTimes
from qwen35_trainer.progress.recorder import Recorder
from qwen35_trainer.rewards.reward import CombinedScore, ResponseTokens
from qwen35_trainer.rollout.rollout_engine import NO_TOKENS, EndReason, GeneratedTokens, Sampling, SequenceRequest
from qwen35_trainer.rollout.version_runs import VersionRuns
from qwen35_trainer.runtime import generation
from qwen35_trainer.runtime.assembly import ScoredGroup, assemble
from qwen35_trainer.runtime.generation import FIRST_EVALUATION_GROUP, Generation, GenerationParts
from qwen35_trainer.runtime.measurements import TrainingClock
from qwen35_trainer.runtime.refusals import MAX_FAULTS
from qwen35_trainer.runtime.replica_channel import (
    DropSequences,
    EngineReport,
    ReplicaCommand,
    ReplicaFailed,
    SubmitSequences,
    TakeSequences,
)
from qwen35_trainer.runtime.reported_tokens import TokenBlock
from qwen35_trainer.runtime.step_times import DecodeSum, MeasuredSteps, PrefillSum
from qwen35_trainer.runtime.suspects import MAX_LOSSES

from .replicas import settled

POOL, LANE, OTHER = 1, 2, 3
NAME = (0, 0)


class Pool:
    """Remembers the commands to the replicas. Those to a lost one have no effect."""

    def __init__(self) -> None:
        self.commands: list[tuple[int, ReplicaCommand]] = []
        self.lost: set[int] = set()

    def send(self, number: int, command: ReplicaCommand) -> bool:
        if number in self.lost:
            return False
        self.commands.append((number, command))
        return True

    @property
    def submitted(self) -> list[tuple[int, SequenceRequest]]:
        return [
            (number, request)
            for number, command in self.commands
            if isinstance(command, SubmitSequences)
            for request in command.requests
        ]

    def orders(self, kind: type[DropSequences | TakeSequences]) -> list[tuple[int, tuple[SequenceId, ...]]]:
        """The sequences that were dropped or taken, by command."""
        return [(number, command.sequences) for number, command in self.commands if isinstance(command, kind)]


class Length:
    """Scores a response by its length. Those in `ill` get no score."""

    def __init__(self) -> None:
        self.ill: set[tuple[int, ...]] = set()
        self.scored: list[tuple[str, list[ResponseTokens], bool]] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def score_group(
        self, prompt: Prompt, responses: Sequence[ResponseTokens], *, in_trial: bool
    ) -> tuple[CombinedScore, ...]:
        self.scored.append((prompt.id, list(responses), in_trial))
        await self.may_answer.wait()
        return tuple(self._score(response) for response in responses)

    def _score(self, response: ResponseTokens) -> CombinedScore:
        if tuple(response.ids.tolist()) in self.ill:
            return CombinedScore(None, {}, {"length": "RewardError: no score"})
        length = float(len(response.ids))
        return CombinedScore(length, {"length": length}, {})


STOP = (4,)
"""Tokens at which responses end, besides the engines' end token."""


class Over(Exception):
    """Ends the tasks."""


def end() -> None:
    raise Over


class Room:
    """Generation between a coordinator and replicas, both of which are played by the test."""

    def __init__(self, folder: Path, write: Callable[..., Path], more: dict[str, object] | None = None) -> None:
        changes = {"data.maxResponseTokens": 20, "algorithm.groupSize": 2, "rollout.temperature": 0.5}
        changes |= {"train.batch.microBatchSequences": 8} | (more or {})
        self.spec = load_manifest(write(folder, changes)).spec
        self.pool, self.scoring = Pool(), Length()
        self.replicas: dict[tuple[int, SequenceId], GeneratedTokens] = {}
        """What each replica has of the sequences that it got."""
        self.events: list[on.Event] = []
        self.prompts = [
            EncodedPrompt(Prompt(f"train/{row}", "train", str(row)), np.full(2, row, np.int32)) for row in range(5)
        ]
        self.recorder = Recorder(folder / "metrics.jsonl", [])
        self.generation: Any = Generation(
            GenerationParts(
                self.spec,
                self.prompts,
                self.prompts[3:],
                PromptOrder(5, epochs=None, shuffle=False),
                self.scoring,
                self.recorder,
                TrainingClock(0.0),
                self.events.append,
                STOP,
            ),
            replicas=2,
        )
        self.generation.pool = self.pool

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        try:
            async with asyncio.TaskGroup() as tasks:
                self.generation.run(tasks)
                yield
                end()
        except* Over:
            pass

    def begin(self, group: int = 0, *, position: int = 2, replica: int = POOL) -> None:
        """Dispatch a group, and start both its sequences on `replica`."""
        self.generation.dispatched(notices.GroupDispatched(group, position))
        self.start(replica, (group, 0), (group, 1))

    def start(self, replica: int, *names: SequenceId, keep: int = 0) -> None:
        self.generation.start(do.StartSequences(replica, tuple((name, keep) for name in names)))

    def move(self, *names: SequenceId, source: int = POOL, target: int = LANE) -> None:
        self.generation.move(do.MoveSequences(source, target, names or (NAME,)))

    def report(self, number: int, tokens: dict[SequenceId, GeneratedTokens] | None = None, **fields: Any) -> None:
        """A replica reports new tokens, and other things. Of sequences that end, it reports all tokens."""
        progress, ended = dict[SequenceId, list[GeneratedTokens]](), dict[SequenceId, list[GeneratedTokens]]()
        whole = self.replicas
        for name, new in (tokens or {}).items():
            whole[number, name] = GeneratedTokens.join([whole.get((number, name), self._came(number, name)), new])
            if name in (*fields.get("finished", ()), *fields.get("taken", ())):
                ended[name] = [whole.pop((number, name))]
            else:
                progress[name] = [new]
        lengths = {name: len(whole[number, name]) for name in progress}
        report = EngineReport(1, progress=TokenBlock(progress), lengths=lengths, tokens=TokenBlock(ended), **fields)
        self.generation.reported(replica(number), report)

    def _came(self, number: int, name: SequenceId) -> GeneratedTokens:
        """The tokens with which a sequence last came to a replica."""
        requests = [each for to, each in self.pool.submitted if (to, each.sequence) == (number, name)]
        return requests[-1].kept if requests else tokens()

    def finish(
        self, number: int, *names: SequenceId, tokens: GeneratedTokens, truncated: bool = False, **fields: Any
    ) -> None:
        """Sequences end with these tokens, the last of each."""
        reason = EndReason.LENGTH if truncated else EndReason.STOP
        self.report(number, dict.fromkeys(names, tokens), finished=dict.fromkeys(names, reason), **fields)

    def fail(self, number: int, *names: SequenceId, tokens: GeneratedTokens, error: str = "too long") -> None:
        """Sequences fail after these tokens."""
        of_each = dict.fromkeys(names, tokens), dict.fromkeys(names, EndReason.ERROR), dict.fromkeys(names, error)
        self.report(number, of_each[0], finished=of_each[1], errors=of_each[2])

    def fail_twice(self, *names: SequenceId, tokens: GeneratedTokens, error: str = "too long") -> None:
        """Sequences fail after these tokens, and again when another replica has got them."""
        self.fail(POOL, *names, tokens=tokens, error=error)
        self.start(OTHER, *names, keep=20)  # all
        self.fail(OTHER, *names, tokens=NO_TOKENS, error=error)

    def give_back(self, number: int, name: SequenceId, tokens: GeneratedTokens) -> None:
        """A replica has taken a sequence, whose last tokens are these."""
        self.report(number, {name: tokens}, taken=(name,))

    def lose(self, number: int) -> None:
        """The pool finds the replica lost."""
        self.pool.lost.add(number)
        self.generation.lost(replica(number))

    async def lose_beside(self, group: int) -> None:
        """Lose the replica of the pool while it also generates a new group, which another replica then finishes."""
        names = [(group, 0), (group, 1)]
        self.begin(group, position=group % 5)
        self.lose(POOL)
        self.start(OTHER, *names)
        self.finish(OTHER, *names, tokens=tokens(5))
        await settled()
        self.generation.forget(group)
        self.pool.lost.clear()

    def of[E](self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    def sent(self, number: int, name: SequenceId = NAME) -> list[list[int]]:
        """The tokens with which a sequence came to a replica, each time."""
        return [
            request.kept.ids.tolist() for to, request in self.pool.submitted if (to, request.sequence) == (number, name)
        ]

    async def taken(self, number: int = 0) -> ScoredGroup:
        """A scored group, as the next batch takes it."""
        await settled()
        [group] = self.generation.take([number])
        return group

    async def trained(self, number: int = 0) -> list[list[int]]:
        """The tokens of a scored group, in the order of its samples."""
        await settled()
        [group] = self.generation.take([number])
        return [sequence.tokens.ids.tolist() for sequence in group.sequences]


def replica(number: int) -> Any:
    """Its answer to `stored_choices` is the number of the replica and of the report."""
    stored = SimpleNamespace(remote=lambda report: (number, report))
    return SimpleNamespace(number=number, name=f"rollout-{number}", actor=SimpleNamespace(stored_choices=stored))


def tokens(*ids: int, version: int = 0) -> GeneratedTokens:
    count = len(ids)
    return GeneratedTokens(np.array(ids, np.int32), np.full(count, -0.5, np.float32), VersionRuns.of([version] * count))


@pytest.fixture
async def room(tmp_path, write):
    made = Room(tmp_path, write)
    with made.recorder:
        yield made


async def test_a_group_is_generated_from_the_prompt_at_its_position_with_the_manifests_sampling(room):
    async with room.open():
        room.begin(position=7)  # of the second epoch
    assert [(number, type(command)) for number, command in room.pool.commands] == [(POOL, SubmitSequences)]
    assert [
        (request.sequence, request.prompt.tolist(), request.max_tokens, request.sampling)
        for _, request in room.pool.submitted
    ] == [((0, index), [2, 2], 20, Sampling(0.5, stop=STOP)) for index in range(2)]
    assert room.sent(POOL) == [[]]


async def test_the_pictures_of_a_prompt_go_with_its_sequences_to_every_replica(room):
    pictures = PictureSet(PictureProcessor(None, Patching(4, 2, 2)), (Path("cat.png"),), ())
    room.prompts[2] = replace(room.prompts[2], pictures=pictures)
    async with room.open():
        room.begin()
        room.report(POOL, {NAME: tokens(5)})
        room.move()
        room.give_back(POOL, NAME, tokens(6))
        room.lose(LANE)
        room.start(OTHER, NAME, keep=2)
    moved = [(number, request.pictures) for number, request in room.pool.submitted if request.sequence == NAME]
    assert moved == [(POOL, pictures), (LANE, pictures), (OTHER, pictures)]
    assert room.sent(OTHER) == [[5, 6]]


async def test_with_remax_the_last_sample_of_a_group_is_greedy(tmp_path, write):
    room = Room(tmp_path, write, {"algorithm.advantage": "ReMax"})
    with room.recorder:
        async with room.open():
            room.begin()
            room.generation.evaluation()
            room.start(POOL, (FIRST_EVALUATION_GROUP, 0))
    assert [request.sampling for _, request in room.pool.submitted] == [
        Sampling(0.5, stop=STOP),
        Sampling(0.0, stop=STOP),
        Sampling(0.0, stop=STOP),
    ]


async def test_the_penalty_for_long_responses_is_in_the_rewards_that_train_and_in_no_evaluation(tmp_path, write):
    room = Room(tmp_path, write, {"algorithm.overlongPenalty": {"bufferTokens": 19, "weight": 19.0}})
    with room.recorder:
        async with room.open():
            room.begin()
            room.finish(POOL, (0, 0), (0, 1), tokens=tokens(5, 6, 7))
            await settled()
            [group] = room.generation.take([0])
            held_out = room.generation.evaluation()[:1]
            room.start(POOL, (held_out[0], 0))
            room.finish(POOL, (held_out[0], 0), tokens=tokens(5, 6, 7))
            [evaluated] = await room.generation.results(held_out)
    # Three tokens, of which two are in the buffer.
    assert group.rewards == (1.0, 1.0)
    assert group.scores[0].parts == {"length": 3.0}
    assert evaluated.rewards == (3.0,)


async def test_what_a_replica_delivers_is_reported_once_and_the_group_is_scored(room):
    async with room.open():
        room.begin()
        room.report(POOL, started={(0, 0): 3, (0, 1): 4})
        room.finish(POOL, (0, 1), tokens=tokens(6, 7), truncated=True)
        await settled()
        assert room.of(on.GroupScored) == []
        room.finish(POOL, (0, 0), tokens=tokens(5))
        await settled()
        [group] = room.generation.take([0])
    assert room.events == [
        on.SequenceStarted((0, 0), 3),
        on.SequenceStarted((0, 1), 4),
        on.SequenceFinished((0, 1), 2),
        on.SequenceFinished((0, 0), 1),
        on.GroupScored(0, signal=True),
    ]
    # In the order of the samples, not in that of their ends.
    assert [(each.sequence, each.truncated) for each in group.sequences] == [((0, 0), False), ((0, 1), True)]
    assert (group.group, group.prompt, group.rewards) == (0, room.prompts[2], (1.0, 2.0))
    [(prompt, responses, in_trial)] = room.scoring.scored
    assert (prompt, in_trial) == ("train/2", True)
    assert [(response.ids.tolist(), response.truncated) for response in responses] == [([5], False), ([6, 7], True)]


async def test_tokens_that_arrive_in_parts_are_joined_with_their_log_probs_and_versions(room):
    async with room.open():
        room.begin()
        room.report(POOL, {NAME: tokens(5, 6), (0, 1): tokens(9)})
        room.report(POOL, {NAME: tokens(7, version=1)})
        room.finish(POOL, NAME, tokens=tokens(8, version=2))
        room.finish(POOL, (0, 1), tokens=tokens())
        await settled()
        [group] = room.generation.take([0])
    first = group.sequences[0].tokens
    assert (first.ids.tolist(), first.versions.tolist()) == ([5, 6, 7, 8], [0, 0, 1, 2])
    assert first.log_probs.tolist() == [-0.5] * 4
    assert room.of(on.SequencesProgressed) == [
        on.SequencesProgressed({NAME: 2, (0, 1): 1}),
        on.SequencesProgressed({NAME: 3}),
    ]
    assert room.of(on.SequenceFinished) == [on.SequenceFinished(NAME, 4), on.SequenceFinished((0, 1), 1)]


async def test_reports_of_a_replica_that_does_not_hold_a_sequence_are_ignored(room):
    async with room.open():
        room.begin()
        room.report(OTHER, {NAME: tokens(9)}, started={NAME: 0}, taken=(NAME,))
        room.finish(OTHER, NAME, tokens=tokens(9, 9))
        room.finish(POOL, (0, 1), tokens=tokens(5))
        room.finish(POOL, (0, 1), tokens=tokens(6))  # it has finished already
        room.report(POOL, {(7, 7): tokens(1)}, started={(7, 7): 0}, finished={(7, 7): EndReason.STOP}, taken=((7, 7),))
        await settled()
    assert room.events == [on.SequenceFinished((0, 1), 1)]
    assert len(room.pool.commands) == 1


async def test_a_sequence_that_could_not_be_generated_completes_its_group_and_is_not_trained(room):
    async with room.open():
        room.begin()
        room.report(POOL, {NAME: tokens(5)})
        room.fail_twice(NAME, tokens=tokens(6), error="vLLM gave up")
        room.finish(POOL, (0, 1), tokens=tokens(7, 8, 9))
        await settled()
        [group] = room.generation.take([0])
    assert room.events[1:] == [
        on.SequenceRefused(NAME, POOL, 2),
        on.SequenceFinished(NAME, 2),
        on.ReplicaTrusted(POOL),
        on.SequenceFinished((0, 1), 3),
        on.GroupScored(0, signal=False),
    ]
    assert group.rewards == (None, 3.0)
    assert (group.sequences[0].reason, group.scores[0].errors) == (EndReason.ERROR, {"generation": "vLLM gave up"})
    [(_, responses, _)] = room.scoring.scored
    assert [response.ids.tolist() for response in responses] == [[7, 8, 9]], "rewards never see it"
    assert room.generation.failures.errors == {"generation": 1}


async def test_a_group_whose_prompt_is_refused_fails_with_the_reason_and_is_not_scored(room, caplog):
    async with room.open():
        room.begin()
        room.fail_twice((0, 0), (0, 1), tokens=tokens(), error="prompt 9 exceeds 8")
        await settled()
    assert room.of(on.SequenceFinished) == [on.SequenceFinished((0, 0), 0), on.SequenceFinished((0, 1), 0)]
    [failed] = room.of(on.GroupFailed)
    assert failed.group == 0
    assert "train/2: prompt 9 exceeds 8" in failed.cause
    assert room.scoring.scored == []
    assert "a response to prompt train/2 could not be generated: prompt 9 exceeds 8" in caplog.text


async def test_a_group_with_an_empty_response_fails_because_no_batch_can_contain_it(room):
    async with room.open():
        room.begin()
        room.fail_twice(NAME, tokens=tokens())
        room.finish(POOL, (0, 1), tokens=tokens(7))
        await settled()
    assert [event.group for event in room.of(on.GroupFailed)] == [0]
    assert room.of(on.GroupScored) == []


async def test_an_evaluation_counts_a_failed_response_as_wrong(room):
    async with room.open():
        first, second = room.generation.evaluation()
        room.start(POOL, (first, 0), (second, 0))
        room.fail_twice((first, 0), tokens=tokens())
        room.finish(POOL, (second, 0), tokens=tokens(7))
        results = await room.generation.results((first, second))
    assert [group.rewards for group in results] == [(None,), (1.0,)]
    assert not room.of(on.GroupFailed)


async def test_a_response_that_one_replica_refuses_is_generated_by_another(room):
    async with room.open():
        room.begin()
        room.report(POOL, {NAME: tokens(5)})
        room.fail(POOL, NAME, tokens=tokens(6))
        assert room.events[1:] == [on.SequenceRefused(NAME, POOL, 2)]
        room.start(OTHER, NAME, keep=2)
        room.report(OTHER, {NAME: tokens(7)}, started={NAME: 0})
        assert on.ReplicaTrusted(POOL) in room.events
        room.finish(OTHER, NAME, tokens=tokens(8))
        room.finish(POOL, (0, 1), tokens=tokens(1))
        assert await room.trained() == [[5, 6, 7, 8], [1]]
    assert room.generation.failures.errors == {}


async def test_a_replica_that_refuses_what_others_generate_again_and_again_is_lost_at_its_next_report(room):
    async with room.open():
        for group in range(MAX_FAULTS):
            room.report(POOL)
            names = [(group, 0), (group, 1)]
            room.begin(group)
            room.fail(POOL, *names, tokens=tokens(), error="no such file: picture.png")
            room.start(OTHER, *names)
            room.report(OTHER, started=dict.fromkeys(names, 0))
        with pytest.raises(ReplicaFailed, match=r"generate, 3 times in a row.* no such file: picture\.png"):
            room.report(POOL)
    assert room.of(on.GroupFailed) == []


async def test_a_sequence_that_was_refused_while_the_coordinator_decided_to_move_it_goes_to_its_target(room):
    """The decision comes before the refusal, and the command after it."""
    async with room.open():
        room.begin()
        room.report(POOL, {NAME: tokens(5)})
        room.fail(POOL, NAME, tokens=tokens(6))
        room.move()
        assert room.sent(LANE) == [[5, 6]]
        room.finish(LANE, NAME, tokens=tokens(7))
        room.finish(POOL, (0, 1), tokens=tokens(1))
        assert await room.trained() == [[5, 6, 7], [1]]
    assert room.pool.orders(TakeSequences) == []


async def test_a_moving_sequence_that_its_source_refuses_goes_on_to_its_target(room):
    async with room.open():
        room.begin()
        room.report(POOL, {NAME: tokens(5)})
        room.move()
        room.fail(POOL, NAME, tokens=tokens(6))
        assert room.sent(LANE) == [[5, 6]]
    assert room.of(on.SequenceRefused) == []


# Moves.


async def test_a_sequence_moves_with_its_tokens_and_its_reports_come_from_the_target(room):
    async with room.open():
        room.begin()
        room.report(POOL, {NAME: tokens(5)})
        room.move()
        room.report(POOL, {NAME: tokens(6)})  # under way when it was taken
        assert room.sent(LANE) == []
        room.give_back(POOL, NAME, tokens(7))
        assert room.sent(LANE) == [[5, 6, 7]]
        room.report(POOL, {NAME: tokens(99)})
        room.finish(POOL, NAME, tokens=tokens(99))
        room.report(LANE, {NAME: tokens(8, version=1)})
        room.finish(LANE, NAME, tokens=tokens(9))
        room.finish(POOL, (0, 1), tokens=tokens(1))
        assert await room.trained() == [[5, 6, 7, 8, 9], [1]]
    assert room.pool.orders(TakeSequences) == [(POOL, (NAME,))]
    assert room.of(on.SequencesProgressed) == [on.SequencesProgressed({NAME: count}) for count in (1, 2, 3, 4)]
    assert room.of(on.SequenceFinished)[0] == on.SequenceFinished(NAME, 5)


async def test_sequences_that_move_together_are_taken_by_one_command_and_submitted_by_one(room):
    async with room.open():
        room.begin()
        room.move((0, 0), (0, 1))
        room.report(POOL, {(0, 0): tokens(5), (0, 1): tokens(6)}, taken=((0, 0), (0, 1)))
    assert [(number, type(command)) for number, command in room.pool.commands] == [
        (POOL, SubmitSequences),
        (POOL, TakeSequences),
        (LANE, SubmitSequences),
    ]
    assert (room.sent(LANE, (0, 0)), room.sent(LANE, (0, 1))) == ([[5]], [[6]])


async def test_with_a_lane_the_coordinator_gets_the_durations_of_steps_prefill_and_moves(tmp_path, write, monkeypatch):
    now = 100.0
    monkeypatch.setattr(generation.time, "monotonic", lambda: now)
    lane = {"rollout.nodes": 3, "rollout.stragglerLane": {"nodes": 2, "tensorParallel": 2, "afterTokens": 2}}
    room = Room(tmp_path, write, lane)
    async with room.open():
        room.begin()
        room.report(POOL, measured=MeasuredSteps((DecodeSum(5, 10, 1.0),), PrefillSum(1, 0, 40, 1.0)))
        room.move((0, 0), (0, 1))
        now = 103.0
        room.report(POOL, {(0, 0): tokens(5), (0, 1): tokens(6)}, taken=((0, 0), (0, 1)))
        room.report(POOL, measured=MeasuredSteps((DecodeSum(5, 10, 1.01),)))
    assert room.of(on.ReplicaMeasured) == [
        on.ReplicaMeasured(POOL, ReplicaTimes(((2.0, 0.2),), 0.02)),
        on.ReplicaMeasured(POOL, ReplicaTimes(((2.0, 0.2),), 0.02, 3.0)),
    ]


async def test_without_a_lane_no_event_contains_durations_of_steps(room):
    async with room.open():
        room.begin()
        room.report(POOL, measured=MeasuredSteps((DecodeSum(5, 10, 1.0),)))
    assert room.of(on.ReplicaMeasured) == []


async def test_a_sequence_whose_source_is_lost_on_the_way_continues_from_what_it_had_reported(room):
    async with room.open():
        room.begin()
        room.report(POOL, {NAME: tokens(5, 6), (0, 1): tokens(5, 6)})
        room.move()
        room.lose(POOL)
        assert room.generation.replicas_lost == 1
        assert room.sent(LANE) == [[5, 6]]
        room.finish(LANE, NAME, tokens=tokens(7))
    # The coordinator has it in the lane already.
    assert room.of(on.ReplicaLost) == [on.ReplicaLost(POOL, {(0, 1): 2})]
    assert room.of(on.SequenceFinished) == [on.SequenceFinished(NAME, 3)]


async def test_a_sequence_whose_target_was_lost_before_its_move_continues_from_what_the_coordinator_knew(room):
    """The journal is flushed between the coordinator's decision and the move."""
    async with room.open():
        room.begin()
        room.report(POOL, {NAME: tokens(5, 6)})
        room.lose(LANE)
        room.move()
        assert room.of(on.ReplicaLost) == [on.ReplicaLost(LANE, {})]
        room.report(POOL, {NAME: tokens(7)})
        room.start(OTHER, NAME, keep=2)
        room.give_back(POOL, NAME, tokens(8))
        assert room.sent(OTHER) == [[5, 6]]
        room.finish(OTHER, NAME, tokens=tokens(9))
    assert room.of(on.SequenceFinished) == [on.SequenceFinished(NAME, 3)]


async def test_a_sequence_that_starts_keeps_at_most_the_tokens_that_it_has(room):
    """The coordinator counted tokens that were reported after it had decided to start the sequence from fewer."""
    async with room.open():
        room.begin()
        room.report(POOL, {NAME: tokens(5, 6)})
        room.start(OTHER, NAME, keep=3)
        assert room.sent(OTHER) == [[5, 6]]


async def test_a_sequence_whose_target_is_lost_on_the_way_goes_where_the_coordinator_says(room):
    async with room.open():
        room.begin()
        room.report(POOL, {NAME: tokens(5, 6)})
        room.move()
        room.lose(LANE)
        assert room.of(on.ReplicaLost) == [on.ReplicaLost(LANE, {NAME: 2})]
        room.start(OTHER, NAME, keep=2)
        room.give_back(POOL, NAME, tokens(7))
        assert room.sent(LANE) == []
        assert room.sent(OTHER) == [[5, 6]]
        room.finish(OTHER, NAME, tokens=tokens(8))
    assert room.of(on.SequenceFinished) == [on.SequenceFinished(NAME, 3)]


@pytest.mark.parametrize("keep", [0, 2])
async def test_a_sequence_whose_target_is_lost_may_return_to_its_source_without_the_tokens_under_way(room, keep):
    """The source has not given it back, so it has two courses of it: only the tokens of the second count."""
    async with room.open():
        room.begin()
        room.report(POOL, {NAME: tokens(5, 6)})
        room.move()
        room.lose(LANE)
        room.start(POOL, NAME, keep=keep)
        assert len(room.sent(POOL)) == 1, "it waits until the source has given it back"
        room.report(POOL, {NAME: tokens(77)}, started={NAME: 9})
        room.give_back(POOL, NAME, tokens(78, 79))
        assert room.sent(POOL)[1:] == [[5, 6][:keep]]
        room.report(POOL, {NAME: tokens(8)})
        room.finish(POOL, NAME, tokens=tokens(9))
        room.finish(POOL, (0, 1), tokens=tokens(1))
        assert await room.trained() == [[*[5, 6][:keep], 8, 9], [1]]
    assert room.of(on.SequenceStarted) == []


async def test_a_sequence_that_was_to_return_and_has_finished_meanwhile_starts_again(room):
    async with room.open():
        room.begin()
        room.report(POOL, {NAME: tokens(5, 6)})
        room.move()
        room.lose(LANE)
        room.start(POOL, NAME, keep=2)
        room.finish(POOL, NAME, tokens=tokens(77))  # before it was taken
        assert room.of(on.SequenceFinished) == []
        assert room.sent(POOL)[1:] == [[5, 6]]
        room.finish(POOL, NAME, tokens=tokens(8))
    assert room.of(on.SequenceFinished) == [on.SequenceFinished(NAME, 3)]


async def test_a_sequence_that_was_to_return_moves_away_again_if_that_is_ordered(room):
    async with room.open():
        room.begin()
        room.report(POOL, {NAME: tokens(5, 6)})
        room.move()
        room.lose(LANE)
        room.start(POOL, NAME, keep=2)
        room.move(target=OTHER)
        room.give_back(POOL, NAME, tokens(77))
        assert (len(room.sent(POOL)), room.sent(OTHER)) == (1, [[5, 6]])


@pytest.mark.parametrize("moves", [False, True])
async def test_a_sequence_that_was_to_return_to_a_replica_that_is_lost_keeps_its_tokens(room, moves):
    async with room.open():
        room.begin()
        room.report(POOL, {NAME: tokens(5, 6)})
        room.move()
        room.lose(LANE)
        room.start(POOL, NAME, keep=2)
        if moves:
            room.move(target=OTHER)
        room.lose(POOL)
        assert NAME not in room.of(on.ReplicaLost)[1].kept, "those that it was given with its start are available"
        if not moves:
            room.start(OTHER, NAME, keep=2)
        assert room.sent(OTHER) == [[5, 6]]


async def test_a_sequence_ordered_to_a_replica_that_is_lost_already_follows_the_next_order(room):
    """The order was given before the coordinator heard of the loss."""
    async with room.open():
        room.begin()
        room.lose(LANE)
        assert room.of(on.ReplicaLost) == [on.ReplicaLost(LANE, {})]
        room.move()
        room.start(OTHER, NAME)
        room.give_back(POOL, NAME, tokens(5, 6))
        assert (room.sent(LANE), room.sent(OTHER)) == ([], [[]])
        room.finish(OTHER, NAME, tokens=tokens(7))
    assert room.of(on.SequenceFinished) == [on.SequenceFinished(NAME, 1)]


async def test_a_sequence_ordered_away_from_a_replica_that_is_lost_already_continues_at_the_target(room):
    """The loss was reported while the coordinator, which had not received it, decided to move the sequence."""
    async with room.open():
        room.begin()
        room.report(POOL, {NAME: tokens(5, 6)})
        room.lose(POOL)
        room.move()
        assert room.sent(LANE) == [[5, 6]]
        room.finish(LANE, NAME, tokens=tokens(7))
    assert room.of(on.SequenceFinished) == [on.SequenceFinished(NAME, 3)]


async def test_a_sequence_that_finishes_before_it_is_taken_stays_finished(room):
    async with room.open():
        room.begin()
        room.move()
        room.finish(POOL, NAME, tokens=tokens(5))
    assert room.of(on.SequenceFinished) == [on.SequenceFinished(NAME, 1)]
    assert room.sent(LANE) == []


async def test_a_sequence_that_has_finished_when_its_move_is_ordered_stays_finished(room):
    """The journal was being written between the coordinator's decision and its order."""
    async with room.open():
        room.begin()
        room.finish(POOL, NAME, tokens=tokens(5))
        room.move()
        room.lose(POOL)
        room.lose(LANE)
    assert room.of(on.ReplicaLost) == [on.ReplicaLost(POOL, {(0, 1): 0}), on.ReplicaLost(LANE, {})]
    assert room.sent(LANE) == []


async def test_a_sequence_whose_end_is_lost_with_its_source_continues_at_the_target(room):
    async with room.open():
        room.begin()
        room.report(POOL, {NAME: tokens(5, 6)})
        room.move()
        room.lose(POOL)  # it had finished, and that was never reported
        assert room.sent(LANE) == [[5, 6]]
        room.finish(LANE, NAME, tokens=tokens(7))
    assert room.of(on.ReplicaLost) == [on.ReplicaLost(POOL, {(0, 1): 0})]
    assert room.of(on.SequenceFinished) == [on.SequenceFinished(NAME, 3)]


async def test_source_and_target_may_be_lost_together(room):
    """In both orders."""
    for group, order in enumerate([(POOL, LANE), (LANE, POOL)]):
        name = (group, 0)
        async with room.open():
            room.pool.lost.clear()
            room.events.clear()
            room.begin(group)
            room.report(POOL, {name: tokens(5, 6)})
            room.move(name)
            for number in order:
                room.lose(number)
            kept = {lost.replica: lost.kept for lost in room.of(on.ReplicaLost)}
            assert kept[LANE] == {name: 2}
            assert name not in kept[POOL]
            room.start(OTHER, name, keep=2)
            assert room.sent(OTHER, name) == [[5, 6]]
            room.generation.forget(group)


async def test_a_group_that_leaves_while_its_sequence_moves_takes_it_along(room):
    async with room.open():
        room.begin()
        room.move()
        room.generation.cancel(do.CancelSequences(LANE, (NAME,)))
        room.generation.cancel(do.CancelSequences(POOL, ((0, 1),)))
        room.generation.forget(0)
        room.give_back(POOL, NAME, tokens(5))
        room.finish(POOL, (0, 1), tokens=tokens(5))
    # What has not reached the lane yet is dropped where it is.
    assert room.pool.orders(DropSequences) == [(POOL, (NAME,)), (POOL, ((0, 1),))]
    assert room.sent(LANE) == []
    assert room.events == []


# Losses.


async def test_tokens_outlive_their_replica_as_far_as_they_were_reported_and_are_kept(room):
    async with room.open():
        room.begin()
        room.report(POOL, {NAME: tokens(5, 6)})
        room.report(POOL, {NAME: tokens(7, version=1)})
        room.lose(POOL)
        assert room.of(on.ReplicaLost) == [on.ReplicaLost(POOL, {NAME: 3, (0, 1): 0})]
        room.start(OTHER, NAME, keep=3)
        room.start(OTHER, (0, 1), keep=0)
        [kept, anew] = [request.kept for to, request in room.pool.submitted if to == OTHER]
        assert (kept.ids.tolist(), kept.versions.tolist()) == ([5, 6, 7], [0, 0, 1])
        assert len(anew) == 0
        # Lost again: what it came with counts as reported.
        room.report(OTHER, {NAME: tokens(8)})
        room.lose(OTHER)
    assert room.of(on.ReplicaLost)[1] == on.ReplicaLost(OTHER, {NAME: 4, (0, 1): 0})


async def test_tokens_are_not_kept_where_the_coordinator_says_so(room):
    async with room.open():
        room.begin()
        room.report(POOL, {NAME: tokens(5, 6)})
        room.lose(POOL)
        room.start(OTHER, NAME, keep=0)
        assert room.sent(OTHER) == [[]]
        room.report(OTHER, {NAME: tokens(9)})
        room.lose(OTHER)
    assert room.of(on.ReplicaLost)[1] == on.ReplicaLost(OTHER, {NAME: 1})


async def test_a_lane_replica_that_is_lost_gives_back_all_tokens_since_the_first_replica(room):
    async with room.open():
        room.begin()
        room.move()
        room.give_back(POOL, NAME, tokens(5, 6))
        room.report(LANE, {NAME: tokens(7, version=1)})
        room.lose(LANE)
        room.start(POOL, NAME, keep=3)
    assert room.of(on.ReplicaLost) == [on.ReplicaLost(LANE, {NAME: 3})]
    assert room.sent(POOL) == [[], [5, 6, 7]]


# Scores.


async def test_rewards_that_do_not_differ_give_no_signal(room):
    async with room.open():
        room.begin()
        room.finish(POOL, (0, 0), (0, 1), tokens=tokens(5, 6))
        await settled()
    assert room.of(on.GroupScored) == [on.GroupScored(0, signal=False)]


async def test_rewards_are_compared_without_the_penalty_for_long_responses(tmp_path, write):
    """As in DAPO and in verl: otherwise a group that the task rewards alike would train on its lengths, or one like this would not."""
    room = Room(tmp_path, write, {"algorithm.overlongPenalty": {"bufferTokens": 19, "weight": 19.0}})
    with room.recorder:
        async with room.open():
            room.begin()
            room.finish(POOL, (0, 0), tokens=tokens(5, 6, 7))
            room.finish(POOL, (0, 1), tokens=tokens(5, 6))
            await settled()
            [group] = room.generation.take([0])
    assert group.rewards == (1.0, 1.0), "what the task rewards with 3 and 2, less the penalty"
    assert room.of(on.GroupScored) == [on.GroupScored(0, signal=True)]


async def test_a_group_whose_rewards_all_fail_has_failed_and_its_errors_are_counted(room):
    room.scoring.ill = {(5, 6)}
    async with room.open():
        room.begin()
        room.finish(POOL, (0, 0), (0, 1), tokens=tokens(5, 6))
        await settled()
        cause = "reward length, prompt train/2: RewardError: no score"
        assert (room.of(on.GroupFailed), room.of(on.GroupScored)) == ([on.GroupFailed(0, cause)], [])
        room.generation.forget(0)
    assert room.generation.failures.errors == {"length": 2}


async def test_a_group_of_which_a_reward_fails_trains_with_the_others(room):
    room.scoring.ill = {(5, 6)}
    async with room.open():
        room.begin()
        room.finish(POOL, (0, 0), tokens=tokens(5, 6))
        room.finish(POOL, (0, 1), tokens=tokens(5))
        await settled()
        [group] = room.generation.take([0])
    assert room.of(on.GroupScored) == [on.GroupScored(0, signal=False)]
    assert (group.rewards, room.generation.failures.total()) == ((None, 1.0), 1)


async def test_a_group_that_is_discarded_while_it_is_scored_is_not_reported(room):
    room.scoring.may_answer.clear()
    async with room.open():
        room.begin()
        room.finish(POOL, (0, 0), (0, 1), tokens=tokens(5))
        await settled()
        room.generation.forget(0)
        room.scoring.may_answer.set()
        await settled()
    assert len(room.scoring.scored) == 1
    assert room.of(on.GroupScored) == []


async def test_an_evaluation_is_scored_when_requested_and_its_groups_do_not_train(room):
    async with room.open():
        first, second = room.generation.evaluation()
        room.start(POOL, (first, 0), (second, 0))
        room.finish(POOL, (second, 0), tokens=tokens(5, 6))
        room.finish(POOL, (first, 0), tokens=tokens(5))
        await settled()
        assert room.scoring.scored == [], "its errors would count among those of the training"
        results = await room.generation.results((first, second))
        later = room.generation.evaluation()
    assert FIRST_EVALUATION_GROUP <= first < second < later[0]
    assert {type(event) for event in room.events} == {on.SequenceFinished}
    assert [request.prompt.tolist() for _, request in room.pool.submitted] == [[3, 3], [4, 4]]
    assert {request.sampling for _, request in room.pool.submitted} == {
        Sampling(room.spec.evaluation.temperature, stop=STOP)
    }
    assert [(group.prompt, group.rewards) for group in results] == [
        (room.prompts[3], (1.0,)),
        (room.prompts[4], (2.0,)),
    ]
    assert [in_trial for *_, in_trial in room.scoring.scored] == [False, False]


async def test_a_filtered_group_is_forgotten_whole(room):
    async with room.open():
        room.begin()
        room.report(POOL, {NAME: tokens(5)})
        room.finish(POOL, (0, 0), (0, 1), tokens=tokens(6))
        await settled()
        filtered = notices.GroupLeft(0, 2, notices.LeaveReason.FILTERED)
        room.generation.forget(filtered.group)
        room.lose(POOL)
    assert room.of(on.ReplicaLost) == [on.ReplicaLost(POOL, {})]


async def test_the_tokens_and_the_time_of_engines_are_measured(room):
    async with room.open():
        start = room.generation.meter._since
        room.report(POOL, generated=30, intervals=((start, start + 1.0), (start + 2.0, start + 2.5)))
        room.report(LANE, generated=12, intervals=((start, start + 1.0),))
    assert room.generation.meter.tokens == 42
    assert room.generation.meter._busy == pytest.approx(2.5)


# Losses that a prompt may have caused.


async def test_a_prompt_whose_replicas_are_lost_again_and_again_is_named_and_those_that_finish_are_not(room, caplog):
    async with room.open():
        room.begin(0, position=0)
        for number in range(1, 5):
            await room.lose_beside(number)
            room.start(POOL, (0, 0), (0, 1))
    assert [record.getMessage() for record in caplog.records] == [
        f"rollout-{POOL} is loss number {number} of a replica that generated prompt train/0. If there are more, the prompt may be "
        "their cause"
        for number in (3, 4)
    ]


async def test_of_many_suspected_prompts_the_first_are_named_and_the_others_counted(room, caplog):
    async with room.open():
        for number in range(5):
            room.begin(number, position=number)
        for _ in range(3):
            room.lose(POOL)
            room.pool.lost.clear()
            room.start(POOL, *((number, index) for number in range(5) for index in range(2)))
    [record] = caplog.records
    assert "that generated prompt train/0, train/1, train/2 and 2 others." in record.getMessage()


async def test_a_prompt_that_ends_every_replica_is_given_up(room, caplog):
    async with room.open():
        room.begin(0, position=0)
        for number in range(1, MAX_LOSSES + 1):
            await room.lose_beside(number)
            if number < MAX_LOSSES:
                room.start(POOL, (0, 0), (0, 1))
    assert [event.group for event in room.of(on.GroupFailed)] == [0]
    ends = [index for index, event in enumerate(room.events) if isinstance(event, on.SequenceFinished)]
    losses = [index for index, event in enumerate(room.events) if isinstance(event, on.ReplicaLost)]
    assert room.events[ends[-4]] == on.SequenceFinished((0, 0), 0)
    assert ends[-4] < losses[-1], "the coordinator starts it nowhere"
    assert room.events[losses[-1]].kept.keys() == {(MAX_LOSSES, 0), (MAX_LOSSES, 1)}
    assert "a response to prompt train/0 could not be generated: 5 or more replicas were lost" in caplog.text


@pytest.mark.parametrize("groups", [2, 4])
async def test_when_all_replicas_are_lost_again_and_again_no_prompt_is_given_up(room, groups):
    async with room.open():
        for number in range(groups):
            room.begin(number, position=number)
        for _ in range(2 * MAX_LOSSES):
            room.lose(POOL)
            room.pool.lost.clear()
            room.start(POOL, *((number, index) for number in range(groups) for index in range(2)))
    assert room.of(on.GroupFailed) == []


def parts_of(choices: Any) -> list[tuple[tuple[int, int], int, int, int, int]]:
    """Of each part: the replica and the report that have its table, its place there, and which tokens of the response it has."""
    return [(part.call, part.index, part.first, part.end, part.dropped) for part in choices.parts]


async def test_a_sequence_refers_to_the_experts_that_every_replica_has_recorded_for_it(room):
    async with room.open():
        room.begin()
        room.report(POOL, {(0, 0): tokens(5, 6), (0, 1): tokens(7)})
        room.move()
        room.report(POOL, {NAME: tokens(8)}, taken=(NAME,), choices=(NAME,))
        room.finish(LANE, NAME, tokens=tokens(9, 2), choices=(NAME,))
        room.finish(POOL, (3, 0), (0, 1), tokens=tokens(2), choices=((3, 0), (0, 1)))
        group = await room.taken()
    first, second = group.choices
    assert parts_of(first) == [((POOL, 1), 0, 0, 3, 0), ((LANE, 1), 0, 3, 5, 0)]
    assert parts_of(second) == [((POOL, 1), 1, 0, 2, 0)]
    batch, _ = assemble([group], version=0, max_lag=0, mask_old=False, updates=1)
    assert batch.choices == (first, second)


async def test_tokens_of_a_lost_replica_have_no_experts_and_later_ones_have_theirs(room):
    async with room.open():
        room.begin()
        room.report(POOL, {(0, 0): tokens(5, 6, 7), (0, 1): tokens(8, 9)})
        room.lose(POOL)
        room.start(OTHER, (0, 0), keep=2)
        room.start(OTHER, (0, 1), keep=0)
        room.finish(OTHER, (0, 0), (0, 1), tokens=tokens(4, 2), choices=((0, 0), (0, 1)))
        group = await room.taken()
    first, second = group.choices
    assert parts_of(first) == [((OTHER, 1), 0, 2, 4, 0)]
    assert parts_of(second) == [((OTHER, 1), 1, 0, 2, 0)]


async def test_without_recorded_experts_no_replica_is_asked_for_them(room):
    async with room.open():
        room.begin()
        room.finish(POOL, (0, 0), (0, 1), tokens=tokens(5, 2))
        group = await room.taken()
    assert [parts_of(each) for each in group.choices] == [[], []]
    batch, _ = assemble([group], version=0, max_lag=0, mask_old=False, updates=1)
    assert batch.choices is None


async def test_sequences_of_an_evaluation_do_not_train(room):
    async with room.open():
        room.begin()
        [group, *_] = room.generation.evaluation()
        room.start(POOL, (group, 0))
    assert {request.sequence[0]: request.trains for _, request in room.pool.submitted} == {0: True, group: False}

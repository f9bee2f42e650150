"""Sequences on their way between replicas, and groups on theirs to the trainer. The pool is a stand-in; all else is real."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from qwen35_trainer.data.encode import EncodedPrompt
from qwen35_trainer.data.prompt import Prompt
from qwen35_trainer.data.prompt_set import PromptOrder
from qwen35_trainer.manifest import load_manifest
from qwen35_trainer.pipeline import actions as do
from qwen35_trainer.pipeline import events as on
from qwen35_trainer.pipeline.events import SequenceId
from qwen35_trainer.progress.recorder import Recorder
from qwen35_trainer.rewards.reward import CombinedScore, ResponseTokens
from qwen35_trainer.rollout.rollout_engine import Completed, GeneratedTokens, Sampling, SequenceRequest
from qwen35_trainer.runtime.generation import FIRST_EVALUATION_GROUP, Generation, GenerationParts
from qwen35_trainer.runtime.rollout_pool import RolloutReplica
from qwen35_trainer.runtime.rollout_worker import Collected
from qwen35_trainer.runtime.timing import TrainingClock

POOL, LANE, OTHER = 1, 2, 3
NAME = (0, 0)


class Pool:
    """Remembers the orders to the replicas. A move waits until the test answers it."""

    def __init__(self) -> None:
        self.submitted: list[tuple[int, SequenceRequest]] = []
        self.cancelled: list[tuple[int, SequenceId]] = []
        self.taking: dict[tuple[int, SequenceId], asyncio.Future[dict[SequenceId, GeneratedTokens] | None]] = {}
        self.lost: set[int] = set()

    def submit(self, number: int, requests: Sequence[SequenceRequest]) -> None:
        self.submitted += [(number, request) for request in requests if number not in self.lost]

    def cancel(self, number: int, sequences: Sequence[SequenceId]) -> None:
        self.cancelled += [(number, name) for name in sequences]

    async def take(self, number: int, sequences: Sequence[SequenceId]) -> dict[SequenceId, GeneratedTokens] | None:
        if number in self.lost:
            return None
        [name] = sequences
        answer = self.taking[number, name] = asyncio.get_running_loop().create_future()
        return await answer


class Lengths:
    """Scores a response by its length. None of those `ill`, written as "4 4", gets a score."""

    def __init__(self) -> None:
        self.ill: set[str] = set()

    async def score_group(
        self, prompt: Prompt, responses: Sequence[ResponseTokens], *, in_trial: bool
    ) -> tuple[CombinedScore, ...]:
        await asyncio.sleep(0)
        return tuple(self._score(response.ids.tolist()) for response in responses)

    def _score(self, ids: list[int]) -> CombinedScore:
        if " ".join(map(str, ids)) in self.ill:
            return CombinedScore(None, {}, {"length": "RewardError: no score"})
        return CombinedScore(float(len(ids)), {"length": float(len(ids))}, {})


class Over(Exception):
    """Ends the tasks."""


def end() -> None:
    raise Over


class Room:
    """Generation between a coordinator, played by the test, and replicas, played by the test too."""

    def __init__(self, folder: Path, write: Callable[..., Path]) -> None:
        changes = {"data.maxResponseTokens": 20, "algorithm.groupSize": 2, "rollout.temperature": 0.5}
        changes |= {"train.batch.microBatchSequences": 8}
        self.spec = load_manifest(write(folder, changes)).spec
        self.pool, self.reward = Pool(), Lengths()
        self.events: list[on.Event] = []
        self.prompts = [EncodedPrompt(Prompt(f"train/{row}", "train", str(row)), (row, row)) for row in range(5)]
        self.recorder = Recorder(folder / "metrics.jsonl", [])
        self.generation = Generation(
            GenerationParts(
                self.spec,
                self.prompts,
                self.prompts[3:],
                PromptOrder(5, epochs=None, shuffle=False),
                self.reward,
                self.recorder,
                TrainingClock(0.0),
                self.events.append,
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

    def begin(self, group: int = 0, *, position: int = 2, worker: int = POOL) -> None:
        """Dispatch a group, and start both its sequences on `worker`."""
        self.generation.dispatched(do.GroupDispatched(group, position))
        self.start(worker, (group, 0), (group, 1))

    def start(self, worker: int, *names: SequenceId, keep: int = 0) -> None:
        self.generation.start(do.StartSequences(worker, tuple((name, keep) for name in names)))

    def move(self, name: SequenceId = NAME, source: int = POOL, target: int = LANE) -> None:
        self.generation.move(do.MoveSequence(name, source, target))

    def collect(self, number: int, news: Collected) -> None:
        self.generation.collected(RolloutReplica(number, f"rollout-{number}", None), news)

    def report(self, number: int, *names: SequenceId, tokens: GeneratedTokens) -> None:
        """Unfinished sequences have these new tokens."""
        self.collect(number, Collected(progress=dict.fromkeys(names, (tokens,))))

    def finish(self, number: int, *names: SequenceId, tokens: GeneratedTokens) -> None:
        self.collect(number, Collected(finished=tuple(Completed(name, tokens, truncated=False) for name in names)))

    def lose(self, number: int) -> None:
        """The pool finds the replica lost."""
        self.pool.lost.add(number)
        for (source, _), answer in self.pool.taking.items():
            if source == number and not answer.done():
                answer.set_result(None)
        self.generation.lost(RolloutReplica(number, f"rollout-{number}", None))

    async def answer(
        self, taken: dict[SequenceId, GeneratedTokens], number: int = POOL, name: SequenceId = NAME
    ) -> None:
        self.pool.taking[number, name].set_result(taken)
        await settled()

    def of[E](self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    def sent(self, number: int, name: SequenceId = NAME) -> list[list[int]]:
        """The tokens with which a sequence came to a replica, each time."""
        return [
            request.kept.ids.tolist() for to, request in self.pool.submitted if (to, request.sequence) == (number, name)
        ]


def tokens(*ids: int, version: int = 0) -> GeneratedTokens:
    count = len(ids)
    return GeneratedTokens(np.array(ids, np.int32), np.full(count, -0.5, np.float32), np.full(count, version, np.int32))


async def settled() -> None:
    """Everything that can happen without time has happened."""
    for _ in range(50):
        await asyncio.sleep(0)


@pytest.fixture
def room(tmp_path, write):
    made = Room(tmp_path, write)
    with made.recorder:
        yield made


async def test_a_group_is_generated_from_the_prompt_at_its_position_with_the_manifests_sampling(room):
    async with room.open():
        room.begin(position=7)  # of the second epoch
    assert room.pool.submitted == [
        (POOL, SequenceRequest((0, index), (2, 2), 20, Sampling(0.5), room.pool.submitted[index][1].kept))
        for index in range(2)
    ]
    assert room.sent(POOL) == [[]]


async def test_what_a_replica_delivers_is_reported_once_and_the_group_is_scored(room):
    async with room.open():
        room.begin()
        room.collect(POOL, Collected(started={(0, 0): 3, (0, 1): 4}))
        room.finish(POOL, (0, 1), tokens=tokens(6, 7))
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
    assert [sequence.sequence for sequence in group.sequences] == [(0, 0), (0, 1)]
    assert (group.group, group.prompt, group.rewards) == (0, room.prompts[2], (1.0, 2.0))


async def test_events_of_a_replica_that_does_not_hold_a_sequence_are_ignored(room):
    async with room.open():
        room.begin()
        room.collect(OTHER, Collected(started={NAME: 0}))
        room.report(OTHER, NAME, tokens=tokens(9))
        room.finish(OTHER, NAME, tokens=tokens(9, 9))
        room.finish(POOL, (0, 1), tokens=tokens(5))
        room.finish(POOL, (0, 1), tokens=tokens(6))  # it has finished already
        await settled()
    assert room.events == [on.SequenceFinished((0, 1), 1)]


async def test_a_sequence_moves_with_its_tokens_and_its_events_come_from_the_target(room):
    async with room.open():
        room.begin()
        room.report(POOL, NAME, tokens=tokens(5))
        room.move()
        await settled()
        room.report(POOL, NAME, tokens=tokens(6))  # under way when it was taken
        await room.answer({NAME: tokens(5, 6, 7)})
        assert room.sent(LANE) == [[5, 6, 7]]
        room.report(POOL, NAME, tokens=tokens(99))
        room.finish(POOL, NAME, tokens=tokens(99))
        room.report(LANE, NAME, tokens=tokens(8, version=1))
        room.finish(LANE, NAME, tokens=tokens(5, 6, 7, 8, 9))
    assert room.of(on.SequencesProgressed) == [on.SequencesProgressed({NAME: count}) for count in (1, 2, 4)]
    assert room.of(on.SequenceFinished) == [on.SequenceFinished(NAME, 5)]


async def test_a_sequence_whose_source_is_lost_on_the_way_continues_from_what_it_had_reported(room):
    async with room.open():
        room.begin()
        room.report(POOL, NAME, (0, 1), tokens=tokens(5, 6))
        room.move()
        await settled()
        room.lose(POOL)
        await settled()
        assert room.sent(LANE) == [[5, 6]]
        room.finish(LANE, NAME, tokens=tokens(5, 6, 7))
    # The coordinator has it in the lane already.
    assert room.of(on.ReplicaLost) == [on.ReplicaLost(POOL, {(0, 1): 2})]
    assert room.of(on.SequenceFinished) == [on.SequenceFinished(NAME, 3)]


async def test_a_sequence_whose_target_is_lost_on_the_way_goes_where_the_coordinator_says(room):
    async with room.open():
        room.begin()
        room.report(POOL, NAME, tokens=tokens(5, 6))
        room.move()
        await settled()
        room.lose(LANE)
        assert room.of(on.ReplicaLost) == [on.ReplicaLost(LANE, {NAME: 2})]
        room.start(OTHER, NAME, keep=2)
        await room.answer({NAME: tokens(5, 6, 7)})
        assert room.sent(LANE) == []
        assert room.sent(OTHER) == [[5, 6]]
        room.finish(OTHER, NAME, tokens=tokens(5, 6, 8))
    assert room.of(on.SequenceFinished) == [on.SequenceFinished(NAME, 3)]


async def test_a_sequence_ordered_to_a_replica_that_is_lost_already_follows_the_next_order(room):
    """The order was given before the coordinator heard of the loss."""
    async with room.open():
        room.begin()
        room.lose(LANE)
        assert room.of(on.ReplicaLost) == [on.ReplicaLost(LANE, {})]
        room.move()
        await settled()
        room.start(OTHER, NAME)
        await room.answer({NAME: tokens(5, 6)})
        assert (room.sent(LANE), room.sent(OTHER)) == ([], [[]])
        room.finish(OTHER, NAME, tokens=tokens(7))
    assert room.of(on.SequenceFinished) == [on.SequenceFinished(NAME, 1)]


async def test_a_sequence_that_finishes_before_it_is_taken_stays_finished(room):
    async with room.open():
        room.begin()
        room.move()
        await settled()
        room.finish(POOL, NAME, tokens=tokens(5))
        await room.answer({})
    assert room.of(on.SequenceFinished) == [on.SequenceFinished(NAME, 1)]
    assert room.sent(LANE) == []


async def test_a_sequence_whose_end_is_reported_after_the_answer_stays_finished_too(room):
    async with room.open():
        room.begin()
        room.move()
        await settled()
        await room.answer({})
        room.finish(POOL, NAME, tokens=tokens(5))
    assert room.of(on.SequenceFinished) == [on.SequenceFinished(NAME, 1)]
    assert room.sent(LANE) == []


async def test_a_sequence_whose_end_is_lost_with_its_source_continues_at_the_target(room):
    async with room.open():
        room.begin()
        room.report(POOL, NAME, tokens=tokens(5, 6))
        room.move()
        await settled()
        await room.answer({})  # it has finished, and that is never reported
        room.lose(POOL)
        await settled()
        assert room.sent(LANE) == [[5, 6]]
        room.finish(LANE, NAME, tokens=tokens(5, 6, 7))
    assert room.of(on.ReplicaLost) == [on.ReplicaLost(POOL, {(0, 1): 0})]
    assert room.of(on.SequenceFinished) == [on.SequenceFinished(NAME, 3)]


async def test_a_group_that_leaves_while_its_sequence_moves_takes_it_along(room):
    async with room.open():
        room.begin()
        room.move()
        await settled()
        room.generation.cancel(do.CancelSequences(LANE, (NAME,)))
        room.generation.cancel(do.CancelSequences(POOL, ((0, 1),)))
        room.generation.forget(0)
        await room.answer({NAME: tokens(5)})
        room.finish(POOL, (0, 1), tokens=tokens(5))
    assert room.pool.cancelled == [(LANE, NAME), (POOL, (0, 1))]
    assert room.sent(LANE) == []
    assert room.events == []


async def test_tokens_outlive_their_replica_as_far_as_they_were_reported_and_are_kept(room):
    async with room.open():
        room.begin()
        room.report(POOL, NAME, tokens=tokens(5, 6))
        room.report(POOL, NAME, tokens=tokens(7, version=1))
        room.lose(POOL)
        assert room.of(on.ReplicaLost) == [on.ReplicaLost(POOL, {NAME: 3, (0, 1): 0})]
        room.start(OTHER, NAME, keep=3)
        room.start(OTHER, (0, 1), keep=0)
        [kept, anew] = [request.kept for to, request in room.pool.submitted if to == OTHER]
        assert (kept.ids.tolist(), kept.versions.tolist()) == ([5, 6, 7], [0, 0, 1])
        assert len(anew) == 0
        # Lost again: what it came with counts as reported.
        room.report(OTHER, NAME, tokens=tokens(8))
        room.lose(OTHER)
    assert room.of(on.ReplicaLost)[1] == on.ReplicaLost(OTHER, {NAME: 4, (0, 1): 0})


async def test_tokens_are_not_kept_where_the_coordinator_says_so(room):
    async with room.open():
        room.begin()
        room.report(POOL, NAME, tokens=tokens(5, 6))
        room.lose(POOL)
        room.start(OTHER, NAME, keep=0)
        assert room.sent(OTHER) == [[]]
        room.report(OTHER, NAME, tokens=tokens(9))
        room.lose(OTHER)
    assert room.of(on.ReplicaLost)[1] == on.ReplicaLost(OTHER, {NAME: 1})


async def test_a_lane_replica_that_is_lost_gives_back_all_tokens_since_the_first_replica(room):
    async with room.open():
        room.begin()
        room.move()
        await settled()
        await room.answer({NAME: tokens(5, 6)})
        room.report(LANE, NAME, tokens=tokens(7, version=1))
        room.lose(LANE)
        room.start(POOL, NAME, keep=3)
    assert room.of(on.ReplicaLost) == [on.ReplicaLost(LANE, {NAME: 3})]
    assert room.sent(POOL) == [[], [5, 6, 7]]


async def test_rewards_that_do_not_differ_give_no_signal(room):
    async with room.open():
        room.begin()
        room.finish(POOL, (0, 0), (0, 1), tokens=tokens(5, 6))
        await settled()
    assert room.of(on.GroupScored) == [on.GroupScored(0, signal=False)]


async def test_a_group_whose_rewards_all_fail_has_failed_and_its_errors_are_counted(room):
    room.reward.ill = {"5 6"}
    async with room.open():
        room.begin()
        room.finish(POOL, (0, 0), (0, 1), tokens=tokens(5, 6))
        await settled()
        assert (room.of(on.GroupFailed), room.of(on.GroupScored)) == ([on.GroupFailed(0)], [])
        room.generation.forget(0)
    assert room.generation.failures.errors == {"length": 2}


async def test_a_group_of_which_a_reward_fails_trains_with_the_others(room):
    room.reward.ill = {"5 6"}
    async with room.open():
        room.begin()
        room.finish(POOL, (0, 0), tokens=tokens(5, 6))
        room.finish(POOL, (0, 1), tokens=tokens(5))
        await settled()
        [group] = room.generation.take([0])
    assert room.of(on.GroupScored) == [on.GroupScored(0, signal=False)]
    assert (group.rewards, room.generation.failures.total()) == ((None, 1.0), 1)


async def test_a_group_that_is_discarded_while_it_is_scored_is_not_reported(room):
    async with room.open():
        room.begin()
        room.finish(POOL, (0, 0), (0, 1), tokens=tokens(5))
        room.generation.forget(0)
        await settled()
    assert room.of(on.GroupScored) == []


async def test_an_evaluation_is_scored_when_requested_and_its_groups_do_not_train(room):
    async with room.open():
        first, second = room.generation.evaluation()
        room.start(POOL, (first, 0), (second, 0))
        room.finish(POOL, (second, 0), tokens=tokens(5, 6))
        room.finish(POOL, (first, 0), tokens=tokens(5))
        await settled()
        results = await room.generation.results((first, second))
        later = room.generation.evaluation()
    assert FIRST_EVALUATION_GROUP <= first < second < later[0]
    assert {type(event) for event in room.events} == {on.SequenceFinished}
    assert [request.prompt for _, request in room.pool.submitted] == [(3, 3), (4, 4)]
    assert {request.sampling for _, request in room.pool.submitted} == {Sampling(room.spec.evaluation.temperature)}
    assert [(group.prompt, group.rewards) for group in results] == [
        (room.prompts[3], (1.0,)),
        (room.prompts[4], (2.0,)),
    ]


async def test_a_filtered_group_is_forgotten_whole(room):
    async with room.open():
        room.begin()
        room.report(POOL, NAME, tokens=tokens(5))
        room.finish(POOL, (0, 0), (0, 1), tokens=tokens(5, 6))
        await settled()
        filtered = do.GroupLeft(0, 2, do.LeaveReason.FILTERED)
        room.generation.forget(filtered.group)
        room.lose(POOL)
    assert room.of(on.ReplicaLost) == [on.ReplicaLost(POOL, {})]

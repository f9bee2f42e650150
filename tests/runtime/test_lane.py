"""Stragglers move between real engines of different sizes, on threads, while weights are published.

    Coordinator ─► commands ─► Generation ─► EngineThread of the pool (4 slots), EngineThread of the lane (2 slots)
        ▲                          ▲                          │ reports
        └──────── events ◄─────────┴──────────────────────────┘

Every token must have the version of the weights that computed it, wherever it was generated, and no token may train that is
older than the bound allows.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from qwen35_trainer.data.encode import EncodedPrompt
from qwen35_trainer.data.prompt import Prompt
from qwen35_trainer.data.prompt_set import PromptOrder
from qwen35_trainer.manifest import ModelSpec, load_manifest
from qwen35_trainer.models.qwen3_5.build_model import ModelSettings, build
from qwen35_trainer.pipeline import commands as do
from qwen35_trainer.pipeline import events as on
from qwen35_trainer.pipeline import notices
from qwen35_trainer.pipeline.coordinator import Coordinator
from qwen35_trainer.pipeline.events import SequenceId
from qwen35_trainer.rewards.reward import CombinedScore
from qwen35_trainer.rollout.rollout_engine import StepOutput
from qwen35_trainer.rollout.torch import TorchEngine
from qwen35_trainer.runtime import rollout_worker
from qwen35_trainer.runtime.generation import Generation, GenerationParts
from qwen35_trainer.runtime.job import coordinator_settings
from qwen35_trainer.runtime.measurements import TrainingClock
from qwen35_trainer.runtime.replica_channel import DropSequences, ReplicaCommand, SubmitSequences, TakeSequences
from qwen35_trainer.runtime.rollout_worker import EngineThread
from qwen35_trainer.runtime.step_times import StepLog
from tests.patience import PATIENCE

NEVER = 99
"""An end token outside the vocabulary: every sequence is as long as the limit."""
MODEL = ModelSpec.model_validate(
    {"name": "tiny", "precision": "FP32"}
    | {"source": {"random": {"hiddenSize": 16, "intermediateSize": 16, "layers": 2, "fullAttentionInterval": 2}}}
)
TOKENS, AFTER, UPDATES, LAG = 60, 8, 6, 2
MANIFEST = {
    "data.maxResponseTokens": TOKENS,
    "algorithm.groupSize": 2,
    "train.updates": UPDATES,
    "train.batch": {"promptsPerUpdate": 2, "microBatchSequences": 4},
    "async": {"stalenessThreshold": 1.0, "maxVersionLag": LAG},
    "rollout": {
        "engine": "Torch",
        "nodes": 3,
        "stragglerLane": {"nodes": 2, "tensorParallel": 2, "afterTokens": AFTER},
    },
}


type Origin = tuple[int, int]
"""(number of the replica, version of the weights) that computed a token."""


class FixedSteps(StepLog):
    """Measures every step as one of `seconds`, however long it takes on a busy machine."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def add(self, output: StepOutput, seconds: float) -> None:
        super().add(output, self._seconds)


class Replica:
    """A real engine on its thread, which records in `computed` the origin of each of its tokens.

    pause: seconds that each step takes in addition, as those of a smaller replica do. measured: seconds that it reports for a
    step. With a second more than in the lane, moving pays however long a hand-over takes.
    """

    def __init__(
        self,
        number: int,
        slots: int,
        folder: Path,
        computed: defaultdict[SequenceId, list[Origin]],
        *,
        lane: bool,
        pause: float,
        measured: float,
    ) -> None:
        self.number, self.slots, self.lane, self.pause = number, slots, lane, pause
        self.name = f"replica-{number}"
        model = build(ModelSettings(MODEL, seed=0, vocabulary=20, max_length=80, base=folder))
        self.engine = TorchEngine(model, end_token=NEVER, slots=slots, max_length=80, seed=number)
        self._parameters = {name: tensor.clone() for name, tensor in model.named_parameters()}
        self._step, self.engine.step = self.engine.step, self.step
        self._logits: dict[
            SequenceId, int
        ] = {}  # running sequence → version that computed the logits of its next token
        self._computed, self.reports = computed, 0
        self.thread = EngineThread(self.engine, lambda: None)
        self.thread._step_log = FixedSteps(measured)

    def step(self) -> StepOutput:
        time.sleep(self.pause)
        before, version = self._running, self.engine.version
        output = self._step()
        finished = {completed.sequence for completed in output.finished}
        for name in before | self._running | finished:
            self._computed[name].append((self.number, self._logits.get(name, version)))
        self._logits = dict.fromkeys(self._running, version)
        return output

    @property
    def _running(self) -> set[SequenceId]:
        return {request.sequence for request in self.engine._running}

    def load(self, version: int) -> None:
        self.thread.receive(self._parameters, version)
        self.thread.commit(version).result(PATIENCE)

    def obey(self, command: ReplicaCommand) -> None:
        match command:
            case SubmitSequences(requests):
                self.thread.submit(requests)
            case DropSequences(names):
                self.thread.drop(names)
            case TakeSequences(names):
                self.thread.take(names)


class Scores:
    async def score_group(self, prompt: Prompt, responses: Any, *, in_trial: bool) -> tuple[CombinedScore, ...]:
        return tuple(CombinedScore(float(index), {}, {}) for index in range(len(responses)))


class Run:
    """The loop of a run, without a trainer: batches train immediately, and all versions have the same weights."""

    def __init__(self, folder: Path, write: Callable[..., Path]) -> None:
        spec = load_manifest(write(folder, MANIFEST)).spec
        prompts = [EncodedPrompt(Prompt(f"train/{row}", "train", ""), np.array([row, 3], np.int32)) for row in range(8)]
        self.coordinator = Coordinator(
            coordinator_settings(spec, UPDATES), prompt_tokens_of=lambda position: len(prompts[position % 8].token_ids)
        )
        self.inputs: list[on.Event] = []
        order = PromptOrder(8, epochs=None, shuffle=False)
        recorder: Any = SimpleNamespace(append=lambda record: None)
        parts = GenerationParts(spec, prompts, [], order, Scores(), recorder, TrainingClock(0.0), self.inputs.append)
        self.generation: Any = Generation(parts, 2)
        self.generation.pool = self
        self.generation.run(SimpleNamespace(create_task=self._scored))
        self.computed: defaultdict[SequenceId, list[Origin]] = defaultdict(list)
        self.replicas = {
            each.number: each
            for each in (
                Replica(0, 4, folder, self.computed, lane=False, pause=0.004, measured=1.0),
                Replica(1, 2, folder, self.computed, lane=True, pause=0.0, measured=0.001),
            )
        }
        self.moves: list[do.MoveSequences] = []
        self.times: list[on.ReplicaMeasured] = []
        self.trained: dict[SequenceId, tuple[int, list[int]]] = {}
        self.ended = False

    def _scored(self, scoring: Any) -> None:
        with pytest.raises(StopIteration):
            scoring.send(None)  # it waits for nothing

    def send(self, number: int, command: ReplicaCommand) -> bool:
        self.replicas[number].obey(command)
        return True

    def play(self) -> None:
        for each in self.replicas.values():
            self.inputs.append(on.ReplicaJoined(each.number, each.slots, 0, each.lane))
        deadline = time.monotonic() + PATIENCE
        while not self.ended:
            assert time.monotonic() < deadline, "the run came to no end"
            for each in self.replicas.values():
                each.reports += 1
                self.generation.reported(each, each.thread.report(each.reports))
                assert each.thread.failure is None
            inputs, self.inputs[:] = list(self.inputs), []
            self.times += [event for event in inputs if isinstance(event, on.ReplicaMeasured)]
            if inputs:
                for action in self.coordinator.handle(*inputs):
                    self._carry_out(action)
            time.sleep(0.002)

    def _carry_out(self, action: Any) -> None:
        match action:
            case notices.GroupDispatched():
                self.generation.dispatched(action)
            case do.StartSequences():
                self.generation.start(action)
            case do.MoveSequences():
                self.moves.append(action)
                self.generation.move(action)
            case do.TrainGroups(batch, version, groups):
                for group in self.generation.take(groups):
                    for sequence in group.sequences:
                        self.trained[sequence.sequence] = version, sequence.tokens.versions.tolist()
                self.inputs.append(on.BatchTrained(batch))
            case do.CopyWeights(version):
                self.inputs.append(on.WeightsCopied(version))
            case do.PublishWeights(version):
                for each in self.replicas.values():
                    each.load(version)
                    self.inputs.append(on.VersionLoaded(each.number, version))
            case do.SaveCheckpoint(snapshot):
                self.inputs.append(on.CheckpointCompleted(snapshot.batch))
            case notices.RunEnded():
                self.ended = True


@pytest.fixture(scope="module")
def played(tmp_path_factory, write) -> Iterator[Run]:
    run = Run(tmp_path_factory.mktemp("lane"), write)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout_worker, "PROGRESS_SECONDS", 0.01)  # sequences live for less than a second
        try:
            run.play()
            yield run
        finally:
            for each in run.replicas.values():
                each.thread.close()


def test_stragglers_move_to_the_larger_replica_once_the_smaller_one_was_measured(played):
    assert {(move.source, move.target) for move in played.moves} == {(0, 1)}
    assert {event.replica for event in played.times} == {0, 1}
    for name in (name for move in played.moves for name in move.sequences):
        replicas = [replica for replica, _ in played.computed[name]]
        assert replicas == sorted(replicas), "once moved, it stays"
        assert replicas.count(0) >= AFTER


def test_every_trained_token_has_the_version_that_computed_it_and_is_within_the_bound(played):
    assert len(played.trained) == UPDATES * 4
    for name, (version, versions) in played.trained.items():
        assert versions == [version for _, version in played.computed[name]]
        assert len(versions) == TOKENS
        assert max(versions) <= version <= min(versions) + LAG


def test_some_moved_sequence_has_tokens_of_several_versions_and_of_both_replicas(played):
    origins = [set(played.computed[name]) for name in played.trained]
    assert any(
        {replica for replica, _ in each} == {0, 1} and len({version for _, version in each}) > 1 for each in origins
    )

"""A real engine of vLLM fails in the worker of a replica: the driver notices, no further token comes, and another engine continues.

            nan                       memory                                hangs
step        a weight, in its place    vLLM's model runner gets no memory    vLLM's model runner does not return
receive                               the check of the tensors gets none    the check of the tensors does not return
commit                                after half of the tensors             before the first tensor
noticed by  EngineFailed              EngineFailed                          missing steps, or a version that is not loaded

The worker is in this process, and what it fetches is in shared memory, as in a run. A killed process of vLLM: test_learning.py. Twenty
failures in a whole run: test_vllm_failures.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from itertools import islice, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from qwen35_trainer.pipeline.events import SequenceId
from qwen35_trainer.rollout import vllm, vllm_core
from qwen35_trainer.rollout.rollout_engine import EndReason, GeneratedTokens, RolloutEngine, SequenceRequest
from qwen35_trainer.rollout.vllm import VLLMEngine
from qwen35_trainer.runtime import rollout_worker
from qwen35_trainer.runtime.process import Process
from qwen35_trainer.runtime.replica_channel import (
    CommandBatch,
    EngineReport,
    LoadWeights,
    ReplicaCommand,
    ReplicaFailed,
    SubmitSequences,
)
from qwen35_trainer.runtime.rollout_pool import MAX_STEP_SECONDS, StepWatch
from qwen35_trainer.runtime.rollout_worker import EngineFailed, RolloutWorker
from qwen35_trainer.runtime.worker_connection import unpack
from qwen35_trainer.weights.published import PublishedWeights, joined
from qwen35_trainer.weights.transports.shared_memory import SharedMemorySender
from tests.patience import PATIENCE
from tests.publications import ALONE, whole_shards
from tests.rollout.test_vllm import (
    END,
    GREEDY,
    MAX_LENGTH,
    SLOTS,
    VOCABULARY,
    Replica,
    log_probs_of,
    prompt_of,
    running,
)

from .test_engine_thread import joined as joined_tokens
from .watched_engines import ACTS

NAMES: tuple[SequenceId, ...] = ((0, 0), (0, 1), (1, 0))
TOKENS, MORE_TOKENS = 500, 4
"""How long sequences may become on the engine that fails, and how many tokens the replacement adds to each."""
WHOLE_TENSORS = 20
"""Tensors that are loaded before a commit fails. The next engine has the same core, where a real one has a process of its own. vLLM
would take a tensor of which it has loaded a part for loaded, so this number ends with a whole one of its tensors."""
MAX_DIFFERENCE = 0.02
"""Highest mean difference of log-probs, in nats: those of vLLM are computed in bfloat16."""
MORE_BYTES = 2**60
"""More memory than any system gives."""
CAUSES = {"nan": "NotFiniteLogProbs: token", "memory": "can't allocate memory"}
"""How an engine fails → the cause that the driver gets, a regular expression."""


class Worker(RolloutWorker):
    """The worker of a replica, without a process of its own, around an engine that is built already."""

    def __init__(self, engine: VLLMEngine, folder: Path) -> None:
        spec: Any = SimpleNamespace(
            rollout=SimpleNamespace(maxSequencesPerReplica=SLOTS),
            data=SimpleNamespace(maxPromptTokens=MAX_LENGTH - TOKENS, maxResponseTokens=TOKENS),
        )
        with mock.patch.object(Process, "__init__", lambda self, name, _: setattr(self, "name", name)):
            super().__init__(
                spec,
                "rollout-0",
                life=(0,),
                end_token=END,
                vocabulary=VOCABULARY,
                base=folder,
                threads=1,
                logs=folder,
            )
        self._built = engine

    def _start(self) -> RolloutEngine:
        return self._built

    @property
    def steps(self) -> int:
        return self._running._steps

    def close(self) -> None:
        self._running.close()

    async def end(self) -> None:
        """Let the engine make no further step, as when its process ends."""
        self.close()
        await asyncio.to_thread(self._running._thread.join, PATIENCE)
        assert not self._running._thread.is_alive()
        assert self._loading is not None
        self._loading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._loading


class Driver:
    """The driver's end of the channel of a worker."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self._sent = worker, 0
        self.reports: list[EngineReport] = []

    async def exchange(self, *commands: ReplicaCommand) -> None:
        """Send commands, and wait for a report. Raises EngineFailed if the engine has failed."""
        batch, after = CommandBatch(self._sent + 1, commands), len(self.reports)
        self._sent += len(commands)
        self.reports += unpack(await self.worker.exchange(after, batch))

    async def until(self, condition: Callable[[], bool], *commands: ReplicaCommand) -> None:
        async with asyncio.timeout(PATIENCE):
            await self.exchange(*commands)
            while not condition():
                await self.exchange()

    @property
    def loaded(self) -> list[int]:
        return [report.loaded for report in self.reports if report.loaded is not None]

    @property
    def finished(self) -> dict[SequenceId, EndReason]:
        return {name: reason for report in self.reports for name, reason in report.finished.items()}

    def tokens(self) -> dict[SequenceId, GeneratedTokens]:
        """What the driver has of each sequence."""
        return {name: joined_tokens(self.reports, name) for name in NAMES}


class Fault:
    """Lets a method of the engine fail from the next call of it on, in a function that the method uses."""

    def __init__(self, engine: VLLMEngine, core: Any, method: str, act: str, patch: pytest.MonkeyPatch) -> None:
        self.act = act
        self.met, self.free = threading.Event(), threading.Event()
        if act == "nan":
            ACTS["nan"](engine)
        elif method == "step":
            core.collective_rpc(lambda worker: patch.setattr(worker.model_runner, "execute_model", self._fail))
        elif method == "receive":
            patch.setattr(vllm, "check_types", self._fail)
        else:
            patch.setattr(vllm_core, "load_portion", self._load_half)

    def _fail(self, *_: object) -> None:
        self.met.set()
        if self.act == "memory":
            torch.empty(MORE_BYTES, dtype=torch.uint8)
        assert self.free.wait(PATIENCE)
        raise RuntimeError("it hung until its process was ended")

    def _load_half(self, worker: Any, weights: Any) -> None:
        if self.act == "memory":
            load_portion(worker, islice(weights, WHOLE_TENSORS))
        self._fail()


load_portion = vllm_core.load_portion


@pytest.fixture(scope="module")
def built() -> Iterator[Replica]:
    """A model whose most likely token is never the end token: every sequence is as long as its limit."""
    with running({}, (0, 1)) as replica:
        for model in replica.models.values():
            model.get_output_embeddings().weight.data[END] = 0.0
        yield replica


@pytest.fixture
def build(built: Replica) -> Iterator[Callable[[], VLLMEngine]]:
    """Builds engines on one core, one after the other."""
    engines: list[VLLMEngine] = []

    def engine() -> VLLMEngine:
        for ended in engines:
            ended.take(NAMES)
        config = built.models[0].config
        engines.append(VLLMEngine(built.core, config, end_token=END, max_length=MAX_LENGTH, on_cpu=True))
        return engines[-1]

    yield engine
    engines[-1].take(NAMES)


@pytest.fixture
def sender() -> SharedMemorySender:
    """Its shared memory lasts as long as it does."""
    return SharedMemorySender(ALONE)


@pytest.fixture
def publications(built: Replica, sender: SharedMemorySender) -> Mapping[int, PublishedWeights]:
    """Versions 1 and 2."""
    return {
        version: joined([sender.stage(whole_shards(built.weights(seed).items()), version, frozenset({1}))], version)
        for seed, version in enumerate((1, 2))
    }


def requests(kept: Mapping[SequenceId, GeneratedTokens]) -> SubmitSequences:
    """The sequences, new ones or those that continue."""
    prompts = {group: np.array(prompt_of(8, seed=group), np.int32) for group in (0, 1)}
    return SubmitSequences(
        tuple(
            SequenceRequest(name, prompts[name[0]], len(kept[name]) + MORE_TOKENS, GREEDY, kept[name])
            if kept
            else SequenceRequest(name, prompts[name[0]], TOKENS, GREEDY)
            for name in NAMES
        )
    )


@pytest.mark.parametrize(
    ("method", "act"), [("step", "nan"), *product(("step", "receive", "commit"), ("memory", "hangs"))]
)
async def test_an_engine_of_vllm_that_fails_is_noticed_and_another_one_continues_its_sequences(
    build, built, publications, method, act, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(rollout_worker, "PROGRESS_SECONDS", 0.02)
    engine = build()
    with monkeypatch.context() as patch:
        async with generating(Worker(engine, tmp_path), publications[1], requests({})) as driver:
            await driver.until(lambda: min(map(len, driver.tokens().values())) > 4)
            fault = Fault(engine, built.core, method, act, patch)
            try:
                await (_hangs if act == "hangs" else _fails)(driver, fault, publications[2], method)
            finally:
                fault.free.set()
    assert driver.loaded == [1]
    assert not driver.finished
    if method == "commit":
        with pytest.raises(RuntimeError, match="no complete weights"):
            engine.step()
    kept = driver.tokens()
    async with generating(Worker(build(), tmp_path), publications[2], requests(kept)) as driver:
        await driver.until(lambda: len(driver.finished) == len(NAMES))
    _check_continued(driver, kept, built)


@contextlib.asynccontextmanager
async def generating(worker: Worker, weights: PublishedWeights, sequences: SubmitSequences) -> AsyncIterator[Driver]:
    """The driver of a worker that has loaded these weights, and then got these sequences. In the end its engine makes no step."""
    driver = Driver(worker)
    await worker.open()
    try:
        await driver.until(lambda: driver.loaded == [weights.manifest.version], LoadWeights(weights))
        await driver.exchange(sequences)
        yield driver
    finally:
        await worker.end()


async def _fails(driver: Driver, fault: Fault, newer: PublishedWeights, method: str) -> None:
    """Order what fails, and check that the driver notices it and that the engine makes no further step."""
    cause = CAUSES[fault.act]
    with pytest.raises(EngineFailed, match=cause):
        await driver.until(lambda: False, *([] if method == "step" else [LoadWeights(newer)]))
    steps = driver.worker.steps
    with pytest.raises(EngineFailed, match=cause):
        await driver.exchange()
    assert driver.worker.steps <= steps + 1, "a step that was under way may end"


async def _hangs(driver: Driver, fault: Fault, newer: PublishedWeights, method: str) -> None:
    """Order what hangs, and check that reports show it: no step, or a version that is not loaded while the engine generates."""
    watch = StepWatch(0.0, MAX_STEP_SECONDS)
    await driver.exchange(*([] if method == "step" else [LoadWeights(newer)]))
    await driver.until(fault.met.is_set)
    for _ in range(2):  # the first one may have been made before
        await driver.exchange()
    watch.observe(driver.reports[-1], 0.0)
    if method == "receive":
        steps = driver.reports[-1].steps
        await driver.until(lambda: driver.reports[-1].steps > steps)  # it generates while it receives
        watch.observe(driver.reports[-1], MAX_STEP_SECONDS + 1)
    else:
        await driver.exchange()
        with pytest.raises(ReplicaFailed, match="made no step for 121 s"):
            watch.observe(driver.reports[-1], MAX_STEP_SECONDS + 1)
    driver.worker.close()


def _check_continued(driver: Driver, kept: Mapping[SequenceId, GeneratedTokens], built: Replica) -> None:
    """Check that each sequence has its old tokens and new ones, once, and that the library computes the same log-probs."""
    assert driver.loaded == [2]
    assert driver.finished == dict.fromkeys(NAMES, EndReason.LENGTH)
    assert sum(len(report.finished) for report in driver.reports) == len(NAMES)
    for name, before in kept.items():
        [tokens] = [report.tokens[name] for report in driver.reports if name in report.tokens]
        assert tokens[: len(before)].ids.tolist() == before.ids.tolist()
        assert tokens.versions.tolist() == [1] * len(before) + [2] * MORE_TOKENS
        old, new = (log_probs_of(built.models[seed], prompt_of(8, seed=name[0]), tokens.ids) for seed in (0, 1))
        expected = np.concatenate([old[: len(before)], new[len(before) :]])
        assert np.abs(tokens.log_probs - expected).mean() <= MAX_DIFFERENCE
        assert np.abs(tokens.log_probs - expected).mean() < np.abs(tokens.log_probs - old).mean()

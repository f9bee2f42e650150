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
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
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
    SubmitSequences,
)
from qwen35_trainer.runtime.rollout_worker import EngineFailed, RolloutWorker
from qwen35_trainer.runtime.worker_connection import unpack
from qwen35_trainer.weights.published import PublishedWeights, joined
from qwen35_trainer.weights.transports.shared_memory import SharedMemorySender
from tests.patience import PATIENCE
from tests.publications import ALONE, whole_shards
from tests.rollout.test_vllm import END, GREEDY, MAX_LENGTH, SLOTS, VOCABULARY, Replica, prompt_of, running

from .test_engine_thread import joined as joined_tokens
from .watched_engines import ACTS

NAMES: tuple[SequenceId, ...] = ((0, 0), (0, 1), (1, 0))
TOKENS, MORE_TOKENS = 500, 4
"""How long sequences may become on the engine that fails, and how many tokens the replacement adds to each."""
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
    def has_ended(self) -> bool:
        return not self._running._thread.is_alive()

    async def end(self) -> None:
        """Let the engine make no further step, as when its process ends."""
        self._running.close()
        await asyncio.to_thread(self._running._thread.join, PATIENCE)
        assert self.has_ended
        assert self._loading is not None
        self._loading.cancel()
        with suppress(asyncio.CancelledError):
            await self._loading


class Driver:
    """The driver's end of the channel of a worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self._sent = worker, 0
        self.reports: list[EngineReport] = []

    async def exchange(self, *commands: ReplicaCommand) -> None:
        """Send commands, and wait for a report. Raises EngineFailed if the engine has failed."""
        batch, after = CommandBatch(self._sent + 1, commands), len(self.reports)
        self._sent += len(commands)
        self.reports += unpack(await self._worker.exchange(after, batch))

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
        self._act = act
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
        if self._act == "memory":
            torch.empty(MORE_BYTES, dtype=torch.uint8)
        assert self.free.wait(PATIENCE)
        raise RuntimeError("it hung until its process was ended")

    def _load_half(self, worker: Any, weights: Any) -> None:
        if self._act == "memory":
            load_portion(worker, islice(weights, 20))
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
    worker = Worker(engine, tmp_path)
    driver = Driver(worker)
    await worker.open()
    await driver.until(lambda: driver.loaded == [1], LoadWeights(publications[1]))
    await driver.until(lambda: min(map(len, driver.tokens().values())) > 4, requests({}))
    with monkeypatch.context() as patch:
        await _fail(worker, driver, Fault(engine, built.core, method, act, patch), publications[2], method, act)
    assert driver.loaded == [1]
    assert not driver.finished
    kept = driver.tokens()
    assert all(np.isfinite(tokens.log_probs).all() for tokens in kept.values())
    if method == "commit":
        with pytest.raises(RuntimeError, match="no complete weights"):
            engine.step()
    await _continue(Worker(build(), tmp_path), kept, publications[2])


async def _fail(worker: Worker, driver: Driver, fault: Fault, newer: PublishedWeights, method: str, act: str) -> None:
    """Order what fails, check that the driver notices it, and end the worker."""
    commands = [] if method == "step" else [LoadWeights(newer)]
    if act == "hangs":
        await driver.exchange(*commands)
        await driver.until(fault.met.is_set)
        await _report_twice(driver)
        before = driver.reports[-1].steps
        await _report_twice(driver)
        assert driver.reports[-1].busy
        if method == "receive":
            assert driver.reports[-1].steps > before, "it generates while it receives"
        else:
            assert driver.reports[-1].steps == before
        worker._running.close()
        fault.free.set()
    else:
        with pytest.raises(EngineFailed, match=CAUSES[act]):
            await driver.until(lambda: False, *commands)
        steps = worker._running._steps
        with pytest.raises(EngineFailed, match=CAUSES[act]):
            await driver.exchange()
        assert worker._running._steps <= steps + 1, "a step that was under way may end"
    await worker.end()


async def _report_twice(driver: Driver) -> None:
    for _ in range(2):
        await driver.exchange()


async def _continue(worker: Worker, kept: Mapping[SequenceId, GeneratedTokens], newest: PublishedWeights) -> None:
    """Let another engine join with the newest version, and continue from what the driver has."""
    driver = Driver(worker)
    await worker.open()
    await driver.until(lambda: driver.loaded == [2], LoadWeights(newest))
    await driver.until(lambda: len(driver.finished) == len(NAMES), requests(kept))
    assert driver.finished == dict.fromkeys(NAMES, EndReason.LENGTH)
    assert sum(len(report.finished) for report in driver.reports) == len(NAMES)
    for name, before in kept.items():
        [tokens] = [report.tokens[name] for report in driver.reports if name in report.tokens]
        assert tokens[: len(before)].ids.tolist() == before.ids.tolist()
        assert tokens.versions.tolist() == [1] * len(before) + [2] * MORE_TOKENS
        assert np.isfinite(tokens.log_probs).all()
    await worker.end()

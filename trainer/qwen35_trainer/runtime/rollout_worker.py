"""One replica of the rollout pool: an engine on its own thread, behind asynchronous calls.

    driver ──submit / take / load──► inbox ──► engine thread: step, step, step … ──► outbox ──collect──► driver

The thread never waits while the engine has sequences, and the calls never wait for a step, except those with an answer:
`load` comes back when the new weights are in place, between two tokens and with every running sequence kept, `take` with
the tokens of what is taken. Unfinished sequences report their tokens now and then, so that they survive this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qwen35_trainer.rollout.base import Completed, RolloutEngine, SequenceId, SequenceRequest, Tokens
from qwen35_trainer.runtime.device import device
from qwen35_trainer.runtime.process import Process, starting
from qwen35_trainer.spec import TrainingSpec
from qwen35_trainer.weights.manifest import WeightManifest

IDLE_WAIT_SECONDS = 0.5
"""How long the thread sleeps on an empty inbox before it looks whether it should end."""
GATHER_SECONDS = 0.02
"""Sequences that finish within so long travel together: one call for each would take a small machine's cores."""
PROGRESS_SECONDS = 1.0
"""Unfinished sequences report their tokens this often: what is younger is lost with the process."""


class EngineFailed(RuntimeError):
    """The engine of a replica raised: it generates no more."""


@dataclass(frozen=True)
class Collected:
    """What a replica did since the last collect."""

    finished: tuple[Completed, ...] = ()
    started: dict[SequenceId, int] = field(default_factory=dict)
    """Version of the first token of each sequence that started since."""
    progress: dict[SequenceId, tuple[Tokens, ...]] = field(default_factory=dict)
    """New tokens of unfinished sequences."""
    tokens: int = 0
    busy: tuple[tuple[float, float], ...] = ()
    """Intervals in which the engine had sequences, in wall-clock seconds."""


@dataclass
class _Outbox:
    finished: list[Completed] = field(default_factory=list)
    started: dict[SequenceId, int] = field(default_factory=dict)
    progress: dict[SequenceId, list[Tokens]] = field(default_factory=dict)
    tokens: int = 0
    busy: list[tuple[float, float]] = field(default_factory=list)


class EngineThread:
    """Runs an engine until `close`. All engine calls happen on its thread."""

    def __init__(self, engine: RolloutEngine, on_finished: Callable[[], object]) -> None:
        self._engine = engine
        self._on_finished = on_finished
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._outbox = _Outbox()
        self._closing = threading.Event()
        self._progressed = time.time()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def call(self, act: Callable[[RolloutEngine], None], done: Callable[[BaseException | None], object]) -> None:
        """Have the thread do `act` between two steps, then call `done` with what it raised."""

        def run() -> None:
            error: BaseException | None = None
            try:
                act(self._engine)
            except Exception as raised:  # noqa: BLE001  # handed to the caller whole
                error = raised
            done(error)

        self._inbox.put(run)

    def drain(self) -> Collected:
        """Take everything out of the outbox."""
        with self._lock:
            outbox, self._outbox = self._outbox, _Outbox()
        progress = {name: tuple(parts) for name, parts in outbox.progress.items()}
        return Collected(tuple(outbox.finished), outbox.started, progress, outbox.tokens, tuple(outbox.busy))

    def forget(self, sequences: Iterable[SequenceId]) -> None:
        """Tokens that these have reported are no news any more: the sequences are taken, and may come back."""
        with self._lock:
            for name in sequences:
                self._outbox.progress.pop(name, None)

    def close(self) -> None:
        self._closing.set()

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._take_calls()
                if self._engine.busy:
                    self._step()
        except Exception as error:  # noqa: BLE001  # a dead engine is reported by the next collect
            self.failure = error
            self._on_finished()

    def _take_calls(self) -> None:
        try:
            run = self._inbox.get(block=not self._engine.busy, timeout=IDLE_WAIT_SECONDS)
            while True:
                run()
                run = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _step(self) -> None:
        started = time.time()
        output = self._engine.step()
        progress: dict[SequenceId, Tokens] = {}
        if started - self._progressed >= PROGRESS_SECONDS:
            self._progressed, progress = started, self._engine.progress()
        with self._lock:
            box = self._outbox
            box.finished += output.finished
            box.started |= output.started
            box.tokens += output.tokens
            for name, tokens in progress.items():
                box.progress.setdefault(name, []).append(tokens)
            # Steps follow each other within microseconds: one interval grows until the engine runs empty.
            if box.busy and started - box.busy[-1][1] < 0.002:
                box.busy[-1] = (box.busy[-1][0], time.time())
            else:
                box.busy.append((started, time.time()))
        if output.finished:
            self._on_finished()


class RolloutWorker(Process):
    """Ray actor of one replica. `end_token` and `vocabulary` are the tokenizer's.

    `life` tells its lives apart, in resumed runs and after losses: none draws the samples of another.
    """

    @starting()
    def __init__(
        self,
        spec: TrainingSpec,
        name: str,
        *,
        life: tuple[int, ...],
        end_token: int,
        vocabulary: int,
        base: Path,
        threads: int,
        logs: Path,
    ) -> None:
        super().__init__(name, logs, threads)
        # The driver imports this module to name the class; torch comes in the worker's own process.
        from qwen35_trainer.models.qwen3_5.build import build
        from qwen35_trainer.models.qwen3_5.precision import PRECISIONS
        from qwen35_trainer.rollout.torch import TorchEngine

        assert spec.rollout is not None
        length = spec.data.maxPromptTokens + spec.data.maxResponseTokens
        model = build(
            spec.model,
            seed=spec.seed,
            vocabulary=vocabulary,
            max_length=length,
            base=base,
            precision=PRECISIONS[spec.model.precision],
        )
        engine = TorchEngine(
            model.to(device(spec.accelerator.profile)),
            end_token=end_token,
            slots=spec.rollout.maxSequences,
            max_length=length,
            seed=int(np.random.SeedSequence((spec.seed, *life)).generate_state(1)[0]),
            float32_logits=spec.train.headPrecision == "FP32",
        )
        self._finished = asyncio.Event()
        self._loop = asyncio.get_event_loop()
        self._engine = EngineThread(engine, lambda: self._loop.call_soon_threadsafe(self._finished.set))

    async def submit(self, requests: Sequence[SequenceRequest]) -> None:
        await self._call(lambda engine: engine.submit(requests))

    async def take(self, sequences: Sequence[SequenceId]) -> dict[SequenceId, Tokens]:
        """Drop sequences, and give their tokens; what has finished is left out."""
        taken: dict[SequenceId, Tokens] = {}

        def take(engine: RolloutEngine) -> None:
            taken.update(engine.take(sequences))
            self._engine.forget(taken)

        await self._call(take)
        return taken

    async def load(self, manifest: WeightManifest, *buckets: NDArray[np.uint8]) -> None:
        """Take over a version of the weights, verified. Running sequences go on. Raises WeightsDamaged."""
        from qwen35_trainer.weights.snapshot import unpack  # needs torch, as above

        weights = unpack(manifest, buckets)
        await self._call(lambda engine: engine.load(weights, manifest.version))

    async def collect(self, wait_seconds: float) -> Collected:
        """What happened since the last call; waits up to `wait_seconds` for a finished sequence."""
        with contextlib.suppress(TimeoutError):  # nothing finished: births and tokens are news too
            await asyncio.wait_for(self._finished.wait(), wait_seconds)
            await asyncio.sleep(GATHER_SECONDS)
        self._finished.clear()
        if self._engine.failure is not None:
            failure = self._engine.failure
            raise EngineFailed(f"{self.name}: {type(failure).__name__}: {failure}") from failure
        return self._engine.drain()

    async def _call(self, act: Callable[[RolloutEngine], None]) -> None:
        future: asyncio.Future[None] = self._loop.create_future()

        def resolve(error: BaseException | None) -> None:
            if future.cancelled():
                return
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

        self._engine.call(act, lambda error: self._loop.call_soon_threadsafe(resolve, error))
        await future

"""One replica of the rollout pool: an engine on its own thread, behind asynchronous calls.

    driver ──submit / take / load──► inbox ──► engine thread: step, step, step … ──► outbox ──collect──► driver

The thread never waits while the engine has sequences. Calls do not wait for a step, with two exceptions: `load` returns when the new
weights are in place, between two tokens and without dropping a sequence, and `take` returns the tokens of the sequences.
Unfinished sequences report their tokens every PROGRESS_SECONDS, so that these are not lost with this process.
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

from qwen35_trainer.manifest import TrainingSpec
from qwen35_trainer.pipeline.events import SequenceId
from qwen35_trainer.rollout.rollout_engine import Completed, GeneratedTokens, RolloutEngine, SequenceRequest
from qwen35_trainer.runtime.device import device
from qwen35_trainer.runtime.process import Process, starting
from qwen35_trainer.weights.weight_manifest import WeightManifest

IDLE_WAIT_SECONDS = 0.5
"""How long the thread sleeps on an empty inbox before it checks whether it has to end."""
GATHER_SECONDS = 0.02
"""Sequences that finish within this time are returned together: a call for each would take the cores of a small machine."""
PROGRESS_SECONDS = 1.0
"""Interval at which unfinished sequences report their tokens. Later tokens are lost with the process."""


class EngineFailed(RuntimeError):
    """The engine of a replica raised an exception, and generates no more."""


@dataclass(frozen=True)
class Collected:
    """The work of a replica since the previous call of `collect`."""

    finished: tuple[Completed, ...] = ()
    started: dict[SequenceId, int] = field(default_factory=dict)
    """Version of the first token of each sequence that started since."""
    progress: dict[SequenceId, tuple[GeneratedTokens, ...]] = field(default_factory=dict)
    """New tokens of unfinished sequences."""
    tokens: int = 0
    busy: tuple[tuple[float, float], ...] = ()
    """Intervals in which the engine had sequences, in wall-clock seconds."""


@dataclass
class _Outbox:
    finished: list[Completed] = field(default_factory=list)
    started: dict[SequenceId, int] = field(default_factory=dict)
    progress: dict[SequenceId, list[GeneratedTokens]] = field(default_factory=dict)
    tokens: int = 0
    busy: list[tuple[float, float]] = field(default_factory=list)


class EngineThread:
    """The thread on which a replica's engine runs until `close`. No other thread calls the engine."""

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
        """Run `act` on the thread between two steps, then call `done` with what it raised, or None."""

        def run() -> None:
            error: BaseException | None = None
            try:
                act(self._engine)
            except Exception as raised:  # noqa: BLE001  # passed to the caller
                error = raised
            done(error)

        self._inbox.put(run)

    def drain(self) -> Collected:
        """Return the tokens and finished sequences since the previous call."""
        with self._lock:
            outbox, self._outbox = self._outbox, _Outbox()
        progress = {name: tuple(parts) for name, parts in outbox.progress.items()}
        return Collected(tuple(outbox.finished), outbox.started, progress, outbox.tokens, tuple(outbox.busy))

    def forget(self, sequences: Iterable[SequenceId]) -> None:
        """Drop the progress of sequences that were taken: they may be submitted again with all their tokens."""
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
        except Exception as error:  # noqa: BLE001  # raised by the next collect
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
        progress: dict[SequenceId, GeneratedTokens] = {}
        if started - self._progressed >= PROGRESS_SECONDS:
            self._progressed, progress = started, self._engine.progress()
        with self._lock:
            box = self._outbox
            box.finished += output.finished
            box.started |= output.started
            box.tokens += output.tokens
            for name, tokens in progress.items():
                box.progress.setdefault(name, []).append(tokens)
            # Steps follow each other within microseconds, so one interval grows until the engine has no sequences.
            if box.busy and started - box.busy[-1][1] < 0.002:
                box.busy[-1] = (box.busy[-1][0], time.time())
            else:
                box.busy.append((started, time.time()))
        if output.finished:
            self._on_finished()


class RolloutWorker(Process):
    """Ray actor of one replica.

    life: the numbers of the attempt and of the replica. They are part of the random seed, so that no two actors of a
    run draw the same samples.
    end_token: the token that ends a response. vocabulary: number of the tokenizer's tokens.
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
        # The driver imports this module for the class. Only the worker's process imports torch.
        from qwen35_trainer.models.qwen3_5.build_model import build
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
            slots=spec.rollout.maxSequencesPerReplica,
            max_length=length,
            seed=int(np.random.SeedSequence((spec.seed, *life)).generate_state(1)[0]),
            float32_logits=spec.train.headPrecision == "FP32",
        )
        self._finished = asyncio.Event()
        self._loop = asyncio.get_event_loop()
        self._engine = EngineThread(engine, lambda: self._loop.call_soon_threadsafe(self._finished.set))

    async def submit(self, requests: Sequence[SequenceRequest]) -> None:
        await self._call(lambda engine: engine.submit(requests))

    async def take(self, sequences: Sequence[SequenceId]) -> dict[SequenceId, GeneratedTokens]:
        """Drop sequences, and return their tokens. Sequences that have finished are left out."""
        taken: dict[SequenceId, GeneratedTokens] = {}

        def take(engine: RolloutEngine) -> None:
            taken.update(engine.take(sequences))
            self._engine.forget(taken)

        await self._call(take)
        return taken

    async def load(self, manifest: WeightManifest, *buckets: NDArray[np.uint8]) -> None:
        """Verify a version of the weights, and sample from it from now on. Running sequences continue. Raises WeightsDamaged."""
        from qwen35_trainer.weights.weight_buckets import unpack  # needs torch, as above

        weights = unpack(manifest, buckets)
        await self._call(lambda engine: engine.load(weights, manifest.version))

    async def collect(self, wait_seconds: float) -> Collected:
        """Return what happened since the previous call. Waits up to `wait_seconds` for a finished sequence. Raises EngineFailed."""
        with contextlib.suppress(TimeoutError):  # then return first tokens and progress although nothing finished
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

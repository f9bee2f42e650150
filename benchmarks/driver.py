"""Measures the driver: its processor time per finished sequence, and its memory. Prints one JSON object.

    Ray actors of FakeReplica ◄── real channel ──► this process: pool, generation, coordinator, journal, scoring, assembly

    python -m benchmarks.driver [--replicas 8] [--slots 256] [--seconds 60]

The replicas are processes with the real engine thread around an engine that only counts: each running sequence gets
50 tokens per second. Everything in this process is what a driver runs, except that a batch trains at once and publications have no
weights. To measure long responses within minutes, all clocks of the replicas run `speed` times faster, and every interval of
the protocol is shorter by the same factor, so that the number of calls and reports for each sequence is that of real time.

processor   microseconds of this process, Ray's threads included, per finished sequence of 2,000 and of 32,000 tokens
memory      resident bytes of this process with 64 × 128 sequences of 32,000 tokens, all of them unfinished
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import ray

from qwen35_trainer.pipeline.coordinator import Coordinator
from qwen35_trainer.pipeline.coordinator_settings import CoordinatorSettings
from qwen35_trainer.pipeline.events import SequenceId
from qwen35_trainer.pipeline.window import Window
from qwen35_trainer.runtime import rollout_worker
from qwen35_trainer.runtime.rollout_worker import RolloutWorker
from qwen35_trainer.rollout.rollout_engine import Completed, GeneratedTokens, SequenceRequest, StepOutput

TOKENS_PER_SECOND = 50.0
"""Of one sequence: what a replica of one GPU gives a model of some 10 to 30 billion parameters at 128 to 256 sequences."""
STEP_SECONDS = 0.02
GROUP, PROMPTS_PER_BATCH, PROMPT_TOKENS, ANSWERS = 16, 32, 200, 64
VOCABULARY = 50_000
INTERVALS = ("PROGRESS_SECONDS", "MIN_GATHER_SECONDS", "MAX_GATHER_SECONDS", "MAX_REPORT_SECONDS")
"""Constants of `rollout_worker` that a faster clock shortens."""


@dataclass
class CountingEngine:
    """A rollout engine that gives every running sequence random tokens at a constant rate, until it has `length` tokens."""

    slots: int
    length: int
    speed: float
    version: int = 0
    _running: dict[SequenceId, list[float]] = field(default_factory=dict)  # tokens, reported tokens, length
    _waiting: deque[SequenceRequest] = field(default_factory=deque)
    _random: np.random.Generator = field(default_factory=np.random.default_rng)
    _stepped: float = field(default_factory=time.monotonic)
    _first: bool = True

    @property
    def busy(self) -> bool:
        return bool(self._running or self._waiting)

    def submit(self, requests: Sequence[SequenceRequest]) -> None:
        self._waiting.extend(requests)

    def take(self, sequences: Sequence[SequenceId]) -> dict[SequenceId, GeneratedTokens]:
        names = set(sequences)
        self._waiting = deque(request for request in self._waiting if request.sequence not in names)
        return {name: self._tokens(int(self._running.pop(name)[0])) for name in names & self._running.keys()}

    def progress(self) -> dict[SequenceId, GeneratedTokens]:
        grown = {}
        for name, state in self._running.items():
            if new := int(state[0]) - int(state[1]):
                grown[name], state[1] = self._tokens(new), int(state[0])
        return grown

    def load(self, weights: Mapping[str, Any], version: int) -> None:
        self.version = version

    def step(self) -> StepOutput:
        started: dict[SequenceId, int] = {}
        while self._waiting and len(self._running) < self.slots:
            request = self._waiting.popleft()
            # The first sequences are as far as if generation had gone on for long, so that ends are spread evenly.
            done = self._random.uniform(0, self.length) if self._first else 0.0
            self._running[request.sequence] = [len(request.kept), len(request.kept), max(1.0, self.length - done)]
            started[request.sequence] = self.version
        self._first = self._first and not self._running
        time.sleep(STEP_SECONDS)
        now = time.monotonic()
        grown = (now - self._stepped) * TOKENS_PER_SECOND * self.speed
        self._stepped = now
        for state in self._running.values():
            state[0] = min(state[0] + grown, state[2])
        ended = [name for name, state in self._running.items() if state[0] >= state[2]]
        finished = [Completed(name, self._tokens(int(self._running.pop(name)[2])), truncated=False) for name in ended]
        return StepOutput(tuple(finished), started, int(grown * len(self._running)))

    def _tokens(self, count: int) -> GeneratedTokens:
        ids = self._random.integers(0, VOCABULARY, count, np.int32)
        return GeneratedTokens(ids, np.zeros(count, np.float32), np.full(count, self.version, np.int32))


class FakeReplica(RolloutWorker):
    """Ray actor: a rollout worker whose engine counts, and whose clock runs `speed` times faster."""

    def __init__(self, name: str, slots: int, length: int, speed: float, logs: Path) -> None:
        unused: Any = None
        super().__init__(unused, name, life=(), end_token=0, vocabulary=0, base=logs, threads=0, logs=logs)
        self._build = lambda: CountingEngine(slots, length, speed)  # type: ignore[method-assign, return-value]
        for interval in INTERVALS:
            setattr(rollout_worker, interval, getattr(rollout_worker, interval) / speed)

    def use_threads(self, threads: int) -> None:
        """Do not import torch."""

    async def _load_arrived(self) -> None:
        while True:
            published = await self._arrived.get()
            self._running.load({}, published.manifest.version)


class FakeTrainPool:
    """A train pool whose work takes no time."""

    async def publication(self, version: int) -> Any:  # noqa: ANN401  # PublishedWeights
        from qwen35_trainer.weights.published import PublishedWeights
        from qwen35_trainer.weights.weight_manifest import WeightManifest

        return PublishedWeights(WeightManifest(version, (), ()), ())


@dataclass
class Measured:
    """What one run of the driver cost."""

    tokens: int
    finished: int
    microseconds_per_sequence: float
    calls_per_sequence: float
    megabytes: float
    running: int
    parts: dict[str, float]

"""Publications by a transport next to a plain copy of the same bytes, and next to safetensors: prints one JSON object.

    python benchmarks/weight_sync.py [--transports SharedMemory RDMA] [--megabytes 10 100 1000 4000] [--replicas 1 2 4] [--rounds 5]

    this process: the trainer      stage ──PublishedWeights──► replicas, each a process: verify, receive, commit
    a replica                      a thread makes steps of about STEP_SECONDS all the time; a version is committed between two

Sizes above 1 GB are measured with one replica. For each case, the same rounds contain a memcpy between warm buffers of the same size
(in pieces of at most MAX_COPY_BYTES, which no cache holds), a publication, and once the same tensors saved and loaded with safetensors.
The rate of a publication counts from the start of the copy until all replicas have verified the last byte; the commit waits for the step
under way. The pause is the maximum time between the ends of two steps during the publication, in usual steps, less the one step that it
contains. It is also reported for each part of the publication, for the memcpy, and for QUIET_SECONDS in which nothing is published: that
much comes from the machine and not from the publication. Memory is anonymous memory (RssAnon) in
addition to that before. Segments are not anonymous: two of the size of the weights, with SharedMemory for all processes together, with RDMA
for each process. With RDMA, all replicas read from the trainer.
The first round writes to fresh memory, and is reported apart. `--live float32` converts to bfloat16, as a trainer with master weights does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import platform
import sys
import tempfile
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import torch
from safetensors.torch import load_file, save_file

from qwen35_trainer.manifest.publication import TransportName
from qwen35_trainer.weights.published import PublishedWeights, joined
from qwen35_trainer.weights.staging import WeightShard
from qwen35_trainer.weights.transports import RankContext, receiver, sender

STEP_SECONDS = 0.02
MAX_COPY_BYTES = 512 * 2**20
TENSORS = 32
WARM_UP_SECONDS = 0.5
ANSWER_SECONDS = 300.0
SAMPLE_SECONDS = 0.005
QUIET_SECONDS = 0.5
"""Time before each publication in which nothing but the steps of the replicas runs."""


@dataclass(frozen=True)
class Announcement:
    """A message to replicas: what to fetch, and the start times of what came before, on the clock that all processes share."""

    contents: PublishedWeights | Path
    """A version, or a file of safetensors."""
    quiet: float
    """Start of the time in which nothing but steps runs."""
    copying: float
    """Start of the memcpy."""
    staging: float
    """Start of the publication."""


class Memory:
    """Samples the anonymous memory of this process."""

    def __init__(self) -> None:
        self.peak = 0
        self._over = threading.Event()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Context manager: measure the peak above the memory at its start."""
        before, self.peak = anonymous_bytes(), 0
        self._over.clear()
        thread = threading.Thread(target=self._sample, args=(before,))
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _sample(self, before: int) -> None:
        while not self._over.wait(SAMPLE_SECONDS):
            self.peak = max(self.peak, anonymous_bytes() - before)


def anonymous_bytes() -> int:
    """Return this process's memory that it shares with nobody."""
    [line] = [each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


class Generation:
    """A thread that makes steps, and commits a version between two of them."""

    def __init__(self) -> None:
        self._matrix = torch.randn(256, 256)
        self._products = self._calibrated()
        self.ends: list[float] = []
        self.weights: Any = None
        self._received: Any = None
        self._committed, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def commit(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Put a version in service between two steps, and wait for that."""
        self._committed.clear()
        self._received = weights
        assert self._committed.wait(ANSWER_SECONDS)

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def pause(self, begin: float, end: float, usual: float) -> float:
        """Return by how much the longest step between `begin` and `end` exceeds the usual one, in usual steps.

        usual: seconds. Waits for the end of the step under way at `end`.
        """
        while self.ends[-1] <= end:
            time.sleep(STEP_SECONDS / 4)
        ends = self.ends[max(0, bisect_right(self.ends, begin) - 1) : bisect_left(self.ends, end) + 1]
        return float(max(np.diff(ends))) / usual - 1

    def _calibrated(self) -> int:
        started = time.perf_counter()
        for _ in range(50):
            torch.mm(self._matrix, self._matrix)
        return max(1, round(50 * STEP_SECONDS / (time.perf_counter() - started)))

    def _run(self) -> None:
        while not self._over.is_set():
            if self._received is not None:
                self.weights, self._received = self._received, None
                self._committed.set()
            for _ in range(self._products):
                torch.mm(self._matrix, self._matrix)
            self.ends.append(time.perf_counter())


def replica(pipe: Connection) -> None:
    """Fetch and commit what comes through the pipe until None comes. Answers with the pause and the memory of each publication."""
    torch.set_num_threads(1)
    arriving, memory = receiver(), Memory()
    asyncio.run(arriving.fetch(pipe.recv()))  # imports what it needs
    generation = Generation()
    time.sleep(WARM_UP_SECONDS)
    usual = median(np.diff(generation.ends))
    pipe.send(usual)
    while (message := pipe.recv()) is not None:
        started = time.perf_counter()
        with memory.watched():
            if isinstance(message.contents, PublishedWeights):
                weights: Any = asyncio.run(arriving.fetch(message.contents))
            else:
                weights = load_file(message.contents)
            received = time.perf_counter()
            generation.commit(weights)
            del weights
        ended = time.perf_counter()
        parts = {
            "": (message.staging, ended),
            ", while the trainer copies": (message.staging, started),
            ", while it verifies": (started, received),
            ", while it commits": (received, ended),
            ", during memcpy": (message.copying, message.staging),
            ", without a publication": (message.quiet, message.copying),
        }
        pauses = {f"pause in steps{part}": generation.pause(*times, usual) for part, times in parts.items()}
        pipe.send({"received": received, "anonymous MB": memory.peak / 1e6} | pauses)
    generation.close()


class Replicas:
    """Processes that receive publications."""

    def __init__(self, count: int, first: PublishedWeights) -> None:
        """first: a version that each replica fetches before it is measured."""
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(count):
            here, there = context.Pipe()
            process = context.Process(target=replica, args=(there,), daemon=True)
            process.start()
            self._pipes.append(here)
            self._processes.append(process)
        self.send(first)

    def send(self, message: PublishedWeights | Announcement) -> list[Any]:
        """Send a message to all, and wait for all answers."""
        for pipe in self._pipes:
            pipe.send(message)
        answers = []
        for pipe in self._pipes:
            assert pipe.poll(ANSWER_SECONDS), "a replica does not answer"
            answers.append(pipe.recv())
        return answers

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(ANSWER_SECONDS)


def case(
    transport: TransportName, size: int, replicas: int, rounds: int, live: torch.dtype, folder: Path | None
) -> dict[str, Any]:
    """Measure publications of `size` bytes of bfloat16."""
    values = size // 2 // TENSORS
    tensors = {f"layer.{number}": torch.full((values,), number, dtype=live) for number in range(TENSORS)}
    shards = [WeightShard(name, (values,), torch.bfloat16, 0, tensor) for name, tensor in tensors.items()]
    copied = min(size, MAX_COPY_BYTES)
    source, target = np.ones(copied, np.uint8), np.zeros(copied, np.uint8)
    end, memory = sender(transport, RankContext(0, 1, None)), Memory()
    results: list[dict[str, Any]] = []
    pool: Replicas | None = None
    for version in range(rounds + 2):  # each of the two segments is fresh once
        quiet = time.perf_counter()
        time.sleep(QUIET_SECONDS)
        copying = time.perf_counter()
        copy = _seconds(lambda: np.copyto(target, source)) * size / copied
        with memory.watched():
            started = time.perf_counter()
            published = joined([end.stage(shards, version, frozenset({version - 1}))], version)
            staged = time.perf_counter()
        if pool is None:
            pool = Replicas(replicas, published)
            continue
        answers = pool.send(Announcement(published, quiet, copying, started))
        seconds = (
            max(answer.pop("received") for answer in answers) - started
        )  # one clock for all processes of the machine
        results.append(
            {"seconds": seconds, "blocked": staged - started, "memcpy": copy, "trainer MB": memory.peak / 1e6}
            | {key: max(answer[key] for answer in answers) for key in answers[0]}
        )
    assert pool is not None
    fresh, *warm = results
    saved = None if folder is None else _safetensors(tensors, folder, pool)
    pool.close()
    best = {key: median(each[key] for each in warm) for key in warm[0]}
    return {
        "transport": transport,
        "megabytes": size / 1e6,
        "replicas": replicas,
        "live": str(live),
        "GB/s": size / best["seconds"] / 1e9,
        "GB/s of memcpy": size / best["memcpy"] / 1e9,
        "of memcpy": best["memcpy"] / best["seconds"],
        "of memcpy, all replicas together": replicas * best["memcpy"] / best["seconds"],
        "trainer blocked, seconds": best["blocked"],
        **{key: value for key, value in best.items() if key.startswith("pause in steps")},
        "maximum pause in steps": max(each["pause in steps"] for each in warm),
        "anonymous MB of a replica": max(each["anonymous MB"] for each in warm),
        "anonymous MB of the trainer": max(each["trainer MB"] for each in warm),
        "seconds into fresh memory": fresh["seconds"],
        "seconds through safetensors": saved,
        "times faster than safetensors": None if saved is None else saved / best["seconds"],
    }


def _safetensors(tensors: dict[str, torch.Tensor], folder: Path, pool: Replicas) -> float:
    """Return the seconds in which the trainer saves, and all replicas load."""
    with tempfile.TemporaryDirectory(dir=folder) as room:
        path = Path(room) / "weights.safetensors"

        started = time.perf_counter()
        save_file({name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}, path)
        saved = Announcement(path, started, started, started)
        received: float = max(answer["received"] for answer in pool.send(saved))
        return received - started


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> None:
    """Measure all cases, and print them."""
    parser = argparse.ArgumentParser(description="Publications next to memcpy and safetensors.")
    names = ["SharedMemory", "RDMA"]
    parser.add_argument("--transports", choices=names, nargs="+", default=names)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[10, 100, 1000, 4000])
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--live", choices=["bfloat16", "float32"], default="bfloat16", help="type of live weights")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where safetensors are saved")
    parser.add_argument("--largest-shared", type=int, default=1000, help="MB up to which several replicas are measured")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cases = []
    for transport, count, megabytes in product(arguments.transports, arguments.replicas, arguments.megabytes):
        if count == 1 or megabytes <= arguments.largest_shared:
            live = getattr(torch, arguments.live)
            cases.append(case(transport, megabytes * 10**6, count, arguments.rounds, live, arguments.folder))
            share = cases[-1]["of memcpy"]
            print(f"{transport}, {megabytes} MB, {count} replicas: {share:.2f} of memcpy", file=sys.stderr, flush=True)
    machine = {
        "cores": psutil.cpu_count(),
        "memory GB": psutil.virtual_memory().total / 1e9,
        "kernel": platform.release(),
    }
    print(json.dumps({"machine": machine, "cases": cases}, indent=2))


if __name__ == "__main__":
    main()

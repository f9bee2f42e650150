"""Replicas of a real run under a real Ray are lost in every way, one after the other: no prompt is lost, and none trains twice.

killed               the process ends                                     found immediately
killed for memory    its control group is full, so the kernel kills it    found immediately
stopped              SIGSTOP: the process exists and answers nothing      found by the deadline of a call
out of memory        the kernel refuses it memory, so its engine fails    found by its next report
disconnected         its TCP connections are cut, and it continues        not a loss: calls to it repeat

`make test` loses one replica in each way. `make soak` loses one every 30 seconds, or later if the one before is
not replaced yet, for LOSS_MINUTES and until LOSSES are lost.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from qwen35_trainer.progress.records import surviving_updates
from tests.cluster import cgroups
from tests.patience import PATIENCE

from .conftest import Running

PROMPTS_PER_UPDATE, PROMPT_TOKENS = 4, 64
MEMORY_LIMITS = ("memory.max", "memory.swap.max", "memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
"""Files of a control group, of cgroup v2 and v1, in the order in which they can be written."""
LOSS_MINUTES, LOSSES = 30.0, 30


def _disconnect(process: psutil.Process) -> None:
    """Reset the connections through which Ray reaches a process."""
    for connection in process.net_connections(kind="tcp"):
        if connection.status == psutil.CONN_ESTABLISHED:
            ends = [f"[{end.ip}]:{end.port}" for end in (connection.laddr, connection.raddr)]
            subprocess.run(["ss", "-K", "src", ends[0], "dst", ends[1]], check=True, capture_output=True)


@contextmanager
def _without_memory(process: int) -> Iterator[Path | None]:
    """A control group for this process that has neither memory nor swap; None where the system lets nobody limit memory."""
    name = f"lost-{process}"  # not with the prefix of test sessions, which remove what others have left
    try:
        yield _limited(name)
    finally:
        cgroups.remove(name)


def _limited(name: str) -> Path | None:
    try:
        cgroups.create(name, for_groups=False)
        limits = [hierarchy / name / file for hierarchy in cgroups.hierarchies() for file in MEMORY_LIMITS]
        present = [limit for limit in limits if limit.exists()]
        for limit in present:
            limit.write_text("0" if "swap" in limit.name else "4096")
    except OSError:
        return None
    return present[0].parent if present else None


def _fill_its_group(process: psutil.Process) -> None:
    """Move a process to a control group without memory: the kernel kills it when it needs another page."""
    with _without_memory(process.pid) as group:
        assert group is not None
        (group / "cgroup.procs").write_text(str(process.pid))
        process.wait(PATIENCE)


def _ways() -> dict[str, Callable[[psutil.Process], object]]:
    """Those that this machine allows."""
    with _without_memory(os.getpid()) as group:
        return {way: act for way, act in WAYS.items() if group is not None or act is not _fill_its_group}


def _starve(process: psutil.Process) -> None:
    """Let every further allocation fail that needs memory of the kernel: the C library takes it for each tensor of 1 MiB or more.

    The limit is below what the process has, because a tensor that is freed would make room for the next one.
    """
    process.rlimit(resource.RLIMIT_AS, (process.memory_info().vms // 2, resource.RLIM_INFINITY))


WAYS: dict[str, Callable[[psutil.Process], object]] = {
    "killed": psutil.Process.kill,
    "killed for memory": _fill_its_group,
    "out of memory": _starve,
    "disconnected": _disconnect,
    "stopped": lambda process: process.send_signal(signal.SIGSTOP),
}


@pytest.fixture
def pool(command, write, tmp_path) -> Running:
    if os.geteuid() != 0 or shutil.which("ss") is None:
        pytest.skip("only root can cut the connections of a process, with ss of iproute2")
    changes = {
        # Its activations take 128 KiB for each token of a step, so those of a prompt are tensors of 8 MiB, for which the C library
        # has no free memory of its own.
        "data.maxPromptTokens": PROMPT_TOKENS,
        "model.source.random": {"hiddenSize": 32, "intermediateSize": 32_768, "fullAttentionInterval": 2, "layers": 2}
        | {"characters": "0123456789>="},
        "algorithm.groupSize": 2,
        "train.batch.microBatchSequences": 8,
        "train.updates": 1_000_000,
        "rollout.nodes": 2,
        "rollout.minNodes": 1,
        "checkpoint.everyUpdates": 1_000_000,
    }
    file = write(tmp_path, changes | {"evaluation.atStart": False}, prompts=1)
    prompts = ({"prompt": f"{number:0{PROMPT_TOKENS - 1}d}=", "answer": str(number % 10)} for number in range(2000))
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, prompts)) + "\n")
    return command.start("run", file, output=tmp_path / "out")


def _generating(running: Running) -> list[tuple[str, float]]:
    """(replica, start) of the last intervals in which replicas generated, in seconds of the run."""
    with (running.folder / "metrics.jsonl").open("rb") as metrics:
        metrics.seek(max(0, metrics.seek(0, os.SEEK_END) - 65_536))
        lines = metrics.read().split(b"\n")[1:-1]  # the first and the last may be incomplete
    spans = (json.loads(line) for line in lines if b'"generate"' in line)
    return [(span["lane"], span["start"]) for span in spans]


def _second(running: Running) -> float:
    """The present second of the run. Spans are written late, so the last one does not tell."""
    lines = (running.folder / "metrics.jsonl").read_text().split("\n")[:-1]  # the last may be incomplete
    last = json.loads([line for line in lines if '"wall_time"' in line][-1])
    return last["time"] + time.time() - last["wall_time"]


def _replaced(running: Running, victim: psutil.Process, lost_at: float) -> bool:
    """Whether two replicas have generated since second `lost_at`: one that still loads would be lost in another way."""
    time.sleep(0.5)  # looking at all processes of the machine takes as long as a step of the run
    replicas = {replica for replica, start in _generating(running) if start > lost_at}
    return len(running.processes("ray::RolloutWorker")) == len(replicas) == 2 and not victim.is_running()


def _lose(running: Running, way: str) -> None:
    """Lose a replica that has joined, and wait until another has its place and updates continue."""
    lost, updates = running.losses, running.updates
    workers = running.processes("ray::RolloutWorker")
    victim = workers[random.randrange(len(workers))]  # seeded by the suite
    WAYS[way](victim)
    if way != "disconnected":
        running.wait_until(lambda: running.losses > lost, f"loss of a replica that is {way}")
        lost_at = _second(running)
        running.wait_until(lambda: _replaced(running, victim, lost_at), "replacement")
    running.wait_until(lambda: running.updates > updates + 3, "further updates")


def _end(running: Running) -> None:
    """Stop the run, and check that each prompt had exactly one turn."""
    running.signal(signal.SIGTERM)
    ended = running.end()
    assert "Traceback" not in ended.err, ended.err
    updates = surviving_updates(ended.records)
    assert [record.update for record in updates] == list(range(1, len(updates) + 1))
    progress = ended.progress(len(updates))
    trained = sum(record.prompts for record in updates)
    assert trained == PROMPTS_PER_UPDATE * len(updates)
    assert progress["position"] - len(progress["pending"]) == trained
    assert max(record.lag_max for record in updates) <= 2


def test_a_replica_lost_in_each_way_loses_no_prompt(pool):
    pool.wait_until(lambda: pool.updates > 2, "the first updates")
    ways = _ways()
    for way in ways:
        _lose(pool, way)
    assert pool.losses == len(ways) - 1, "a replica that was disconnected is not lost"
    _end(pool)


@pytest.mark.soak
@pytest.mark.timeout(60 * (LOSS_MINUTES + 15))
def test_replicas_lost_for_half_an_hour_lose_no_prompt(pool):
    pool.wait_until(lambda: pool.updates > 2, "the first updates")
    end = time.monotonic() + 60 * LOSS_MINUTES
    for way in itertools.cycle(_ways()):
        started = time.monotonic()
        if started > end and pool.losses >= LOSSES:
            break
        _lose(pool, way)
        time.sleep(max(0.0, 30.0 - (time.monotonic() - started)))
    _end(pool)

"""Replicas that are larger than a node: a worker on each of their nodes, which live and end together.

`make soak` runs one with vLLM, in which the nodes are processes of this machine that only the network connects.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from qwen35_trainer.progress.records import surviving_updates

from .conftest import Running

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-grpo-vllm.yaml"
SETTINGS = (
    "rollout.nodes=2",
    "rollout.tensorParallel=2",
    "accelerator.devicesPerNode=1",
    "train.updates=100000",
    "evaluation.atStart=false",
    "evaluation.everyUpdates=0",
    "checkpoint.everyUpdates=1000000",
)
LEADER, NODE = "ray::RolloutWorker", "ray::ReplicaNode"


def _rank(process: psutil.Process) -> psutil.Process:
    """The process of vLLM that a worker has started."""
    return max(process.children(recursive=True), key=lambda child: child.memory_info().rss)


PARTS: dict[str, Callable[[psutil.Process, psutil.Process], psutil.Process]] = {
    "the worker of the first node": lambda first, second: first,
    "the worker of the second node": lambda first, second: second,
    "a process of the first node": lambda first, second: _rank(first),
    "a process of the second node": lambda first, second: _rank(second),
}
"""What is killed of a replica."""


def _workers(running: Running) -> tuple[psutil.Process, psutil.Process] | None:
    """The workers of both nodes of the replica, if there is one replica."""
    first, second = running.processes(LEADER), running.processes(NODE)
    return (first[0], second[0]) if len(first) == len(second) == 1 else None


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_replica_of_two_nodes_is_replaced_whole_whatever_part_of_it_is_lost(command, tmp_path):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    settings = [word for change in SETTINGS for word in ("--set", change)]
    running = command.start("run", EXAMPLE, *settings, output=tmp_path / "out")
    running.wait_until(lambda: running.updates > 1, "the first updates")
    for count, (part, victim_of) in enumerate(PARTS.items(), 1):
        workers = _workers(running)
        assert workers is not None
        ranks = [_rank(worker) for worker in workers]
        os.kill(victim_of(*workers).pid, signal.SIGKILL)
        running.wait_until(lambda count=count: running.losses == count, f"loss of {part}")
        updates = running.updates
        running.wait_until(lambda updates=updates: running.updates > updates + 2, f"updates after the loss of {part}")
        gone = {process.pid for process in (*workers, *ranks)}
        survivors = [process for process in running.processes() if process.pid in gone]
        assert not survivors, f"left after the loss of {part}"
    running.signal(signal.SIGTERM)
    ended = running.end()
    assert "Traceback" not in ended.err
    updates = surviving_updates(ended.records)
    assert [record.update for record in updates] == list(range(1, len(updates) + 1))

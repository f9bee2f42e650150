"""Sequences that move between vLLM replicas of one and of two devices, as between the pool and its straggler lane."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.rollout.lane_replica import MAX_TOKENS, Tokens
from tests.rollout.split_replica import AS_PUBLISHED
from tests.rollout.test_vllm import library_model, log_probs_of, prompt_of

SEQUENCES = 12
STEPS = 10
"""Number of steps of the first replica, and then of the second replica with its first version."""


@dataclass
class Program:
    """A replica in a process of its own."""

    process: subprocess.Popen[str]

    def ask(self, **command: Any) -> dict[int, Tokens]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        answer = next(line for line in self.process.stdout if line.startswith("{"))
        return {int(name): tokens for name, tokens in json.loads(answer).items()}

    def submit(self, sequences: dict[int, Tokens | None]) -> None:
        self.ask(submit=[{"name": name, "prompt": prompts(name), "kept": kept} for name, kept in sequences.items()])


def prompts(name: int) -> list[int]:
    return prompt_of((3, 40, 300)[name % 3], seed=name)


@pytest.fixture(scope="module")
def replicas() -> Iterator[dict[int, Program]]:
    """One replica by each number of devices."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    started = {
        devices: Program(
            subprocess.Popen(
                [sys.executable, "-m", "tests.rollout.lane_replica", str(devices)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
        )
        for devices in (1, 2)
    }
    try:
        yield started
    finally:
        for program in started.values():
            program.process.send_signal(signal.SIGKILL)
            program.process.wait()


@pytest.mark.soak
@pytest.mark.parametrize(("source", "target"), [(1, 2), (2, 1)])
def test_a_sequence_that_moves_keeps_its_tokens_and_gets_the_others_from_the_new_replica(replicas, source, target):
    """The second replica computes the prompt and the kept tokens with its own version, and then gets another one.

    All versions are staged for replicas of the first size, which is that of the pool.
    """
    first, second, third = 3 * source, 3 * source + 1, 3 * source + 2
    staged = {"for": source}
    replicas[source].ask(load=first, **staged)
    replicas[target].ask(load=second, **staged)
    replicas[source].submit(dict.fromkeys(range(SEQUENCES)))
    ended = replicas[source].ask(steps=STEPS)
    moved = replicas[source].ask(take=True)
    assert ended.keys() | moved.keys() == set(range(SEQUENCES))
    assert len(moved) > SEQUENCES / 4, "few responses end so soon"

    replicas[target].submit(dict(moved))
    finished = replicas[target].ask(steps=STEPS)
    replicas[target].ask(load=third, **staged)
    finished |= replicas[target].ask(steps=MAX_TOKENS)
    assert finished.keys() == moved.keys()

    models = [library_model(seed, AS_PUBLISHED) for seed in (first, second)]
    right, wrong, at_the_move = [], [], []
    for name, kept in moved.items():
        tokens, count = finished[name], len(kept["ids"])
        for part in ("ids", "log_probs", "versions"):
            assert tokens[part][:count] == kept[part]
        more, rest = (tokens["versions"].count(version) for version in (second, third))
        assert tokens["versions"] == [first] * count + [second] * more + [third] * rest
        for steps in (count, more) if rest else (count,):
            assert STEPS - 1 <= steps <= STEPS, "a step may prefill other prompts first"
        ids, log_probs = (np.array(tokens[part][: count + more]) for part in ("ids", "log_probs"))
        off = [np.abs(log_probs - log_probs_of(model, prompts(name), ids)) for model in models]
        right += [off[0][:count], off[1][count:]]
        wrong += [off[1][:count], off[0][count:]]
        at_the_move += [off[0][count - 1], off[1][count]]
    assert np.concatenate(right).mean() <= 0.02
    assert np.mean(at_the_move) <= 0.04, "few tokens; with the other model it is ten times as much"
    assert np.concatenate(wrong).mean() > 0.1, "the models are too similar to say which one computed a token"
    assert any(third in tokens["versions"] for tokens in finished.values())

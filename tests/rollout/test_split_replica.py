"""A replica of two devices: two processes of vLLM that share the weights."""

import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from qwen35_trainer.rollout.vllm_core import portions
from qwen35_trainer.rollout.vllm_versions import may_schedule_ahead
from qwen35_trainer.rollout.vllm_worker import parameter_checksums
from tests.patience import PATIENCE
from tests.rollout.shown import scored_by_the_library, shown_scenes
from tests.rollout.split_replica import AS_PUBLISHED, PROMPTS, SEEDS, SHOWN
from tests.rollout.test_vllm import assert_greedy, log_probs_of, prompt_of
from tests.rollout.test_vllm_pictures import pictured

HISTORIES = 6


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_it_generates_as_the_trainer_computes_and_ends_with_its_process(nodes: int) -> None:
    """With two nodes, only the network connects the processes of the devices."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    command = [sys.executable, "-m", "tests.rollout.split_replica", *(["2"] if nodes == 2 else [])]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as program:
        try:
            assert program.stdout is not None
            answer = next(line for line in program.stdout if line.startswith("{"))
            result = json.loads(answer)
            workers = [psutil.Process(number) for number in result["workers"]]
        finally:
            program.send_signal(signal.SIGKILL)
    assert len([worker for worker in workers if worker.pid]) >= 2
    _, alive = psutil.wait_procs(workers, timeout=PATIENCE)
    assert alive == []
    differences, decided, probed, seen = [], [], [], []
    for seed in SEEDS:
        model = pictured(seed, AS_PUBLISHED)
        for length in PROMPTS:
            prompt = prompt_of(length)
            ids, log_probs = (np.array(values) for values in result["responses"][f"({seed}, {length})"])
            decided.append(assert_greedy(model, prompt, ids))
            differences.append(np.abs(log_probs - log_probs_of(model, prompt, ids)))
        for index, shown in enumerate(shown_scenes()):
            ids, log_probs = (np.array(values) for values in result["responses"][f"({SHOWN + seed}, {index})"])
            seen.append(np.abs(log_probs - scored_by_the_library(model, shown, ids)))
        for length, log_probs in zip(PROMPTS, result["probes"][seed], strict=True):
            prompt = prompt_of(length)
            probed.append(np.abs(log_probs - log_probs_of(model, prompt[:1], np.array(prompt[1:]))))
    assert np.concatenate(differences).mean() <= 0.02
    assert np.mean(decided) > 0.5
    assert np.concatenate(probed).mean() <= 0.02, "a probe"
    assert np.concatenate(seen).mean() <= 0.02, "prompts with pictures"
    assert set(result["parts"].values()) == {2}, "both processes have a part of each parameter"
    assert result["named"] == [], "shared memory that has a name outlives processes that are killed"


@pytest.mark.soak
def test_it_keeps_the_laws_where_vllm_schedules_ahead() -> None:
    """Its processes compute a step while this project's process schedules the next one, takes sequences and commits versions."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    if not may_schedule_ahead():
        pytest.skip("with this version vLLM does not schedule ahead")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-m", "tests.rollout.ahead_replica", str(HISTORIES)]
    program = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    [answer] = [json.loads(line) for line in program.stdout.splitlines() if line.startswith("{")]
    assert answer["ended"] > 3 * HISTORIES


class PackedLinear(torch.nn.Module):
    """A layer whose matrix vLLM's CPU kernels hide. Every worker has it whole, such as the gate of experts."""

    input_size = 3

    def __init__(self, matrix: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(0))
        self.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, matrix, bias)


def test_a_hidden_matrix_has_a_checksum_of_its_values() -> None:
    def checksums(matrix: torch.Tensor) -> dict[str, int]:
        unused = torch.nn.Linear(2, 2, device="meta")  # as those of a vision tower without pictures
        model = torch.nn.Sequential(PackedLinear(matrix.bfloat16()), unused)
        return parameter_checksums(SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: model)))

    first = checksums(torch.ones(2, 3))
    assert first.keys() == {"0.weight"}
    assert first == checksums(torch.ones(2, 3))
    assert first != checksums(torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 2.0]]))


def test_weights_travel_in_portions_without_the_tensors_that_they_are_part_of() -> None:
    whole = torch.arange(2**20, dtype=torch.float32)
    named = [(str(number), whole[number * 1024 : (number + 1) * 1024]) for number in range(1024)]
    parts = list(portions(iter(named)))
    assert len(parts) == 1
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for _, tensor in parts[0])
    assert torch.equal(torch.cat([tensor for _, tensor in parts[0]]), whole)


def test_a_portion_has_a_limited_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qwen35_trainer.rollout.vllm_core.PORTION_BYTES", 10)
    named = [(str(size), torch.zeros(size, dtype=torch.uint8)) for size in (4, 6, 1, 30, 2)]
    assert [[name for name, _ in portion] for portion in portions(named)] == [["4", "6"], ["1"], ["30"], ["2"]]

"""A program that generates with a replica of two devices that divide a model with experts, and then loses one of its processes.

python -m tests.rollout.expert_replica whole MODEL     each process has some whole experts (expert parallelism)
python -m tests.rollout.expert_replica parts MODEL     each process has a part of every expert (tensor parallelism)

MODEL: Qwen3.5 or Qwen3.

It prints one line of JSON: the experts of each process in each layer; for each seed how far vLLM and the library in bfloat16 are from the
library in float32, and the share of recorded choices of experts that are the library's; the error of a step in which a process was missing;
the ids of the processes.
"""

import json
import os
import signal
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import torch

from qwen35_trainer.manifest.vllm import EXPERT_PARALLEL, VLLMSpec
from qwen35_trainer.rollout import vllm_core
from qwen35_trainer.rollout.vllm import VLLMEngine
from qwen35_trainer.rollout.vllm_core import CoreSettings, build_core
from qwen35_trainer.rollout.vllm_environment import set_variables
from qwen35_trainer.weights.division import ReplicaShape
from tests.publications import received
from tests.rollout.loading import load
from tests.rollout.qwen3 import qwen3_models
from tests.rollout.routed import Compared, library_logits
from tests.rollout.test_vllm import (
    END,
    GREEDY,
    MAX_LENGTH,
    SHAPE,
    SLOTS,
    Replica,
    distances,
    library_model,
    prompt_of,
)

EXPERTS, DEVICES = 5, 2
WITH_EXPERTS = SHAPE | {"experts": EXPERTS, "expertsPerToken": 2}
STAGED_FOR = {
    0: None,
    1: ReplicaShape(DEVICES, divides_experts=True),
    2: ReplicaShape(DEVICES),
    3: ReplicaShape(1),
}
"""Seed of a model → for which replicas its weights are staged in shared memory; None: they are sent to the processes."""


def models_of(family: str) -> dict[int, Any]:
    """Models of the library by seed. family: Qwen3.5 or Qwen3."""
    if family == "Qwen3.5":
        return {seed: library_model(seed, WITH_EXPERTS) for seed in STAGED_FOR}
    with tempfile.TemporaryDirectory() as folder:
        return qwen3_models(Path(folder) / "model", list(STAGED_FOR), num_experts=EXPERTS)


def recorded_share(replica: Replica, model: Any) -> float:
    compared = Compared()
    for length in (7, 60, 300):
        prompt = prompt_of(length)
        for completed in replica.generate(prompt, 12, samples=2):
            inputs = [*prompt, *completed.tokens.ids.tolist()][:-1]
            compared.add(completed.tokens.choices, library_logits(model, inputs))
    return compared.equal_share


def tables(worker: Any) -> dict[str, list[int]]:
    """The table of each layer of experts in a process: the number of each expert among those of the process, or -1."""
    model = worker.model_runner.get_model()
    return {name: tensor.tolist() for name, tensor in model.named_buffers() if name.endswith("._expert_map")}


def process_id(_: Any) -> int:
    return os.getpid()


def error_after_a_loss(replica: Replica, process: int) -> str:
    """Kill a process of the replica while it generates. Returns the error of its next steps; empty if there is none."""
    replica.submit(prompt_of(20), 200, GREEDY, samples=4)
    replica.steps(2)
    os.kill(process, signal.SIGKILL)
    try:
        replica.steps(200)
    except Exception as error:  # noqa: BLE001  # a replica ends with whatever a step raises
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    torch.set_num_threads(1)
    set_variables()
    models = models_of(sys.argv[2])
    config = models[0].config
    settings = CoreSettings(
        slots=SLOTS,
        max_length=MAX_LENGTH,
        seed=5,
        memory_fraction=0.1,
        on_cpu=True,
        devices=DEVICES,
        options=VLLMSpec(extraArguments={EXPERT_PARALLEL: sys.argv[1] == "whole"}),
        records_choices=True,
    )
    core = build_core(config, settings)
    engine = VLLMEngine(core, config, end_token=END, max_length=MAX_LENGTH, on_cpu=True, records_choices=True)
    replica = Replica(engine, core, models, set())
    measured = {}
    for seed, staged in STAGED_FOR.items():
        weights = replica.weights(seed)
        shared = weights if staged is None else received(weights.items(), seed, staged)
        # The processes read shared memory themselves, so that no tensor is sent to them.
        sent = vllm_core.portions if staged is None else Mock(side_effect=AssertionError("a tensor was sent"))
        with patch.object(vllm_core, "portions", sent):
            load(engine, shared, seed)
        of_vllm, of_library, change = distances(replica, models[seed])
        measured[seed] = {"vllm": asdict(of_vllm), "library": asdict(of_library), "change": change}
        measured[seed]["recorded"] = recorded_share(replica, models[seed])
    result = {"tables": core.collective_rpc(tables), "processes": core.collective_rpc(process_id), "measured": measured}
    result["error"] = error_after_a_loss(replica, result["processes"][-1])
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()

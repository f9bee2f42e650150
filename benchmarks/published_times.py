"""Compares the planned time of an update with published runs of this family or size: prints one JSON object.

    python benchmarks/published_times.py

The runs are those of NeMo RL (NVIDIA-NeMo/RL, docs/about/performance-summary.md, releases 0.4 to 0.6): GRPO on OpenMathInstruct-2, H100, bfloat16,
Megatron and vLLM. The tables have the mean length of prompt and response together; a prompt is taken to have 100 tokens. A run "1-step Off" generates a whole
batch with one version while it trains on the one before, on as many nodes: the longer of both, of which generation ends with its longest response. The constants of `planning/assumptions.py` were not fitted on these rows; the rows of Llama 3.1 8B,
on which the utilisation of dense models was fitted, are printed too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from qwen35_trainer.catalog.devices import DEVICES
from qwen35_trainer.catalog.model_sizes import ModelSizes
from qwen35_trainer.catalog.models import MODELS
from qwen35_trainer.manifest import parse_spec
from qwen35_trainer.planning.pod_request import PodRequest
from qwen35_trainer.planning.resource_plan import Inputs, resource_plan

PROMPT = 100
LLAMA = ModelSizes(4096, 32, 32, 8, 128, 128_256, intermediate=14_336, full_attention_interval=1, output_gate=False)
"""meta-llama/Llama-3.1-8B."""


@dataclass(frozen=True)
class Run:
    """A row of a published table."""

    model: str
    ahead: bool
    devices: int
    samples: int
    per_update: int
    """Samples of an optimizer step."""
    longest: int
    mean: int
    replica: int
    """Devices of a replica."""
    train: dict[str, int]
    seconds: tuple[float, ...]
    """Time of a step, in the releases that have this row."""
    fitted: bool = False


RUNS = [
    Run("Llama-3.1-8B", False, 16, 2048, 512, 4096, 1060, 1, {"pipeline": 2}, (97.7, 92.8), fitted=True),
    Run("Llama-3.1-8B", True, 16, 2048, 512, 4096, 1129, 1, {"pipeline": 2}, (74.6, 64.8), fitted=True),
    Run("Qwen/Qwen3-30B-A3B", False, 32, 2048, 512, 4096, 3200, 2, {"expert": 8}, (198, 194, 192)),
    Run("Qwen/Qwen3-30B-A3B", True, 32, 2048, 512, 4096, 3201, 2, {"expert": 8, "pipeline": 2}, (154, 150, 152)),
    Run("Qwen/Qwen3-32B", False, 32, 2048, 512, 4096, 3230, 4, {"tensor": 4, "pipeline": 4}, (393, 376)),
    Run("Qwen/Qwen3-32B", True, 64, 2048, 512, 4096, 3230, 4, {"tensor": 4, "pipeline": 4}, (215, 200)),
    Run(
        "Qwen/Qwen3-235B-A22B",
        False,
        128,
        512,
        512,
        8192,
        5700,
        16,
        {"tensor": 2, "expert": 16, "pipeline": 8},
        (506, 431, 429, 395),
    ),
    Run(
        "Qwen/Qwen3-235B-A22B",
        True,
        256,
        512,
        512,
        8192,
        5700,
        8,
        {"tensor": 4, "expert": 16, "pipeline": 8},
        (241, 203, 218, 231),
    ),
]


def planned(run: Run) -> dict[str, Any]:
    """Return the row of a run: published and planned seconds of a step."""
    nodes = run.devices // 8 // (2 if run.ahead else 1)
    updates = run.samples // run.per_update
    spec, problems = parse_spec(
        {
            "mode": "Colocated",
            "model": {"name": run.model, "source": {"path": "model"}},
            "data": {
                "train": [{"name": "t", "files": {"paths": ["t.jsonl"]}}],
                "maxPromptTokens": PROMPT,
                "maxResponseTokens": run.longest - PROMPT,
            },
            "rewards": [{"type": "ExactMatch"}],
            # The tables' recipes have a KL term and compute the log-probs of the policy once more: two forward passes.
            "algorithm": {"groupSize": 32, "kl": {"placement": "Loss"}, "correction": {"type": "TokenTIS"}},
            "rollout": {
                "engine": "VLLM",
                "nodes": nodes,
                "tensorParallel": run.replica,
                "maxSequencesPerReplica": 512,
                "memoryFraction": 0.85 if run.ahead else 0.6,  # on policy, both pools share the devices
            },
            "train": {
                "engine": "Megatron",
                "nodes": nodes,
                "parallelism": run.train,
                "batch": {
                    "promptsPerUpdate": run.per_update // 32,
                    "dynamicMicroBatches": True,
                    "maxTokensPerDevice": run.longest,
                },
            },
            "async": {"updatesPerBatch": updates},
            # NeMo RL sends weights between devices, not through Ray's object store.
            "publication": {"transport": "RDMA"},
        }
    )
    assert spec is not None, problems
    assert not problems, problems
    shape = LLAMA if run.fitted else MODELS[run.model]
    profile = PodRequest(memory_gib=512, shm_gib=192)
    inputs = Inputs(shape, "H100", mean=run.mean - PROMPT, prompt=PROMPT, pictures=False, profile=profile)
    time = resource_plan(spec, inputs).time
    assert time is not None
    assert time.generation is not None
    training, generation = time.training.seconds * updates, time.generation.seconds * updates
    seconds = max(training, generation) if run.ahead else time.seconds * updates
    middle = sorted(run.seconds)[len(run.seconds) // 2]
    return {
        "model": run.model,
        "run": "1 step off" if run.ahead else "on policy",
        "H100": run.devices,
        "published": run.seconds,
        "planned": round(seconds, 1),
        "difference, %": round(100 * (seconds / middle - 1)),
        "training": round(training, 1),
        "generation": round(generation, 1),
        "fitted": run.fitted,
    }


def main() -> None:
    """Plan all runs, and print them."""
    print(json.dumps({"peak": DEVICES["H100"].source, "runs": [planned(run) for run in RUNS]}, indent=2))


if __name__ == "__main__":
    main()

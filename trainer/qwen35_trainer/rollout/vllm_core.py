"""vLLM's engine core inside this process: its construction, and the replacement of its weights.

    folder with config.json ─► build_core ─► LLMEngine: scheduler, executor, model runner, all on the caller's thread
    tensors of a version    ─► replace_weights ─► the model's parameters, in place

Why the core runs in this process, and not in one of its own as in vLLM's server:

* A step computes and samples one token for each sequence and returns when these tokens are known. No step is in flight when
  weights are replaced, so the version of each token is exact. With a core of its own, vLLM tags tokens when it processes them,
  which may be after the weights have changed.
* Weights are passed as tensors, without a copy for another process.
* Nothing of the replica outlives its process.

This file and `vllm.py` are written for vLLM 0.32, whose internals they use: see `replace_weights`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qwen35_trainer.models.qwen3_5.classes import CLASSES, HFConfig
from qwen35_trainer.models.qwen3_5.hub_tensors import NamedTensor
from qwen35_trainer.rollout.vllm_candidates import MAX_RETURNED_TOKENS
from qwen35_trainer.rollout.vllm_environment import set_variables
from qwen35_trainer.rollout.vllm_memory import cpu_cache_bytes

type Core = Any
"""vLLM's LLMEngine. Its types are not followed (pyproject.toml)."""

FLOAT32_PARAMETER = ".A_log"
"""Suffix of the parameter that vLLM keeps in float32. All others are bfloat16."""


@dataclass(frozen=True)
class CoreSettings:
    """Settings of an engine core."""

    slots: int
    """Maximum number of sequences that are decoded concurrently."""
    max_length: int
    """Maximum length of a prompt and its response together, in tokens."""
    seed: int
    """Seed of the random numbers that tokens are drawn with."""
    memory_fraction: float
    """Share of the device's memory for weights and caches; on the CPU, the maximum share of available memory for caches."""
    on_cpu: bool


def write_configuration(config: HFConfig, folder: Path) -> None:
    """Write the config.json of a random model, as published folders have it."""
    config.architectures = [CLASSES[config.model_type]]
    config.save_pretrained(folder)


def build_core(folder: Path, config: HFConfig, settings: CoreSettings) -> Core:
    """Build the engine core of the model in `folder`, of which only the configuration is read: its weights have no meaning
    until `replace_weights`.

    config: the contents of the folder's config.json. Raises RuntimeError if vLLM would compute ahead of a step.
    """
    set_variables()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor import Executor

    _quieten()
    arguments = EngineArgs(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        limit_mm_per_prompt={"image": 0, "video": 0},
        dtype="bfloat16",
        seed=settings.seed,
        max_model_len=settings.max_length,
        max_num_seqs=settings.slots,
        # The distribution that a token is drawn from, after temperature, min-p, top-k and top-p.
        logprobs_mode="processed_logprobs",
        max_logprobs=MAX_RETURNED_TOKENS,
        async_scheduling=False,
        distributed_executor_backend="uni",
        # Samples of a prompt share its prefill in whole blocks. vllm.py keeps versions apart.
        enable_prefix_caching=True,
        enforce_eager=settings.on_cpu,
        **_memory(config, settings),
    )
    configuration = arguments.create_engine_config()
    core = LLMEngine(configuration, Executor.get_class(configuration), log_stats=False, multiprocess_mode=False)
    if configuration.scheduler_config.async_scheduling or core.engine_core.engine_core.batch_queue is not None:
        raise RuntimeError("vLLM schedules ahead of a step, so the versions of tokens would not be exact")
    return core


def stepping(*, on_cpu: bool) -> contextlib.AbstractContextManager[object]:
    """Return the context manager to call the core's `step` in.

    vLLM compiles a few small functions of its sampler at their first call. On the CPU this starts a C++ compiler, for half a
    minute on a busy machine, and gains nothing, so they run uncompiled there.
    """
    return torch.compiler.set_stance("force_eager") if on_cpu else contextlib.nullcontext()


def replace_weights(core: Core, weights: Iterable[NamedTensor]) -> None:
    """Replace all weights in place between two steps. Running sequences keep their state.

    weights: tensors by the names of a published folder, on the host or on the device.
    Raises ValueError naming the parameters of the model that got no tensor; the core is unusable then.
    """
    rounded = (
        (name, tensor if name.endswith(FLOAT32_PARAMETER) else tensor.to(torch.bfloat16)) for name, tensor in weights
    )
    [missing] = core.collective_rpc(_replace, args=(rounded,))
    if missing:
        raise ValueError(f"vLLM found no tensor for its parameters {missing}")


def _replace(worker: Any, weights: Iterable[NamedTensor]) -> list[str]:  # noqa: ANN401  # vLLM's worker
    """Replace the weights of one worker. Returns the parameters that got no tensor.

    vLLM's `reload_weights` calls the same two functions, but only logs which parameters got no tensor.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    runner = worker.model_runner
    model = runner.get_model()
    parameters = {name for name, _ in model.named_parameters()}
    if runner.device.type == "cpu":
        _forget_expert_kernels(model)
    with set_current_vllm_config(worker.vllm_config), torch.no_grad():
        initialize_layerwise_reload(model)
        loaded = model.load_weights(weights)
        finalize_layerwise_reload(model, runner.model_config)
        _repack_tied_head(model)
    return sorted(parameters - loaded)


def _forget_expert_kernels(model: Any) -> None:  # noqa: ANN401  # vLLM's model
    """Let vLLM bring the new experts into the layout of its CPU kernels. vLLM 0.32 does so only for layers that have no kernel yet,
    and otherwise computes with weights of the wrong layout.
    """
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if method is not None and getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _repack_tied_head(model: Any) -> None:  # noqa: ANN401  # vLLM's model
    """Renew the copy of a tied output layer that vLLM's CPU kernels compute with. vLLM 0.32 renews only that of the embedding."""
    text = getattr(model, "language_model", model)
    if text.config.tie_word_embeddings:
        text.lm_head.quant_method.process_weights_after_loading(text.lm_head)


def _memory(config: HFConfig, settings: CoreSettings) -> dict[str, float]:
    if not settings.on_cpu:
        return {"gpu_memory_utilization": settings.memory_fraction}
    # vLLM would otherwise take a share of all memory, in each replica of the machine.
    return {
        "kv_cache_memory_bytes": cpu_cache_bytes(config, settings.slots, settings.max_length, settings.memory_fraction)
    }


def _quieten() -> None:
    """Leave out vLLM's log lines that say nothing about a run."""
    logging.getLogger("vllm").setLevel(logging.WARNING)
    # It warns at each replacement that rotary embeddings, which have no weights, got none. `replace_weights` checks the others.
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)

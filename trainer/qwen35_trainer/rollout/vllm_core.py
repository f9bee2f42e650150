"""vLLM's engine core inside this process: its construction, and the replacement of its weights.

    configuration           ─► build_core ─► LLMEngine: scheduler, executor, model runner, all on the caller's thread
                                                 └─► with several devices: a process with a model runner for each
    tensors of a version    ─► replace_weights ─► the model's parameters, in place

Why the core runs in this process, and not in one of its own as in vLLM's server:

* The version of each token is exact. On accelerators vLLM schedules ahead: it starts a step before the output of the one before it
  is processed. The engine waits for the step in flight before weights are replaced (`CoreRequests.settle`), so that each step
  computes and samples its tokens with one version. With a core of its own, vLLM tags tokens when it processes them, which may
  be after the weights have changed.
* Weights are passed as tensors, without a copy for another process.
* Nothing of the replica outlives its process.

A replica of several devices has a process for each of them, which vLLM starts (vllm_worker.py). Scheduling, sampling parameters
and outputs stay in this process, so all of the above holds. The processes read weights in shared memory without another copy; weights
elsewhere are copied to them.

A replica that is larger than a node has the core on its first node. On each other node, `start_workers` starts the processes of
that node's devices, which then take part as those of the first node do:

    node 0: build_core    ─► engine core ─► processes of ranks 0 … 7 ◄─┐ torch.distributed, and vLLM's messages
    node 1: start_workers ────────────────► processes of ranks 8 … 15 ◄┘ by TCP

This file, `vllm_worker.py`, `vllm_requests.py`, `vllm_processor.py`, `vllm_cpu_experts.py`, `vllm_choices.py`, `vllm_choice_worker.py` and
`vllm.py` use internals of vLLM. `vllm_versions.py` describes the differences between the versions of vLLM for which they are written.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qwen35_trainer.manifest import LoRASpec
from qwen35_trainer.manifest.release import VLLM_ADAPTER_RANKS as ADAPTER_RANKS
from qwen35_trainer.manifest.vllm import CPU_BATCHED_TOKENS, VLLMSpec, truth_of
from qwen35_trainer.models.qwen3_5.classes import HFConfig
from qwen35_trainer.models.qwen3_5.hub_tensors import NamedTensor
from qwen35_trainer.models.qwen3_5.model_types import CLASSES, TEXT_MODEL_TYPES
from qwen35_trainer.rollout.vllm_candidates import MAX_RETURNED_TOKENS
from qwen35_trainer.rollout.vllm_choices import ChoiceTable, RecordingExecutor, RouterSizes
from qwen35_trainer.rollout.vllm_environment import reuse_freed_tensors, set_variables
from qwen35_trainer.rollout.vllm_memory import cpu_cache_bytes
from qwen35_trainer.rollout.vllm_pictures import picture_arguments, position_settings
from qwen35_trainer.rollout.vllm_versions import (
    add_cpu_functions,
    builds_text_models,
    check_processor,
    may_schedule_ahead,
    vision_language,
)
from qwen35_trainer.rollout.vllm_worker import (
    begin_replacement,
    finish_replacement,
    for_vllm,
    join_replica,
    load_portion,
    load_shared,
    memory_in_use,
    model_type,
    restore_expert_layout,
)
from qwen35_trainer.weights.host_weights import HostWeights
from qwen35_trainer.weights.memory_change import MemoryChange

type Core = Any
"""vLLM's LLMEngine. mypy does not follow its types (pyproject.toml)."""

PORTION_BYTES = 256 * 2**20
"""Maximum size, in bytes, of a message with weights to worker processes, for weights that are not in shared memory.

A tensor that is larger is a message of its own.
"""
EXPERT_WORKER = "qwen35_trainer.rollout.vllm_cpu_experts.ExpertWorker"
"""The class of vLLM's workers whose CPU kernels can divide experts. vLLM imports it by this name."""
REPLACEMENT_SECONDS = 600.0
"""Maximum time in which worker processes load all weights from shared memory, or one message with weights."""


@dataclass(frozen=True)
class NodePlace:
    """One of the nodes of a replica, and the place where the processes of all its nodes meet."""

    number: int = 0
    """0: the node of the engine core."""
    count: int = 1
    """Number of nodes of the replica, each with the same number of devices."""
    own_address: str = ""
    """The address at which the other nodes reach this one. Empty for a replica of one node, as the next one."""
    first_address: str = ""
    """The address of node 0."""
    port: int = 0
    """A free port of node 0."""


@dataclass(frozen=True)
class CoreSettings:
    """Settings of an engine core."""

    slots: int
    """Maximum number of sequences that are decoded concurrently."""
    max_length: int
    """Maximum length of a prompt and its response together, in tokens."""
    seed: int
    """Seed of the random numbers with which tokens are drawn."""
    memory_fraction: float
    """Share, 0 to 1, of the device's memory for weights and caches.

    On the CPU, it is the maximum share of the available memory for caches alone.
    """
    on_cpu: bool
    devices: int = 1
    """Tensor parallelism: the number of devices that share the weights.

    With more than one, each has a separate process.
    """
    node: NodePlace = NodePlace()
    """The node of this process, among those of the replica."""
    options: VLLMSpec = field(default_factory=VLLMSpec)
    """Options of the manifest."""
    sleeps: bool = False
    """Whether the engine gives its memory back while the train ranks compute on the same devices."""
    lora: LoRASpec | None = None
    """Settings of the adapters that train, for which vLLM keeps memory (vllm_adapters.py). None: all weights train."""
    picture_tokens: int = 0
    """Maximum number of tokens of the pictures of a prompt together.

    0: prompts have no pictures, and the vision tower is left out.
    """
    records_choices: bool = False
    """Whether tokens come with the experts that were chosen for them; only for a mixture of experts."""


def write_configuration(config: HFConfig, folder: Path, *, text_models: bool, pictures: bool = False) -> None:
    """Write a config.json to `folder` with which vLLM builds the trainer's model.

    The trainer ties the output layer to the embedding if `config.tie_word_embeddings` is true. vLLM reads this field
    from the configuration of the text model. In a vision-language model, the field may be absent or different there, so
    this function sets it.

    text_models: whether vLLM can build a text model alone; otherwise a text model is written as a part of a
    vision-language model. pictures: whether vLLM will read pictures, and must compute their positions as the trainer
    does.
    """
    written = copy.deepcopy(config)
    written.architectures = [CLASSES[config.model_type]]
    written.get_text_config().tie_word_embeddings = bool(config.tie_word_embeddings)
    if pictures:
        text = written.get_text_config()
        text.rope_parameters = position_settings(text)
    if not text_models and config.model_type in TEXT_MODEL_TYPES.values():
        written = vision_language(written)
    written.save_pretrained(folder)


def build_core(config: HFConfig, settings: CoreSettings) -> Core:
    """Build the engine core of a model, without the model's weights.

    vLLM gets a folder with the configuration alone, as `write_configuration` writes it. The core's weights have no meaning until
    `replace_weights`.

    config: the configuration of the trainer's model. Raises RuntimeError if vLLM cannot compute the model on this CPU.
    """
    with _configured(config, settings) as configuration:
        from vllm.v1.engine.llm_engine import LLMEngine
        from vllm.v1.executor import Executor

        executor = Executor.get_class(configuration)
        if settings.records_choices:
            executor = RecordingExecutor(executor, RouterSizes.of(config))
        core = LLMEngine(configuration, executor, log_stats=False, multiprocess_mode=False)
    if settings.records_choices:
        ChoiceTable(core.engine_core.engine_core.scheduler, RouterSizes.of(config)).attach()
    if settings.devices > 1:
        core.collective_rpc(join_replica, timeout=REPLACEMENT_SECONDS, args=(settings.on_cpu,))
    return core


class NodeWorkers:
    """The processes of the devices of a further node of a replica, which obey the engine core of node 0."""

    def __init__(self, executor: Core) -> None:
        """executor: vLLM's MultiprocExecutor, whose processes have started."""
        self._executor = executor

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds` until a process has ended. Returns whether one has."""
        return bool(wait([worker.proc.sentinel for worker in self._executor.workers], seconds))

    def close(self) -> None:
        """End the processes."""
        self._executor.shutdown()


def start_workers(config: HFConfig, settings: CoreSettings) -> NodeWorkers:
    """Start the processes of a further node of a replica, and return them when they are ready.

    They wait for those of the other nodes, with equal `config` and `settings`, except for `settings.node`. Call this function on a
    thread that lives as long as the processes: they end with it, once the engine core is built (`join_replica`).
    """
    with _configured(config, settings) as configuration:
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        return NodeWorkers(MultiprocExecutor(configuration, monitor_workers=False))


@contextlib.contextmanager
def _configured(config: HFConfig, settings: CoreSettings) -> Iterator[Any]:
    """Context manager: prepare this process for vLLM, and yield vLLM's configuration of the core.

    The configuration refers to files that exist in the body.
    """
    set_variables()
    if settings.node.count > 1:
        os.environ["VLLM_HOST_IP"] = settings.node.own_address
    if settings.on_cpu:
        reuse_freed_tensors()
    from vllm.engine.arg_utils import EngineArgs

    _quieten()
    if settings.on_cpu:
        check_processor(config)
        add_cpu_functions()
    if settings.picture_tokens:
        from qwen35_trainer.rollout.vllm_processor import register

        register()
    with tempfile.TemporaryDirectory() as name:
        pictures = settings.picture_tokens > 0
        write_configuration(config, Path(name), text_models=builds_text_models(), pictures=pictures)
        yield EngineArgs(**core_arguments(Path(name), config, settings)).create_engine_config()


def core_arguments(folder: Path, config: HFConfig, settings: CoreSettings) -> dict[str, Any]:
    """Return the arguments for vLLM's EngineArgs. config: the contents of the config.json in `folder`."""
    options = settings.options
    arguments: dict[str, Any] = {
        "model": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        **_pictures(config, settings),
        **_divided_experts(settings),
        **_nodes(settings.node),
        "dtype": "bfloat16",
        # As the trainer computes the states of Gated DeltaNet. By default, vLLM 0.23 rounds them unless config.json has a type.
        # extraArguments may set another type, as before this line was here.
        "mamba_ssm_cache_dtype": "float32",
        "seed": settings.seed,
        "max_model_len": settings.max_length,
        "max_num_seqs": settings.slots,
        **_step_tokens(settings),
        # The distribution that a token is drawn from, after temperature, min-p, top-k and top-p.
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": MAX_RETURNED_TOKENS,
        "tensor_parallel_size": settings.devices,
        "distributed_executor_backend": "uni" if settings.devices == 1 else "mp",
        # Samples of a prompt share its prefill in whole blocks. vllm.py keeps versions apart.
        "enable_prefix_caching": options.prefixCache,
        "enforce_eager": settings.on_cpu or options.eager,
        **_memory(config, settings),
        **_scheduling(settings),
    }
    if options.kvCachePrecision == "FP8":
        arguments["kv_cache_dtype"] = "fp8"
    # Not one of RESERVED_ARGUMENTS, because manifests that set it, without effect, must stay valid.
    sleep = {"enable_sleep_mode": True} if settings.sleeps and not settings.on_cpu else {}
    return arguments | _adapters(settings.lora) | options.extraArguments | sleep


def stepping(*, on_cpu: bool) -> contextlib.AbstractContextManager[object]:
    """Return the context manager in which the core's `step` must be called. on_cpu: whether the model is on the CPU.

    vLLM compiles a few small functions of its sampler at their first call. On the CPU this starts a C++ compiler, for
    half a minute on a busy machine, and gains nothing, so the functions run uncompiled there.
    """
    return torch.compiler.set_stance("force_eager") if on_cpu else contextlib.nullcontext()


def replace_weights(core: Core, weights: Mapping[str, Tensor], *, tied: bool) -> None:
    """Replace all weights in place between two steps. Running sequences keep their state.

    weights: the tensors of a publication, on the host or on the device. tied: whether the output layer is the input
    embedding. Worker processes of the core read weights from shared memory without a copy; weights that are elsewhere
    are copied to them in several messages. Raises ValueError, naming the parameters, if parameters of the model got no
    tensor; the core is unusable then.
    """

    def on_workers(function: Callable[..., object], *arguments: object) -> list[Any]:
        answers: list[Any] = core.collective_rpc(function, timeout=REPLACEMENT_SECONDS, args=arguments)
        return answers

    kind = model_type(core)
    on_workers(begin_replacement)
    if core.vllm_config.parallel_config.world_size == 1:
        on_workers(load_portion, for_vllm(weights, kind, tied=tied))
    elif isinstance(weights, HostWeights) and weights.is_shared:
        on_workers(load_shared, weights.on_all_nodes, tied)
    else:
        for portion in portions(for_vllm(weights, kind, tied=tied)):
            on_workers(load_portion, portion)
    missing = on_workers(finish_replacement)
    if names := sorted({name for of_worker in missing for name in of_worker}):
        raise ValueError(f"vLLM found no tensor for its parameters {names}")


def fall_asleep(core: Core, *, keep_weights: bool) -> MemoryChange:
    """Free the device memory of the core's weights and caches. The core must have no requests.

    keep_weights: whether the weights are kept in host memory (vLLM's level 1); otherwise they are lost (level 2).
    Returns the bytes in use on the core's devices before and after. Both include the memory of other processes, and
    memory that vLLM cannot free, such as that of its graphs.
    """
    before = sum(core.collective_rpc(memory_in_use, timeout=REPLACEMENT_SECONDS))
    core.sleep(level=1 if keep_weights else 2)
    return MemoryChange(before, sum(core.collective_rpc(memory_in_use, timeout=REPLACEMENT_SECONDS)))


def wake_up(core: Core) -> None:
    """Allocate the memory again that `fall_asleep` has freed.

    Caches are empty, and the values of lost weights are undefined.
    """
    core.wake_up()
    core.collective_rpc(restore_expert_layout, timeout=REPLACEMENT_SECONDS)


def portions(weights: Iterable[NamedTensor]) -> Iterator[list[NamedTensor]]:
    """Yield tensors in lists of at most PORTION_BYTES. A larger tensor is alone in its list.

    A tensor that is a view of a part of a larger tensor is copied, because pickling it would include the whole
    larger one.
    """
    portion: list[NamedTensor] = []
    size = 0
    for name, tensor in weights:
        if portion and size + tensor.nbytes > PORTION_BYTES:
            yield portion
            portion, size = [], 0
        is_part = tensor.untyped_storage().nbytes() != tensor.nbytes
        portion.append((name, tensor.clone() if is_part else tensor))
        size += tensor.nbytes
    if portion:
        yield portion


def _adapters(lora: LoRASpec | None) -> dict[str, Any]:
    if lora is None:
        return {}
    return {
        "enable_lora": True,
        "max_loras": 1,
        # A smaller rank is filled up with zeros.
        "max_lora_rank": next(rank for rank in ADAPTER_RANKS if rank >= lora.rank),
        "lora_target_modules": list(lora.targets),
    }


def _pictures(config: HFConfig, settings: CoreSettings) -> dict[str, Any]:
    if not settings.picture_tokens:
        return {"limit_mm_per_prompt": {"image": 0, "video": 0}}
    return picture_arguments(config, settings.picture_tokens, on_cpu=settings.on_cpu)


def _divided_experts(settings: CoreSettings) -> dict[str, Any]:
    divides = settings.on_cpu and settings.devices > 1 and settings.options.expert_parallel
    return {"worker_cls": EXPERT_WORKER} if divides else {}


def _nodes(node: NodePlace) -> dict[str, Any]:
    if node.count == 1:
        return {}
    place = {"master_addr": node.first_address, "master_port": node.port}
    return {"nnodes": node.count, "node_rank": node.number, **place}


def _step_tokens(settings: CoreSettings) -> dict[str, int]:
    """Return the argument for the maximum number of tokens of a step; nothing where vLLM's own default is used, on CPUs."""
    options, longest = settings.options, settings.slots * settings.max_length
    tokens = options.step_tokens(settings.slots, on_cpu=settings.on_cpu)
    if options.maxBatchedTokens is None:
        if settings.on_cpu and tokens == CPU_BATCHED_TOKENS:
            return {}
        # As vLLM does with its own default: without chunks a step has a whole prompt, and no step has more than all sequences.
        chunks = truth_of(options.extraArguments.get("enable_chunked_prefill", True)) is not False
        tokens = min(longest, tokens if chunks else max(tokens, settings.max_length))
    return {"max_num_batched_tokens": tokens}


def _scheduling(settings: CoreSettings) -> dict[str, bool]:
    """Return nothing, so that vLLM decides whether it schedules ahead, unless that gains nothing or has not been tested.

    With router replay on one device, a step's choices are copied from the device in this process before the next step
    can start. Scheduling ahead would then only assign the time of a step to the one before it.
    """
    gains_nothing = settings.records_choices and settings.devices == 1
    is_tested = settings.on_cpu or may_schedule_ahead()  # on CPUs vLLM itself switches it off
    return {"async_scheduling": False} if gains_nothing or not is_tested else {}


def _memory(config: HFConfig, settings: CoreSettings) -> dict[str, float]:
    if not settings.on_cpu:
        return {"gpu_memory_utilization": settings.memory_fraction}
    # vLLM would otherwise take a share of all memory, in each replica of the machine. Each process gets its part.
    size = cpu_cache_bytes(config, settings.slots, settings.max_length, settings.memory_fraction)
    return {"kv_cache_memory_bytes": -(-size // settings.devices)}


def _quieten() -> None:
    """Switch off log lines of vLLM that are useless for a run."""
    logging.getLogger("vllm").setLevel(logging.WARNING)
    # It warns at each replacement that rotary embeddings, which have no weights, got none. `replace_weights` checks the others.
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)

"""spec.rollout.vllm: options of the VLLM engine, and the arguments of vLLM that a manifest cannot set."""

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from qwen35_trainer.manifest.base import Section

KVCachePrecision = Literal["BF16", "FP8"]
ArgumentValue = Annotated[str, Field(max_length=1024)] | int | float | bool

BATCHED_TOKENS = 8192
"""Tokens of a step on accelerators by default, as in the published recipes. vLLM's own default for an engine without a server is 2048."""
CPU_BATCHED_TOKENS = 2048
"""vLLM's default of the tokens of a step (`SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS`), which is used on CPUs."""
EXPERT_PARALLEL = "enable_expert_parallel"
_TRUTH: TypeAdapter[bool] = TypeAdapter(bool)

_OWN = "use {} instead"
_LOADING = "the trainer publishes the weights, and nothing is loaded from files"
_ADAPTERS = "every sequence is generated with the adapters that train (spec.train.lora)"
_EXACT = "the version and the log-prob of each token would not be exact"
_DRAFTS = "the trainer publishes no weights of the drafting layers, and log-probs of drafted tokens have not been compared with its own"
_EXPERTS = "a publication is loaded to the places that the experts have at the start"
_PROCESSES = "the processes of a replica follow from spec.rollout.tensorParallel and spec.accelerator.devicesPerNode"

RESERVED_ARGUMENTS = {
    "model": _OWN.format("spec.model.source"),
    "tokenizer": _OWN.format("spec.model.source"),
    "skip_tokenizer_init": "sequences are tokens when they reach vLLM",
    "max_model_len": _OWN.format("spec.data.maxPromptTokens and maxResponseTokens"),
    "max_num_seqs": _OWN.format("spec.rollout.maxSequencesPerReplica"),
    "max_num_batched_tokens": _OWN.format("spec.rollout.vllm.maxBatchedTokens"),
    "gpu_memory_utilization": _OWN.format("spec.rollout.memoryFraction"),
    "kv_cache_memory_bytes": _OWN.format("spec.rollout.memoryFraction"),
    "kv_cache_dtype": _OWN.format("spec.rollout.vllm.kvCachePrecision"),
    "enable_prefix_caching": _OWN.format("spec.rollout.vllm.prefixCache"),
    "enforce_eager": _OWN.format("spec.rollout.vllm.eager"),
    "tensor_parallel_size": _OWN.format("spec.rollout.tensorParallel"),
    "seed": _OWN.format("spec.seed"),
    "dtype": "the engine computes in BF16",
    "quantization": "the trainer publishes BF16, which the replicas compute with",
    "load_format": _LOADING,
    "weight_transfer_config": _LOADING,
    "limit_mm_per_prompt": "it follows from the data and spec.data.maxPromptTokens",
    "logprobs_mode": _EXACT,
    "max_logprobs": "the engine returns as many log-probs as spec.rollout.topK needs",
    "scheduler_cls": _EXACT,
    "stream_interval": _EXACT,
    "enable_return_routed_experts": _OWN.format("spec.train.router.replay"),
    "watermark": _EXACT,
    "kv_sharing_fast_prefill": "the probe after a publication needs the log-probs of prompts",
    "speculative_config": _DRAFTS,
    "spec_method": _DRAFTS,
    "spec_model": _DRAFTS,
    "spec_tokens": _DRAFTS,
    "enable_lora": _OWN.format("spec.train.lora"),
    "max_loras": _ADAPTERS,
    "max_lora_rank": _OWN.format("spec.train.lora.rank"),
    "lora_dtype": _ADAPTERS,
    "lora_target_modules": _OWN.format("spec.train.lora.targets"),
    "default_mm_loras": _ADAPTERS,
    "enable_tower_connector_lora": _ADAPTERS,
    "enable_eplb": _EXPERTS,
    "eplb_config": _EXPERTS,
    "enable_elastic_ep": _EXPERTS,
    "pipeline_parallel_size": _PROCESSES,
    "prefill_context_parallel_size": _PROCESSES,
    "decode_context_parallel_size": _PROCESSES,
    "data_parallel_size": "each replica schedules alone; use spec.rollout.nodes instead",
    "nnodes": _PROCESSES,
    "node_rank": _PROCESSES,
    "master_addr": _PROCESSES,
    "master_port": _PROCESSES,
    "distributed_executor_backend": _PROCESSES,
    "worker_cls": _PROCESSES,
    "worker_extension_cls": _PROCESSES,
}
"""Argument of vLLM's engine → the reason why extraArguments cannot set it."""


class VLLMSpec(Section):
    """Options of the VLLM engine. All other settings of spec.rollout apply to every engine."""

    maxBatchedTokens: int | None = Field(
        None,
        ge=1,
        le=1_048_576,
        description="Maximum number of tokens that a step computes; at least rollout.maxSequencesPerReplica. Longer prompts "
        "are computed in chunks, between which other sequences continue. Default: 8192 on accelerators, as in the published recipes, and 2048 with profile CPU, or "
        "rollout.maxSequencesPerReplica if that is more. verl: actor_rollout_ref.rollout.max_num_batched_tokens.",
    )
    eager: bool = Field(
        False,
        description="Start each kernel on its own instead of recording the steps as CUDA graphs: it starts faster and takes "
        "less memory, and generates more slowly. With profile CPU, steps are always eager. Default false, as in verl. "
        "verl: actor_rollout_ref.rollout.enforce_eager.",
    )
    kvCachePrecision: KVCachePrecision = Field(
        "BF16",
        description="Type of the stored keys and values. FP8 halves their memory and rounds them, which changes log-probs; "
        "not with profile CPU. Default BF16, which the trainer computes with. verl: none.",
    )
    prefixCache: bool = Field(
        True,
        description="Compute the prompt of a group once, in whole blocks of the cache. Blocks of older weights are never "
        "used. Default true: without it, each sample computes its prompt. verl: "
        "actor_rollout_ref.rollout.enable_prefix_caching.",
    )
    extraArguments: dict[Annotated[str, Field(min_length=1, max_length=128)], ArgumentValue] = Field(
        default_factory=dict,
        max_length=64,
        description="Further arguments of vLLM's engine, under the names of its class EngineArgs, such as "
        "long_prefill_token_threshold. Names are checked against the installed version when the training starts; arguments that this "
        "project sets itself are refused. Default: none. verl: actor_rollout_ref.rollout.engine_kwargs.",
    )

    def step_tokens(self, slots: int, *, on_cpu: bool) -> int:
        """Return the maximum number of tokens that a step computes. slots: maximum number of sequences, each with a token in a step."""
        return self.maxBatchedTokens or max(CPU_BATCHED_TOKENS if on_cpu else BATCHED_TOKENS, slots)

    @property
    def expert_parallel(self) -> bool:
        """Whether each expert is on one device of a replica (vLLM's enable_expert_parallel).

        False if extraArguments do not contain the argument, or its value is neither true nor false.
        """
        return bool(truth_of(self.extraArguments.get(EXPERT_PARALLEL, False)))


def truth_of(value: str | float | bool) -> bool | None:
    """Return the boolean that vLLM's options, which are pydantic models, read from a value;
    None if pydantic rejects the value.

    The texts "false", "off", "no" and "0" are false, although Python's bool() of them is True.
    """
    try:
        return _TRUTH.validate_python(value)
    except ValidationError:
        return None

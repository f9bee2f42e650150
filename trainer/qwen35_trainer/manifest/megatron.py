"""spec.train.overrideTransformerConfig: the settings of megatron-core's TransformerConfig that a manifest cannot set."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Final

from pydantic import Field

FIELD: Final = "spec.train.overrideTransformerConfig"

SettingName = Annotated[str, Field(min_length=1, max_length=128)]
SettingValue = Annotated[str, Field(max_length=1024)] | int | float | bool

_DEGREES = "spec.train.parallelism"
_HEAD = "spec.train.multiTokenPrediction"

_FIELDS = {
    "tensor_model_parallel_size": f"{_DEGREES}.tensor",
    "pipeline_model_parallel_size": f"{_DEGREES}.pipeline",
    "virtual_pipeline_model_parallel_size": f"{_DEGREES}.virtualPipeline",
    "context_parallel_size": f"{_DEGREES}.context",
    "expert_model_parallel_size": f"{_DEGREES}.expert",
    "expert_tensor_parallel_size": f"{_DEGREES}.expertTensor",
    "fp16": "spec.model.precision",
    "bf16": "spec.model.precision",
    "fp8": "spec.model.precision",
    "fp8_param": "spec.model.precision",
    "fp4": "spec.model.precision",
    "fp4_param": "spec.model.precision",
    "params_dtype": "spec.model.precision",
    "pipeline_dtype": "spec.model.precision",
    "enable_autocast": "spec.model.precision",
    "autocast_dtype": "spec.model.precision",
    "fp32_residual_connection": "spec.model.precision",
    "recompute_granularity": "spec.train.activationCheckpointing",
    "recompute_method": "spec.train.activationCheckpointing",
    "recompute_num_layers": "spec.train.activationCheckpointing",
    "recompute_modules": "spec.train.activationCheckpointing",
    "moe_layer_recompute": "spec.train.activationCheckpointing",
    "cpu_offloading": "spec.train.offload",
    "cpu_offloading_num_layers": "spec.train.offload",
    "cpu_offloading_activations": "spec.train.offload",
    "cpu_offloading_weights": "spec.train.offload",
    "cpu_offloading_double_buffering": "spec.train.offload",
    "cpu_offloading_retain_pinned_cpu_buffers": "spec.train.offload",
    "moe_router_load_balancing_type": "spec.train.router.loadBalancingLoss",
    "moe_aux_loss_coeff": "spec.train.router.loadBalancingLoss",
    "moe_z_loss_coeff": "spec.train.router.zLoss",
    "moe_enable_routing_replay": "spec.train.router.replay",
    "mtp_num_layers": _HEAD,
    "mtp_loss_scaling_factor": f"{_HEAD}.lossWeight",
    "mtp_detach_heads": f"{_HEAD}.detached",
}
"""Setting → the field of the manifest with the same meaning."""

_REASONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (f"it follows from {_DEGREES}.tensor", ("sequence_parallel",)),
    (
        f"it follows from {_DEGREES}.pipeline and the model's number of layers",
        (
            *("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
            *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
            *("pipeline_model_parallel_layout", "microbatch_group_size_per_vp_stage", "mtp_standalone"),
        ),
    ),
    (
        f"it follows from {_DEGREES}.virtualPipeline",
        ("overlap_p2p_comm", "batch_p2p_comm", "overlap_p2p_comm_warmup_flush"),
    ),
    (
        f"it belongs to context parallelism; use {_DEGREES}.context instead",
        (
            *("hierarchical_context_parallel_sizes", "hybrid_context_parallel", "max_seqlen_per_dp_cp_rank"),
            "cp_comm_type",
        ),
    ),
    (
        f"the engine divides weights only as {_DEGREES} says",
        (
            *("tensor_parallel_num_weight_shards", "gtp_weight_remat_size"),
            *("expert_tensor_parallel_num_weight_shards", "expert_gtp_weight_remat_size"),
        ),
    ),
    (
        "it follows from config.json in the model's folder (spec.model.source)",
        (
            *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size"),
            *("layernorm_epsilon", "activation_func", "linear_attention_freq", "linear_conv_kernel_dim"),
            *("linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads"),
            *("num_moe_experts", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_router_topk"),
        ),
    ),
    (
        "the trainer has to compute the same model as the replicas, which is that of config.json (spec.model.source)",
        (
            *("normalization", "layernorm_zero_centered_gamma", "qk_layernorm", "qk_l2_norm", "qk_clip"),
            *("attention_output_gate", "experimental_attention_variant", "multi_latent_attention", "softmax_scale"),
            *("softmax_type", "apply_query_key_layer_scaling", "window_size", "window_attn_skip_freq", "no_rope_freq"),
            *("rotary_interleaved", "mrope_section", "gated_linear_unit", "glu_linear_offset", "add_bias_linear"),
            *("activation_func_clamp_value", "add_qkv_bias", "apply_residual_connection_post_layernorm"),
            *("is_hybrid_model", "heterogeneous_block_specs", "use_mup", "mtp_use_repeated_layer"),
            *("mtp_hybrid_override_pattern", "moe_layer_freq", "moe_latent_size", "moe_shared_expert_gate"),
            *("moe_router_pre_softmax", "moe_router_score_function", "moe_router_topk_scaling_factor"),
            *("moe_router_num_groups", "moe_router_group_topk", "moe_router_topk_limited_devices"),
            *("moe_router_enable_expert_bias", "moe_router_quantile_balancing_ema", "moe_router_force_biased"),
            *("moe_router_force_load_balancing", "moe_apply_probs_on_input", "moe_expert_capacity_factor"),
            *("moe_expert_rank_capacity_factor", "moe_token_dropping", "moe_pad_expert_input_to_capacity"),
        ),
    ),
    (
        "a token must have the same log-prob each time it is computed",
        ("hidden_dropout", "attention_dropout", "moe_input_jitter_eps"),
    ),
    ("attention computes its softmax in float32", ("attention_softmax_in_fp32",)),
    ("routers compute in float32", ("moe_router_dtype",)),
    (
        "it is alltoall, because others need sequences of one length or further packages",
        ("moe_token_dispatcher_type",),
    ),
    (
        "the weights are read from the model's folder (spec.model.source)",
        (
            *("perform_initialization", "use_cpu_initialization", "init_model_with_meta_device", "init_method"),
            *("init_method_std", "output_layer_init_method", "embedding_init_method", "embedding_init_method_std"),
        ),
    ),
    (
        "the engine has its own norm, in which it has no effect",
        ("persist_layer_norm", "memory_efficient_layer_norm", "fused_residual_rmsnorm"),
    ),
    (
        "the engine computes log-probs itself, so it has no effect",
        ("cross_entropy_loss_fusion", "cross_entropy_fusion_impl"),
    ),
    (
        "the engine computes one expert after another, so it has no effect",
        ("moe_grouped_gemm", "moe_single_grouped_weight", "moe_single_grouped_bias"),
    ),
    ("the engine uses the layers of Transformer Engine where this package is installed", ("transformer_impl",)),
    ("the engine's losses are shares of a sum over tokens", ("calculate_per_token_loss",)),
    ("the engine's micro-batches have different lengths", ("variable_seq_lengths",)),
    ("it needs another pipeline schedule than the engine's", ("overlap_moe_expert_parallel_comm",)),
)
"""(reason, settings that a manifest cannot set for this reason)."""

RESERVED_SETTINGS: Final[Mapping[str, str]] = {
    **{name: f"use {field} instead" for name, field in _FIELDS.items()},
    **{name: reason for reason, names in _REASONS for name in names},
}
"""Field of TransformerConfig → the reason why overrideTransformerConfig cannot set it.

The table has what the engine derives from the manifest or from the model's folder, what other parts of the engine depend on, and
what would make the trained model differ from the one that the replicas compute.
"""


def reserved(settings: Mapping[str, SettingValue]) -> Iterator[tuple[str, str]]:
    """Yield each name of `settings` that a manifest cannot set, with the reason."""
    for name in settings:
        if (reason := RESERVED_SETTINGS.get(name.replace("-", "_"))) is not None:
            yield name, reason

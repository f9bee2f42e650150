"""megatron-core's configuration: the sizes of a published model, and the degrees of parallelism of a manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from typing import Any, get_args

import torch
from megatron.core.transformer import TransformerConfig
from torch.nn import functional as F

from qwen35_trainer.engines.megatron.layout import Layout, stage_sizes
from qwen35_trainer.engines.megatron.pictures import sections
from qwen35_trainer.manifest.megatron import SettingValue
from qwen35_trainer.models.qwen3_5.classes import HFConfig
from qwen35_trainer.models.qwen3_5.qwen3_moe import MODEL_TYPE

FUSIONS: Mapping[str, SettingValue] = {
    "gradient_accumulation_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
}
"""Settings of the engine that a manifest may change: kernels that join several operations. Some need further packages."""


def transformer_config(
    model: HFConfig,
    layout: Layout,
    precision: torch.dtype,
    *,
    recompute: bool = False,
    with_head: bool = False,
    overrides: Mapping[str, SettingValue] | None = None,
) -> TransformerConfig:
    """Return megatron-core's configuration of a text model, divided over ranks by `layout`.

    model: the configuration of a text model in transformers. precision: type of the computation. recompute: whether the
    backward pass computes the activations of each layer again. with_head: whether the model has its head for multi-token
    prediction. overrides: further settings, `overrideTransformerConfig` of the manifest.
    """
    is_qwen3 = model.model_type == MODEL_TYPE
    first, last = stage_sizes(model.num_hidden_layers, layout.pipeline, layout.virtual)
    interleaved = layout.virtual > 1
    return TransformerConfig(
        num_layers=model.num_hidden_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_key_value_heads,
        kv_channels=model.head_dim,
        layernorm_epsilon=model.rms_norm_eps,
        normalization="RMSNorm",
        layernorm_zero_centered_gamma=not is_qwen3,
        qk_layernorm=True,
        attention_output_gate=not is_qwen3,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        mrope_section=sections(model),
        **({} if is_qwen3 else _linear_attention(model)),
        tensor_model_parallel_size=layout.tensor,
        sequence_parallel=layout.sequence,
        pipeline_model_parallel_size=layout.pipeline,
        num_layers_in_first_pipeline_stage=first,
        # Of two stages with virtual stages, megatron-core cannot take both numbers: it divides by the number of stages between them.
        num_layers_in_last_pipeline_stage=None if layout.pipeline == 2 else last,
        virtual_pipeline_model_parallel_size=layout.virtual if interleaved else None,
        # With two stages, each is both before and after the other: what a batch of sends and receives moves would be mixed up.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        params_dtype=precision,
        pipeline_dtype=precision,
        bf16=precision == torch.bfloat16,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # noqa: S106  # the default does not take sequences of different lengths
        calculate_per_token_loss=True,  # gradients are summed: losses are shares of a sum (`UpdatingEngine`)
        use_cpu_initialization=True,
        perform_initialization=False,
        persist_layer_norm=False,
        recompute_granularity="full" if recompute else None,
        recompute_method="uniform" if recompute else None,
        recompute_num_layers=1 if recompute else None,
        mtp_num_layers=1 if with_head else None,
        **(_experts(model) if hasattr(model, "num_experts") else {"ffn_hidden_size": model.intermediate_size}),
        **_with_members({**FUSIONS, **(overrides or {})}),
    )


def _with_members(settings: Mapping[str, SettingValue]) -> dict[str, Any]:
    """Return the settings, with the members of enumerations in place of their names."""
    types = {field.name: field.type for field in fields(TransformerConfig)}
    return {name: _member(types[name], value) for name, value in settings.items()}


def _member(annotation: object, value: SettingValue) -> Any:  # noqa: ANN401  # any member
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, Enum) and value in kind.__members__:
            return kind[str(value)]
    return value


def _linear_attention(model: HFConfig) -> dict[str, Any]:
    return {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [int(kind == "linear_attention") for kind in model.layer_types],
        "linear_conv_kernel_dim": model.linear_conv_kernel_dim,
        "linear_key_head_dim": model.linear_key_head_dim,
        "linear_value_head_dim": model.linear_value_head_dim,
        "linear_num_key_heads": model.linear_num_key_heads,
        "linear_num_value_heads": model.linear_num_value_heads,
    }


def _experts(model: HFConfig) -> dict[str, Any]:
    shared = getattr(model, "shared_expert_intermediate_size", None)
    return {
        "ffn_hidden_size": model.moe_intermediate_size,
        "num_moe_experts": model.num_experts,
        "moe_ffn_hidden_size": model.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": shared,
        "moe_shared_expert_gate": shared is not None,
        "moe_router_topk": model.num_experts_per_tok,
        "moe_router_pre_softmax": False,  # the softmax of the chosen experts, which equals the renormalised softmax of all
        "moe_router_score_function": "softmax",
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }

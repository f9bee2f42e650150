"""The classes of a model's layers for megatron-core.

| devices | linear layers, attention | norms | experts |
|---|---|---|---|
| GPUs, with Transformer Engine installed | Transformer Engine's | `norm.py` | one after the other |
| NPUs | megatron-core's own ("local"), whose attention MindSpeed has replaced by `npu_fusion_attention` | `norm.py` | one after the other |
| others | the same, with the attention of `attention.py` | `norm.py` | one after the other |

On NPUs, Transformer Engine's classes are not used, even if they can be imported: MindSpeed puts modules of this name in their place.

Norms are separate modules with and without Transformer Engine, so that parameters have the same names in both cases.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor

from qwen35_trainer.engines import accelerator_libraries
from qwen35_trainer.engines.megatron.attention import CausalAttention
from qwen35_trainer.engines.megatron.gated_delta_net import GatedDeltaNet
from qwen35_trainer.engines.megatron.norm import RMSNorm
from qwen35_trainer.engines.megatron.router_losses import RouterLosses, RouterWithLosses
from qwen35_trainer.engines.megatron.router_replay import ReplayingLayer, ReplayingRouter

FULL_ATTENTION = "full_attention"
"""Value of `layer_types` in config.json for a layer with full attention. All other layers are Gated DeltaNets."""


def stage_layers(
    config: TransformerConfig,
    layer_types: list[str],
    virtual_stage: int | None,
    router_losses: RouterLosses | None = None,
) -> TransformerBlockSubmodules:
    """Return the classes of the layers of this rank's pipeline stage, or of one of its virtual stages.

    layer_types: the kind of each layer of the whole model. virtual_stage: number of the virtual stage; None: the stage has only one.
    router_losses: where the routers add their losses; None: they have none.
    """
    first = get_transformer_layer_offset(config, virtual_stage)
    count = get_num_layers_to_build(config, virtual_stage)
    specs = [_layer(config, kind, router_losses) for kind in layer_types[first : first + count]]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm)


class HeadLayer(MultiTokenPredictionLayer):
    """The layer of the head for multi-token prediction, which computes its activations again in megatron-core 0.18, too.

    There, the method below gets a mask of the padding, for which it has no parameter. The mask is for the losses of routers,
    which the head does not have.
    """

    def _checkpointed_forward(self, *, padding_mask: None = None, **inputs: Any) -> Tensor:  # noqa: ANN401  # megatron-core's
        assert padding_mask is None
        output: Tensor = super()._checkpointed_forward(**inputs)
        return output


def head_layers(config: TransformerConfig) -> MultiTokenPredictionBlockSubmodules:
    """Return the classes of the head for multi-token prediction.

    Its router has no losses: those of `train.router` are of the model's own layers.
    """
    parts = MultiTokenPredictionLayerSubmodules(
        enorm=RMSNorm,
        hnorm=RMSNorm,
        layer_norm=RMSNorm,
        eh_proj=_backend().column_parallel_linear(),
        mtp_model_layer=_layer(config, FULL_ATTENTION),
    )
    return MultiTokenPredictionBlockSubmodules([ModuleSpec(module=HeadLayer, submodules=parts)])


class _TorchSpecProvider(LocalSpecProvider):
    """The layers of megatron-core without Transformer Engine, with PyTorch's attention."""

    def core_attention(self) -> type[CausalAttention]:
        return CausalAttention


def _backend() -> LocalSpecProvider:
    if accelerator_libraries.has_mindspeed():
        return LocalSpecProvider()
    return TESpecProvider() if HAVE_TE else _TorchSpecProvider()


def _layer(config: TransformerConfig, kind: str, router_losses: RouterLosses | None = None) -> ModuleSpec:
    backend = _backend()
    column, row = backend.column_parallel_linear(), backend.row_parallel_linear()
    if config.num_moe_experts is None:
        mlp = partial(MLP.as_mlp_submodule, submodules=MLPSubmodules(linear_fc1=column, linear_fc2=row))
    else:
        mlp = _experts(backend, config.num_moe_experts, router_losses)
    if kind == FULL_ATTENTION:
        mixer = ModuleSpec(
            module=SelfAttention,
            params={"attn_mask_type": AttnMaskType.causal},
            submodules=SelfAttentionSubmodules(
                linear_qkv=column,
                core_attention=backend.core_attention(),
                linear_proj=row,
                q_layernorm=RMSNorm,
                k_layernorm=RMSNorm,
            ),
        )
    else:
        parts = GatedDeltaNetSubmodules(in_proj=column, out_proj=row)
        mixer = ModuleSpec(module=GatedDeltaNet, submodules=parts)
    return ModuleSpec(
        module=TransformerLayer if config.num_moe_experts is None else ReplayingLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=mixer,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _experts(backend: LocalSpecProvider, experts: int, router_losses: RouterLosses | None) -> partial[Any]:
    parts = get_moe_module_spec_for_backend(backend, experts, moe_grouped_gemm=False).keywords["submodules"]
    router = ReplayingRouter if router_losses is None else partial(RouterWithLosses, losses=router_losses)
    return partial(MoELayer, submodules=replace(parts, router=router))

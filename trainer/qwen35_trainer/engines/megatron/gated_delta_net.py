"""A Gated DeltaNet layer with tensor parallelism. Its results are those of the FSDP engine's layer.

megatron-core has a Gated DeltaNet layer, too, which is not used for three reasons:
- It stores and exponentiates `A_log` in the model's precision. Here `A_log` and the weight of the norm are float32, as
  in published files (`models/qwen3_5/precision.py`).
- Without sequence parallelism, it does not sum the gradient of the gated norm over tensor-parallel ranks.
- It needs flash-linear-attention on every device. Here the kernels are those of `models/qwen3_5`.

Shapes: s positions, b sequences, D hidden channels; and on one rank C convolution channels, H value heads, G key heads,
K channels of a key, V channels of a value.
"""

from __future__ import annotations

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn
from torch.nn import functional as F

from qwen35_trainer.models.qwen3_5 import convolution, kernels, npu_delta_rule


class GatedDeltaNet(MegatronModule):
    """The mixer of a linear-attention layer, for one tensor-parallel rank.

    Each rank has an equal number of key heads, and the value heads that use them. The output channels of the rank's
    `in_proj` are queries, keys, values, output gates, write strengths and decays, in this order.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: GatedDeltaNetSubmodules,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        **_: object,
    ) -> None:
        super().__init__(config)
        ranks = pg_collection.tp.size()
        self.layer_number, self._group = layer_number, pg_collection.tp
        self._key_channels, self._value_channels = config.linear_key_head_dim, config.linear_value_head_dim
        self._heads = config.linear_num_value_heads // ranks
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        values = config.linear_num_value_heads * config.linear_value_head_dim
        self._keys, self._values = keys // ranks, values // ranks
        shared = {"config": config, "bias": False, "is_expert": False, "tp_group": pg_collection.tp}
        self.in_proj = submodules.in_proj(
            config.hidden_size,
            2 * keys + 2 * values + 2 * config.linear_num_value_heads,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            **shared,
        )
        self.out_proj = submodules.out_proj(
            values,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **shared,
        )
        channels = 2 * self._keys + self._values
        device, precision = torch.cuda.current_device(), config.params_dtype
        self.conv1d = nn.Conv1d(
            channels,
            channels,
            config.linear_conv_kernel_dim,
            groups=channels,
            bias=False,
            device=device,
            dtype=precision,
        )
        self.dt_bias = nn.Parameter(torch.ones(self._heads, device=device, dtype=precision))
        self.A_log = nn.Parameter(torch.zeros(self._heads, device=device, dtype=torch.float32))
        self.norm_weight = nn.Parameter(torch.ones(self._value_channels, device=device, dtype=torch.float32))
        for parameter in (self.conv1d.weight, self.dt_bias, self.A_log):
            parameter.tensor_model_parallel, parameter.partition_dim = True, 0  # type: ignore[attr-defined]

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **_: object) -> tuple[Tensor, None]:
        """Compute the layer for b right-padded sequences, each starting from an empty state.

        hidden_states: (s, b, D), s positions and D channels; with sequence parallelism, s is this rank's part of the
        positions. Returns a tensor of the same shape, and None in place of a bias.
        """
        projected, _bias = self.in_proj(hidden_states)
        sizes = (2 * self._keys + self._values, self._values, self._heads, self._heads)
        mixed, gate, beta, alpha = projected.transpose(0, 1).split(sizes, dim=-1)
        beta = beta.float().sigmoid()
        log_decay = -self.A_log.float().exp() * F.softplus(alpha.float() + self.dt_bias)
        output = self._mix(mixed.contiguous(), log_decay, beta).type_as(mixed)
        normed = self._gated_norm(output, gate.unflatten(-1, (-1, self._value_channels)))
        return self.out_proj(normed.flatten(-2).transpose(0, 1).contiguous())[0], None

    def _mix(self, mixed: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
        """Compute the convolution and the delta rule of b sequences of s positions.

        mixed: (b, s, channels). log_decay, beta: (b, s, value heads). Returns (b, s, value heads, channels of a value).
        """
        filters = self.conv1d.weight.squeeze(1)
        if kernels.has_delta_rule(mixed):
            query, key, value = self._split(kernels.convolution(mixed, filters, None))
            return kernels.delta_rule(query, key, value, log_decay, beta, None)
        query, key, value = self._split(convolution.convolve(mixed, filters))
        return npu_delta_rule.outputs(query, key, value, log_decay, beta)

    def _split(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split (b, s, C) into query and key (b, s, G, K) and value (b, s, H, V)."""
        query, key, value = mixed.split((self._keys, self._keys, self._values), dim=-1)
        query, key = (x.unflatten(-1, (-1, self._key_channels)) for x in (query, key))
        return query, key, value.unflatten(-1, (-1, self._value_channels))

    def _gated_norm(self, output: Tensor, gate: Tensor) -> Tensor:
        """Compute the norm of each head, times silu(gate), in float32, rounded once at the end. output,
        gate: (b, s, H, V).
        """
        # All ranks have the same weight and different heads: this sums the gradient over the ranks.
        weight = copy_to_tensor_model_parallel_region(self.norm_weight, group=self._group)
        normed = F.rms_norm(output.float(), output.shape[-1:], weight.float(), self.config.layernorm_epsilon)
        return (normed * F.silu(gate.float())).type_as(output)

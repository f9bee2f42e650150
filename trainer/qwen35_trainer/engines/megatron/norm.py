"""The RMS norm of the Megatron engine. It does not use Transformer Engine, and gives the results of the FSDP engine's norm."""

from __future__ import annotations

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    """RMS norm over the last dimension, with the factor 1 + `weight` (Qwen3.5) or `weight` (Qwen3). It is computed in
    float32 and rounded once at the end.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: object) -> None:
        super().__init__()
        self.eps, self._added = eps, 1.0 if config.layernorm_zero_centered_gamma else 0.0
        self.weight = nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        # With sequence parallelism each rank has the gradient of its own tokens only, so Megatron sums it over the ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self._added + self.weight.float(), self.eps).type_as(x)

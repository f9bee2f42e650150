"""The attention of a full-attention layer, for megatron-core's layers without Transformer Engine and MindSpeed.

megatron-core's own attention holds the scores of all positions against all positions, several times. PyTorch's kernels hold
none. Every sequence is padded on the right, where causal attention does not see the padding, so no further mask is needed.
"""

from __future__ import annotations

from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor, nn
from torch.nn import functional as F


class CausalAttention(nn.Module):
    """Causal attention of padded sequences, by PyTorch's `scaled_dot_product_attention`."""

    def __init__(self, *, attn_mask_type: AttnMaskType, softmax_scale: float | None = None, **_: object) -> None:
        super().__init__()
        assert attn_mask_type is AttnMaskType.causal
        assert softmax_scale is None, "the scale is 1 / √channels"

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **others: object
    ) -> Tensor:
        """Compute the output of all heads, (s, b, heads · channels).

        query: (s, b, heads, channels), s positions of b sequences. key, value: (s, b, key/value heads, channels).
        attention_mask: None. others: arguments of megatron-core for biases and packed sequences, which are None, and the
        type of the mask, which is causal.
        """
        assert attention_mask is None
        assert others.get("attention_bias") is None
        assert others.get("packed_seq_params") is None
        query, key, value = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return mixed.permute(2, 0, 1, 3).flatten(2)

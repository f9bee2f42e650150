"""Router replay in a model of megatron-core: how the experts that the rollout chose reach the routers.

    micro-batch ─► StageModel.inputs ─► TransformerBlock ─► ReplayingLayer ─► ReplayingRouter ─► weights of these experts
                   this rank's part,          │                  ▲
                   by layer                   └─ backward pass ──┘
                                                 calls the layer again, with the same arguments (activationCheckpointing)

A pipeline stage computes further micro-batches before the backward pass of the first one, which may compute each layer again.
So the experts are an argument of each call of a layer, and known to the router only while its layer computes. The argument is
`attention_bias`: megatron-core gives it to all layers of a block, in both calls and without a look at it, and no attention here
has a bias. (`padding_mask` reaches even the routers, but is converted to bool.) The layer of the head for multi-token prediction is
not in the block, so its router always chooses.

megatron-core has `RouterReplay` (setting `moe_enable_routing_replay`), too, which is not used for three reasons:
- It has one list of all routers of the process, in the order of their creation. Those of the reference model and of the head are in it.
- All routers must be switched before each forward and each backward pass of a micro-batch. Its own pipeline schedules do not switch
  them, and call nothing of ours before a backward pass.
- It replays all tokens or none. Here routers choose for padding, and for tokens whose choices are not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from qwen35_trainer.data.expert_choices import NO_CHOICE

REPLAYED: Final = "attention_bias"
"""The argument of a block and of its layers that has the experts, as LayerChoices."""

type LayerChoices = Mapping[int, Tensor]
"""Number of a layer, where 1 is the first layer of the whole model → (s, b, k) int16: the experts for the s positions that this rank's
layers get of b sequences, and NO_CHOICE (-1) where the router chooses. The layers are those of this stage."""


class ReplayingRouter(TopKRouter):
    """A router that computes tokens with experts that were chosen before. The weights of these experts are its own.

    Shapes: s positions that this rank holds of b sequences, E experts, k of them for each token.
    """

    replayed: Tensor | None = None
    """(s, b, k), as in LayerChoices, while the layer computes; None: this router chooses for all tokens."""

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the weights of each token's experts, and which they are.

        logits: (s, b, E) float32. padding_mask: not used. Returns weights (s·b, E), which add up to 1 over k experts and are 0
        for the others, and choices (s·b, E) bool, true for these k.
        """
        if self.replayed is None:
            return super().routing(logits, padding_mask)
        flat, replayed = logits.flatten(0, 1), self.replayed.flatten(0, 1)
        chosen = torch.where(replayed == NO_CHOICE, flat.topk(self.topk, dim=-1).indices, replayed.long())
        # As megatron-core computes them for its own choice: the softmax of the logits of the chosen experts.
        weights = torch.zeros_like(flat).scatter(-1, chosen, flat.gather(-1, chosen).softmax(-1))
        return weights, torch.zeros_like(flat, dtype=torch.bool).scatter(-1, chosen, True)


class ReplayingLayer(TransformerLayer):
    """A layer with a ReplayingRouter."""

    def forward(self, *inputs: Any, attention_bias: LayerChoices | None = None, **options: Any) -> Any:  # noqa: ANN401  # megatron-core's
        """Compute the layer. attention_bias: the experts to replay; None: the router chooses. Others: as of TransformerLayer."""
        router = self.mlp.router
        router.replayed = None if attention_bias is None else attention_bias[self.layer_number]
        try:
            return super().forward(*inputs, **options)
        finally:
            router.replayed = None

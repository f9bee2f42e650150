"""The losses of routers in a model of megatron-core, and their gradients.

    hidden states ─► router ─► weights of the chosen experts ─► experts ─► … ─► last stage: loss
                       └─► losses of this layer ─► attached to those weights: the backward pass adds their gradient
                                └─► sums of this rank ─► all ranks of a share: metrics

For an update of T input tokens, over all ranks, both engines minimise, in addition to the objective,

    1/T · Σ_layers Σ_sequences ( a · t · E · Σ_e f_e · P_e  +  b · Σ_tokens (log Σ_e exp logit_e)² )

a, b: loadBalancingLoss and zLoss. t: tokens of the sequence, without padding. E, f_e and P_e are defined, with the sources, in
`models/qwen3_5/router.py`, which computes the sums (Switch Transformer, arXiv:2101.03961, eq. 4-6, for each sequence; ST-MoE,
arXiv:2202.08906, eq. 5).

A rank attaches the part of its own tokens, divided by T. Gradients of parts are summed, never averaged: over micro-batches, over
tensor-parallel ranks, which hold different tokens of a sequence (sequence parallelism), and over data-parallel ranks
(`calculate_per_token_loss`, with which megatron-core scales attached losses by 1).

megatron-core has such losses, too: `moe_z_loss_coeff` is b, and `moe_aux_loss_coeff` with one of three
`moe_router_load_balancing_type` is similar to a. Of sequences of one length, `seq_aux_loss` is the same as here. In general all
three depend on the division into micro-batches and ranks, and are not used:

    aux_loss           balances the tokens of a micro-batch
    global_aux_loss    counts the choices of the micro-batches so far, of all data-parallel ranks
    seq_aux_loss       takes the mean length of a micro-batch's sequences for the length of each; with padding, weighs the parts
                       of tensor-parallel ranks by their own numbers of real tokens
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor

from qwen35_trainer.engines.megatron.router_replay import ReplayingRouter
from qwen35_trainer.models.qwen3_5 import router
from qwen35_trainer.models.qwen3_5.router import Membership


class RouterLosses:
    """The sums of the losses that the routers of this rank have computed in an update."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(2, device=device)
        """(2,) float32: load-balancing loss and z loss, summed over the tokens and layers of this rank."""
        self._part_of_loss: Callable[[Tensor], Tensor] = Tensor.sum

    def begin(self, part_of_loss: Callable[[Tensor], Tensor]) -> None:
        """Begin an update.

        part_of_loss: returns what sums of losses, (2,), add to the loss of the update. It is kept until the next update, so it must
        hold neither the batch nor the engine: the engine's optimizer holds the model through autograd, in a cycle that Python's
        garbage collector cannot see.
        """
        self.sums, self._part_of_loss = torch.zeros_like(self.sums), part_of_loss

    def add(self, losses: Tensor) -> Tensor:
        """Add the losses of a micro-batch in one layer, and return their part of the update's loss.

        losses: (2,) float32, summed over the tokens that this rank holds.
        """
        self.sums += losses.detach()
        return self._part_of_loss(losses)


class RouterWithLosses(ReplayingRouter):
    """A router whose losses train the model. With router replay, they count the experts that are computed.

    Shapes: s positions that this rank holds of b sequences, E experts.
    """

    def __init__(self, *, losses: RouterLosses, **options: Any) -> None:  # noqa: ANN401  # megatron-core's
        super().__init__(**options)
        self._update = losses

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Choose the experts of each token, and attach the losses to the weights of the choice.

        logits: (s, b, E) float32. padding_mask: (s, b) bool, true for padding. Returns weights (s·b, E) and choices
        (s·b, E) bool. Losses are computed only if gradients are: not for scores, and not in the first of the two forward
        passes of a layer whose activations are recomputed.
        """
        weights, choices = super().routing(logits)
        if not torch.is_grad_enabled():
            return weights, choices
        assert padding_mask is not None
        chosen = choices.byte().topk(self.topk, dim=-1).indices
        losses = router.losses(logits.flatten(0, 1), chosen, self._membership(padding_mask))
        return MoEAuxLossAutoScaler.apply(weights, self._update.add(losses)), choices

    def _membership(self, padding: Tensor) -> Membership:
        """Return the sequence of each of this rank's tokens. Collective over the ranks that divide a sequence."""
        group = self.tp_group if self.config.sequence_parallel and self.tp_group.size() > 1 else None
        count, lengths = padding.shape[1], (~padding).sum(0)
        if group is not None:
            dist.all_reduce(lengths, group=group)
        sequences = torch.arange(count, device=padding.device).expand_as(padding).masked_fill(padding, count)
        return Membership(sequences.flatten(), lengths, group)

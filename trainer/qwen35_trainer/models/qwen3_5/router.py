"""The router of a mixture of experts, in float32, and its two losses.

Routing is that of transformers: softmax, then the top k. The losses are:

    load balancing   per sequence of T tokens: E · Σ_e f_e · P_e, which is 1 if all experts are used equally.
                     f_e is the fraction of the sequence's k · T choices that fall on expert e, and P_e the mean
                     probability of expert e. (Switch Transformer, arXiv:2101.03961, eq. 4-6; per sequence as in
                     DeepSeek-V2, arXiv:2405.04434, eq. 23, and in Megatron's seq_aux_loss, which equals its
                     aux_loss for micro-batches of one sequence)
    z                per token: (log Σ_e exp(logit_e))², which keeps logits small (ST-MoE, arXiv:2202.08906, eq. 5)

transformers' `load_balancing_loss_func` counts the choices of a whole batch, which are known only after the batch's
last micro-batch. Here losses are per sequence. A sequence is never divided among micro-batches, so every division into
micro-batches has the same loss.

With router replay, experts are those that the rollout chose, and the weights of the chosen experts are still those of
this router (R3, arXiv:2510.11370). The losses count the experts that were computed.

Shapes: n sequences, t tokens that this process holds of these sequences, E experts, k of them for each token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from qwen35_trainer.data.expert_choices import NO_CHOICE
from qwen35_trainer.models.qwen3_5 import HFModule, context_parallel
from qwen35_trainer.models.qwen3_5.inputs import ModelInput


@dataclass(frozen=True, eq=False)
class Membership:
    """The sequence to which each token belongs, or its segment in a row with shared prompts.

    Router losses need the membership: they count only real tokens, and balance the load within each sequence. A token of
    a shared prompt counts once for each sequence of the prompt, as if each sequence had its own copy.
    """

    sequences: Tensor
    """(t,) int64: index of the sequence of each of this process's t tokens; n, the number of sequences, for padding. With
    `contained`, the index of the segment."""
    lengths: Tensor
    """(n,) int64: number of real tokens of each whole sequence, including tokens that other processes hold."""
    context_group: ProcessGroup | None
    """Processes that share the sequences; None: this process holds all tokens."""
    contained: Tensor | None = None
    """(n, segments) float32, 1 where a sequence contains a segment; None: sequences share no tokens."""

    @classmethod
    def of(cls, inputs: ModelInput, lengths: Tensor, context_group: ProcessGroup | None) -> Membership:
        """Return the membership of this process's tokens: the sequence of `inputs` to which each of them belongs.

        inputs: already padded for `context_group`. lengths: number of real tokens of each sequence.
        """
        places, count = torch.arange(inputs.tokens.shape[1], device=lengths.device), len(lengths)
        if inputs.boundaries is None:
            rows = torch.arange(count, device=lengths.device).unsqueeze(1)
            sequences = torch.where(places < lengths.unsqueeze(1), rows, count)
        else:
            ends = lengths.cumsum(0) if inputs.shared is None else inputs.boundaries[1:].long()
            sequences = torch.searchsorted(ends, places, right=True).unsqueeze(0)
        own_sequences = sequences if context_group is None else context_parallel.local_tokens(sequences, context_group)
        contained = None if inputs.shared is None else inputs.shared.contained.to(lengths.device)
        return cls(own_sequences.flatten(), lengths, context_group, contained)


def route(gate: HFModule, hidden: Tensor, replayed: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Choose k of E experts for each token, as transformers does, or as `replayed` says.

    hidden: (…, channels), t tokens in all. replayed: (t, k) experts that were chosen before; NO_CHOICE (-1) in the row of a
    token for which this router chooses. None: this router chooses for all tokens. Returns router logits (t, E) float32,
    weights (t, k) float32 that add up to 1, and the chosen experts (t, k) int64.
    """
    logits = F.linear(hidden.reshape(-1, hidden.shape[-1]).float(), gate.weight.float())
    weights, chosen = logits.softmax(-1).topk(gate.top_k, dim=-1)
    if replayed is None:
        return logits, weights / weights.sum(-1, keepdim=True), chosen
    chosen = torch.where(replayed == NO_CHOICE, chosen, replayed.long())
    # The softmax of all experts, divided by its sum over the chosen ones. Their probabilities may be too small for a division.
    return logits, logits.gather(-1, chosen).softmax(-1), chosen


def mix(
    block: HFModule, hidden: Tensor, membership: Membership | None, replayed: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Compute a mixture-of-experts block for `hidden` (n, l, D), n rows, l tokens, D channels.

    replayed: (n, l, k) experts to compute, as `route` takes them; None: the router chooses.

    Returns (n, l, D), and the losses (2,) of the block's router, which are None if `membership` is None.
    """
    flat = hidden.flatten(0, 1)
    logits, weights, chosen = block.gate(flat, None if replayed is None else replayed.flatten(0, 1))
    mixed = block.experts(flat, chosen, weights)
    if hasattr(block, "shared_expert"):
        mixed = mixed + block.shared_expert_gate(flat).sigmoid() * block.shared_expert(flat)
    return mixed.view_as(hidden), None if membership is None else losses(logits, chosen, membership)


def losses(logits: Tensor, chosen: Tensor, membership: Membership) -> Tensor:
    """Compute the routing losses, (2,) float32: load balancing and z, each summed over tokens.

    The load-balancing loss of a sequence counts once for each of its tokens. If ranks share the sequences (context
    parallelism, or Megatron's sequence parallelism), each returns the contribution of its own tokens; the sum over the
    ranks is the loss of the whole sequences.
    """
    sequences, lengths, contained = membership.sequences, membership.lengths, membership.contained
    experts, top_k = logits.shape[-1], chosen.shape[-1]
    count = len(lengths) if contained is None else contained.shape[1]
    table = logits.new_zeros(count + 1, experts)
    ones = torch.ones_like(chosen, dtype=table.dtype)
    choices = table.index_put((sequences.unsqueeze(1).expand_as(chosen), chosen), ones, accumulate=True)
    if membership.context_group is not None:
        dist.all_reduce(choices, group=membership.context_group)
    probabilities = table.index_add(0, sequences, logits.softmax(-1))
    choices, probabilities, copies = choices[:-1], probabilities[:-1], sequences < count
    if contained is not None:
        choices, probabilities = contained @ choices, contained @ probabilities
        copies = F.pad(contained.sum(0), (0, 1))[sequences]
    of_sequences = (choices * probabilities).sum(-1) * experts / (top_k * lengths.clamp(min=1))
    of_tokens = logits.logsumexp(-1).square() * copies
    return torch.stack((of_sequences.sum(), of_tokens.sum()))

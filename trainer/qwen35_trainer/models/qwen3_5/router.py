"""The router of a mixture of experts, in float32, and two losses on it. Routing is the library's: softmax, then the top k.

    load balancing   of a sequence of T tokens: E · Σ_e f_e · P_e, with f_e the share of its k · T choices that fell on expert e,
                     and P_e its mean probability; 1 where all experts are used alike
                     (Switch Transformer, arXiv:2101.03961, eq. 4-6; per sequence as in DeepSeek-V2, arXiv:2405.04434, eq. 23,
                     and Megatron's seq_aux_loss, which its aux_loss is too in micro-batches of one sequence)
    z                of a token: the square of log Σ_e exp(logit_e), which keeps logits small (ST-MoE, arXiv:2202.08906, eq. 5)

The choices of a whole batch, which transformers' `load_balancing_loss_func` counts, are known only after its last micro-batch.
A sequence is never divided among micro-batches, so that any layout has the same loss.

Shapes: n sequences, t tokens of all of them that this process holds, E experts, k of them for each token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from qwen35_trainer.models.qwen3_5 import HFModule, sequence_parallel
from qwen35_trainer.models.qwen3_5.inputs import ModelInput


@dataclass(frozen=True, eq=False)
class Membership:
    """Which tokens enter the losses, and to which sequence each belongs."""

    sequences: Tensor
    """(t,) int64; n for padding."""
    lengths: Tensor
    """(n,) int64, on all processes that share the sequences."""
    group: ProcessGroup | None
    """Those processes; None: this one holds all tokens."""

    @classmethod
    def of(cls, inputs: ModelInput, lengths: Tensor, group: ProcessGroup | None) -> Membership:
        """Of `inputs` as the model reads them (padded for `group`), whose sequences have `lengths` real tokens."""
        places, count = torch.arange(inputs.tokens.shape[1], device=lengths.device), len(lengths)
        if inputs.boundaries is None:
            rows = torch.arange(count, device=lengths.device).unsqueeze(1)
            sequences = torch.where(places < lengths.unsqueeze(1), rows, count)
        else:
            sequences = torch.searchsorted(lengths.cumsum(0), places, right=True).unsqueeze(0)
        mine = sequences if group is None else sequence_parallel.own(sequences, group)
        return cls(mine.flatten(), lengths, group)


def route(gate: HFModule, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits (t, E) and weights (t, k), float32, and experts (t, k) int64 of `hidden` (…, D): the library's results, in its order."""
    logits = F.linear(hidden.reshape(-1, hidden.shape[-1]).float(), gate.weight.float())
    weights, chosen = logits.softmax(-1).topk(gate.top_k, dim=-1)
    return logits, weights / weights.sum(-1, keepdim=True), chosen


def mix(block: HFModule, hidden: Tensor, membership: Membership | None) -> tuple[Tensor, Tensor | None]:
    """What the library's block computes of `hidden` (n, l, D), and `losses`, if there is a `membership`."""
    flat = hidden.flatten(0, 1)
    logits, weights, chosen = block.gate(flat)
    shared = block.shared_expert_gate(flat).sigmoid() * block.shared_expert(flat)
    mixed = (block.experts(flat, chosen, weights) + shared).view_as(hidden)
    return mixed, None if membership is None else losses(logits, chosen, membership)


def losses(logits: Tensor, chosen: Tensor, membership: Membership) -> Tensor:
    """(2,) float32: load balancing, each sequence's times its length, and z; sums over this process's tokens.

    Shares of processes that hold a sequence together add up to its loss.
    """
    sequences, lengths = membership.sequences, membership.lengths
    experts, top_k = logits.shape[-1], chosen.shape[-1]
    table = logits.new_zeros(len(lengths) + 1, experts)
    ones = torch.ones_like(chosen, dtype=table.dtype)
    choices = table.index_put((sequences.unsqueeze(1).expand_as(chosen), chosen), ones, accumulate=True)
    if membership.group is not None:
        dist.all_reduce(choices, group=membership.group)
    probabilities = table.index_add(0, sequences, logits.softmax(-1))
    of_sequences = (choices * probabilities)[:-1].sum(-1) * experts / (top_k * lengths.clamp(min=1))
    of_tokens = logits.logsumexp(-1).square() * (sequences < len(lengths))
    return torch.stack((of_sequences.sum(), of_tokens.sum()))

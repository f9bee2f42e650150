"""Expert parallelism: the S processes of a group divide the experts of a layer, and each keeps its own tokens.

Every process has E / S neighbouring experts. A token travels to the owners of its k experts, and their outputs travel back:

            rank 0: experts 0 1          tokens of rank 0        rank 1: experts 2 3         tokens of rank 1
    route     0 3 │ 1 2                  a → 0, 3   b → 1, 2       3 1                       c → 3, 1
    sort      by expert, hence by owner  a0 b1 │ b2 a3             c1 │ c3
    dispatch  all-to-all                 a0 b1 c1                  b2 a3 c3                  each process has the tokens of its experts
    compute   own experts
    combine   all-to-all, back           a0 b1 │ b2 a3             c1 │ c3
    mix       by the router's weights    a = w·a0 + w·a3  …

The numbers of tokens differ between processes, so counts are exchanged first. An expert, or all experts of a process, may get no
token; the process still takes part in both exchanges and has a gradient of zero for its experts.

In the backward pass gradients travel the other way, so the gradient of an expert is complete on its owner: it contains the
tokens of all processes of the group.

Shapes: t tokens of this process with D channels, k of E experts for each, r = tokens that this process received.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from qwen35_trainer.models.qwen3_5 import Context, HFModule

type ComputeExperts = Callable[[HFModule, Tensor, Tensor, Tensor], Tensor]
"""The function that computes a module of experts: (module, tokens (t, D), experts (t, k), weights (t, k)) → (t, D)."""


def divide(module: HFModule, group: ProcessGroup) -> None:
    """Make a module of experts compute with the experts of all processes of `group`.

    module: experts in the layout of transformers. When it computes, its parameters must hold this process's experts: as
    plain tensors, or as DTensors whose local part they are. They are computed by the function that computed the module before.
    """
    compute = module.forward.__func__

    def forward(module: HFModule, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return _mixed(compute, module, hidden, chosen, weights, group)

    module.forward = MethodType(forward, module)


class _OwnExperts:
    """The experts of this process, as a function that computes a module of experts expects them."""

    def __init__(self, module: HFModule) -> None:
        self._module = module
        self.gate_up_proj, self.down_proj = _local(module.gate_up_proj), _local(module.down_proj)
        self.num_experts = len(self.gate_up_proj)

    def __getattr__(self, name: str) -> object:
        return getattr(self._module, name)


def _mixed(
    compute: ComputeExperts, module: HFModule, hidden: Tensor, chosen: Tensor, weights: Tensor, group: ProcessGroup
) -> Tensor:
    """Compute the experts of all processes for this process's tokens `hidden` (t, D). Returns (t, D). Collective."""
    experts = _OwnExperts(module)
    tokens, per_token = chosen.shape
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    # Unlike `bincount`, this does not wait for the device.
    counts = flat.new_zeros(experts.num_experts * group.size()).scatter_add_(0, flat, torch.ones_like(flat))
    sent = counts.view(group.size(), -1)
    arriving = torch.empty_like(sent)
    dist.all_to_all_single(arriving, sent, group=group)
    # One copy to the host, for which the device waits: the sizes of both exchanges.
    sizes = torch.stack((sent.sum(1), arriving.sum(1))).tolist()
    received = _exchange(hidden[order // per_token], sizes[0], sizes[1], group)
    numbers = torch.arange(experts.num_experts, device=flat.device).repeat(group.size())
    own = numbers.repeat_interleave(arriving.flatten(), output_size=len(received))
    returned = _exchange(_computed(compute, experts, received, own), sizes[1], sizes[0], group)
    return _combined(returned[order.argsort()].view(tokens, per_token, hidden.shape[-1]), weights).to(hidden.dtype)


def _combined(outputs: Tensor, weights: Tensor) -> Tensor:
    """Return the sum (t, D) of the outputs (t, k, D) of each token's experts, by the router's weights (t, k), in float32.

    One expert of every token is added at a time, so that there are no float32 copies of all outputs, forward or backward. Each
    product is rounded before it is added, as without an expert mesh. `addcmul` would not round it.
    """
    mixed = torch.zeros_like(outputs[:, 0], dtype=torch.float32)
    for output, weight in zip(outputs.unbind(1), weights.unbind(1), strict=True):
        mixed = mixed + output * weight.unsqueeze(-1)
    return mixed


def _computed(compute: ComputeExperts, experts: _OwnExperts, received: Tensor, numbers: Tensor) -> Tensor:
    """Compute one expert for each of the received tokens (r, D). Returns (r, D).

    numbers: (r,) int64, index of each token's expert among this process's experts.
    """
    if len(received):
        return compute(experts, received, numbers.unsqueeze(1), received.new_ones(len(received), 1))
    # The backward pass must reach both exchanges and every parameter: other processes wait for this one in the all-to-all,
    # and FSDP reduces only gradients that exist. So an expert computes zero rows.
    gate, up = F.linear(received, experts.gate_up_proj[0]).chunk(2, dim=-1)
    return F.linear(gate * up, experts.down_proj[0])


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _exchange(rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    return _Exchange.apply(rows, sent, received, group)  # type: ignore[no-untyped-call]


class _Exchange(torch.autograd.Function):
    """Sends the first `sent[0]` rows to process 0 of the group, the next `sent[1]` rows to process 1, and so on.

    received: number of rows that come from each process. The result has them in the order of the processes. The backward
    pass sends gradients back.
    """

    @staticmethod
    def forward(ctx: Context, rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(gradients[0], ctx.received, ctx.sent, ctx.group), None, None, None

"""Ascend kernels of `torch_npu` in place of the library's small operations, on the instances of one model.

    RMS norm, (1 + weight) in float32      npu_rms_norm
    gated RMS norm                         npu_rms_norm, then silu of the gate in float32
    rotation of the first channels         npu_rotary_mul; the other channels pass
    experts                                npu_moe_token_permute ─► grouped matmul ─► npu_swiglu ─► grouped matmul
                                           ─► npu_moe_token_unpermute with the routing weights

Every replacement looks at the device of its input and leaves other devices to the original, so that a model adapted on
the host or on the meta device is right wherever it goes. Qwen3.5's norm is not Qwen3's: a kernel that takes the weight
as it stands is wrong by one.

None of this file has met hardware. It is tested against the library through a stand-in for `torch_npu` that does the
documented arithmetic of these operators (torch_npu 2.10); what only hardware can show is marked "hardware" below.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from qwen35_trainer.models.qwen3_5 import Context, HFModule
from qwen35_trainer.models.qwen3_5.full_attention import rotate as rotate_anywhere

type Operators = Any
"""The module `torch_npu`, or one with its operators."""


def adapt(model: HFModule) -> bool:
    """Give the norms, attention layers and experts of `model` Ascend kernels, if `torch_npu` is installed.

    Returns whether it is. May be called again.
    """
    if find_spec("torch_npu") is None:
        return False
    install(model, import_module("torch_npu"), device="npu")
    return True


def install(model: HFModule, operators: Operators, *, device: str) -> None:
    """Replace what runs on inputs that lie on `device` (its type); `adapt` says when. Attention layers get an attribute
    `rotate(x, cos, sin)`, see below.
    """
    for module in model.modules():
        if replacement := _REPLACEMENTS.get(_CLASS.sub("", type(module).__name__)):
            module.forward = MethodType(_on_device(device, operators, replacement, type(module).forward), module)
        if hasattr(module, "q_norm"):
            module.rotate = _rotation(device, operators)


def _on_device(
    device: str, operators: Operators, replacement: Callable[..., Tensor], original: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    def forward(module: HFModule, x: Tensor, *rest: Tensor) -> Tensor:
        if x.device.type != device:
            return original(module, x, *rest)
        return replacement(operators, module, x, *rest)

    return forward


def _rotation(device: str, operators: Operators) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def rotate_on_device(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # Token by token decoding has no axis of positions, which the operator wants.
        if x.device.type != device or x.dim() != 4:
            return rotate_anywhere(x, cos, sin)
        turned, rest = x.split((cos.shape[-1], x.shape[-1] - cos.shape[-1]), dim=-1)
        return torch.cat((rotate(operators, turned, cos, sin), rest), dim=-1)

    return rotate_on_device


def rms_norm(operators: Operators, norm: HFModule, x: Tensor) -> Tensor:
    """x: (…, D).  Zero-centred weight, everything in float32, as the library has it."""
    # The operator wants gamma in the dtype of its input.
    return operators.npu_rms_norm(x.float(), 1.0 + norm.weight.float(), epsilon=norm.eps)[0].type_as(x)


def gated_rms_norm(operators: Operators, norm: HFModule, x: Tensor, gate: Tensor) -> Tensor:
    """x, gate: (…, D).  Weight as it stands, then silu(gate). The library rounds to x's dtype before the weight; this
    does not, which can only be closer to the exact value.
    """
    normed = operators.npu_rms_norm(x.float(), norm.weight.float(), epsilon=norm.variance_epsilon)[0]
    return (normed * F.silu(gate.float())).type_as(x)


def rotate(operators: Operators, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: (n, L, H, R), the channels that turn.  cos, sin: (n, L, 1, R).  Returns (n, L, H, R).

    Hardware: R is 64 for the published models; the operator wants it even, and at most 1,000 heads and sequences.
    """
    return operators.npu_rotary_mul(x.contiguous(), cos.to(x.dtype), sin.to(x.dtype))


def experts(operators: Operators, module: HFModule, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """x: (T, D).  chosen: (T, k) int64 experts of each token.  weights: (T, k).  Returns (T, D).

    Hardware: experts without a token, and gradients of the permutation (the operators bring their own).
    """
    sorted_tokens, places = operators.npu_moe_token_permute(x, chosen.to(torch.int32))
    flat = chosen.flatten()
    # A sum of ones and no bincount, which would wait for the device to learn its own size.
    counts = flat.new_zeros(module.num_experts).scatter_add(0, flat, torch.ones_like(flat))

    def times(rows: Tensor, weight: Tensor) -> Tensor:
        return GroupedMatmul.apply(operators, rows, weight.transpose(1, 2), counts)  # type: ignore[no-untyped-call]

    inner = operators.npu_swiglu(times(sorted_tokens, module.gate_up_proj), dim=-1)
    output = times(inner, module.down_proj)
    return operators.npu_moe_token_unpermute(output, places, probs=weights.to(output.dtype)).to(x.dtype)


class GroupedMatmul(torch.autograd.Function):
    """Rows of x (M, K), sorted by group, times the matrix of their group: weight (E, K, N), counts (E,) → (M, N).

    The operator has no gradient of its own. Those of x and weight are grouped products again: grad · weightᵀ along the
    same rows, and xᵀ · grad with the groups along the inner dimension.
    """

    @staticmethod
    def forward(ctx: Context, operators: Operators, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        ctx.operators = operators
        ctx.save_for_backward(x, weight, counts)
        return _grouped(operators, x, weight, counts, along="rows")

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> tuple[None, Tensor | None, Tensor | None, None]:
        x, weight, counts = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        of_x = of_weight = None
        if ctx.needs_input_grad[1]:
            of_x = _grouped(ctx.operators, gradient, weight.transpose(1, 2), counts, along="rows")
        if ctx.needs_input_grad[2]:
            # Hardware: the operator wants x transposed as a view; a contiguous copy is refused.
            of_weight = _grouped(ctx.operators, x.T, gradient, counts, along="inner")
        return None, of_x, of_weight, None


def _grouped(operators: Operators, x: Tensor, weight: Tensor, counts: Tensor, *, along: str) -> Tensor:
    """One grouped product with a single output tensor. group_list_type 1: `counts` are counts, not running totals."""
    group_type, split_item = (0, 2) if along == "rows" else (2, 3)
    return operators.npu_grouped_matmul(
        [x],
        [weight],
        bias=None,
        group_list=counts,
        split_item=split_item,
        group_type=group_type,
        group_list_type=1,
    )[0]


_REPLACEMENTS: dict[str, Callable[..., Tensor]] = {
    "RMSNorm": rms_norm,
    "RMSNormGated": gated_rms_norm,
    "Experts": experts,
}
"""By the name of the library's class, without the family."""
_CLASS = re.compile(r"^(FSDP)?Qwen3_5(Moe)?")
"""FSDP2 gives a module that it shards a class of its own, named after the first one."""

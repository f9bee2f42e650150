"""Replace small operations of transformers with Ascend kernels of `torch_npu`, on the instances of one model.

    RMS norm, in float32                   npu_rms_norm, with 1 + weight (Qwen3.5) or weight (Qwen3)
    gated RMS norm                         npu_rms_norm, then silu of the gate in float32
    rotation of the first channels         npu_rotary_mul; the other channels are unchanged
    dense MLP, shared expert               gate and up side by side ─► npu_swiglu
    experts                                npu_moe_token_permute ─► grouped matmul ─► npu_swiglu ─► grouped matmul
                                           ─► npu_moe_token_unpermute with the routing weights

Every replacement checks the device of its input and calls the original operation on other devices, so that a model
adapted on the host or on the meta device works on any device. The weight of Qwen3.5's norm, unlike Qwen3's, is
zero-centred: a kernel needs the weight plus one.

Nothing in this file has run on an NPU. It is tested against transformers with a stand-in for `torch_npu` that
implements the documented arithmetic of these operators (torch_npu 2.10). A comment that begins with "Hardware" states
what only an NPU can test.
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
"""The module `torch_npu`, or a stand-in with the same operators."""


def adapt(model: HFModule) -> bool:
    """Make the norms, attention layers, MLPs and experts of `model` use Ascend kernels, if `torch_npu` is installed.

    Returns whether `torch_npu` is installed. This function may be called again for the same model.
    """
    if find_spec("torch_npu") is None:
        return False
    install(model, import_module("torch_npu"), device="npu")
    return True


def install(model: HFModule, operators: Operators, *, device: str) -> None:
    """Make norms, attention layers, MLPs and experts compute with `operators` if their input is on a device of type `device`.

    Each attention layer gets an attribute `rotate(x, cos, sin)`, with which `full_attention` applies
    the rotary embedding.
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
        # Token-by-token decoding has no axis of positions, which the operator requires.
        if x.device.type != device or x.dim() != 4:
            return rotate_anywhere(x, cos, sin)
        turned, rest = x.split((cos.shape[-1], x.shape[-1] - cos.shape[-1]), dim=-1)
        return torch.cat((rotate(operators, turned, cos, sin), rest), dim=-1)

    return rotate_on_device


def rms_norm(operators: Operators, norm: HFModule, x: Tensor) -> Tensor:
    """Compute the RMS norm of the last dimension of x with a zero-centred weight, in float32, as transformers does."""
    # The operator requires gamma in the dtype of its input.
    return operators.npu_rms_norm(x.float(), 1.0 + norm.weight.float(), epsilon=norm.eps)[0].type_as(x)


def plain_rms_norm(operators: Operators, norm: HFModule, x: Tensor) -> Tensor:
    """Compute the RMS norm of the last dimension of x, times the weight, in float32, rounded once at the end."""
    return operators.npu_rms_norm(x.float(), norm.weight.float(), epsilon=norm.variance_epsilon)[0].type_as(x)


def gated_rms_norm(operators: Operators, norm: HFModule, x: Tensor, gate: Tensor) -> Tensor:
    """Compute silu(gate) · weight · (RMS norm of the last dimension of x), for a weight that is not zero-centred.

    Unlike transformers, this does not round to the dtype of x before the multiplication by the weight, so the result is
    at least as close to the exact value.
    """
    normed = operators.npu_rms_norm(x.float(), norm.weight.float(), epsilon=norm.variance_epsilon)[0]
    return (normed * F.silu(gate.float())).type_as(x)


def rotate(operators: Operators, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to all R channels of x (n, L, H, R), n rows of L tokens with H heads.

    cos, sin: (n, L, 1, R). Returns (n, L, H, R). R is 64 in the published models. The operator of torch_npu requires an
    even R, at most 1,000 heads and at most 1,000 sequences. These limits were not tested on an NPU.
    """
    return operators.npu_rotary_mul(x.contiguous(), cos.to(x.dtype), sin.to(x.dtype))


def mlp(operators: Operators, module: HFModule, x: Tensor) -> Tensor:
    """Compute down(silu(gate(x)) · up(x)) of x (…, D), D channels, with one kernel for the activation. Returns (…, D).

    The kernel takes the gate and the other factor side by side, in this order. They come from two layers, so they are copied
    into one tensor first. Hardware: the kernel rounds once, where transformers rounds silu(gate), too.
    """
    return module.down_proj(operators.npu_swiglu(torch.cat((module.gate_proj(x), module.up_proj(x)), dim=-1), dim=-1))


def experts(operators: Operators, module: HFModule, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Compute the routed experts of T tokens x (T, D) with D channels, by grouped matrix products.

    chosen: (T, k) int64, the k experts of each token. weights: (T, k), their routing weights. Returns (T, D).
    Two things are still to be checked on an NPU: experts without a token, and the gradients of the permutation,
    which torch_npu computes.
    """
    sorted_tokens, places = operators.npu_moe_token_permute(x, chosen.to(torch.int32))
    flat = chosen.flatten()
    # A sum of ones instead of bincount, which would wait for the device to learn the size of its result.
    counts = flat.new_zeros(module.num_experts).scatter_add(0, flat, torch.ones_like(flat))

    def times(rows: Tensor, weight: Tensor) -> Tensor:
        return GroupedMatmul.apply(operators, rows, weight.transpose(1, 2), counts)  # type: ignore[no-untyped-call]

    inner = operators.npu_swiglu(times(sorted_tokens, module.gate_up_proj), dim=-1)
    output = times(inner, module.down_proj)
    return operators.npu_moe_token_unpermute(output, places, probs=weights.to(output.dtype)).to(x.dtype)


class GroupedMatmul(torch.autograd.Function):
    """Grouped matrix product: the rows of x are sorted by group, and each row is multiplied by the matrix of its group.

    x: (M, K), M rows of K channels. weight: (E, K, N), the matrices of E groups. counts: (E,), the number of rows of
    each group. Result: (M, N). The operator of torch_npu defines no gradient. The gradients of x and weight are grouped
    products too: grad · weightᵀ along the same rows, and xᵀ · grad with the groups along the inner dimension.
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
            # Hardware: the operator requires the transposed x as a view and rejects a contiguous copy.
            of_weight = _grouped(ctx.operators, x.T, gradient, counts, along="inner")
        return None, of_x, of_weight, None


def _grouped(operators: Operators, x: Tensor, weight: Tensor, counts: Tensor, *, along: str) -> Tensor:
    """Multiply each group of rows by the matrix of the group, with Ascend's grouped product, into one output tensor.

    counts: the size of each group (group_list_type 1), not cumulative. along: "rows" if groups are ranges of rows of
    `x`; "inner" if they are ranges of the inner dimension of the product.
    """
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
    "Qwen3MoeRMSNorm": plain_rms_norm,
    "RMSNormGated": gated_rms_norm,
    "MLP": mlp,
    "Experts": experts,
}
"""Class of transformers, without the prefix of the family → function that replaces its `forward`."""
_CLASS = re.compile(r"^(FSDP)?(Qwen3_5(Moe)?|Qwen3Moe(?!RMSNorm))?")
"""Pattern of the prefix of a class name, which a norm of Qwen3 keeps. FSDP2 gives a sharded module a new class, whose name begins with FSDP."""

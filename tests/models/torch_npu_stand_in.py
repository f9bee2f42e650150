"""What the operators of `torch_npu` 2.10 compute, as its reference documents it, on any device.

Written from the documentation of each operator, with the constraints that it states checked. Those with a gradient of
their own there (all but the grouped product) have torch's here.
"""

import torch
from torch import Tensor


def npu_rms_norm(self: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    assert gamma.dtype == self.dtype, "gamma has the dtype of the input"
    assert gamma.shape == self.shape[-gamma.dim() :]
    rstd = torch.rsqrt(self.float().pow(2).mean(-1, keepdim=True) + epsilon)
    return (self.float() * rstd * gamma.float()).to(self.dtype), rstd


def npu_rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half") -> Tensor:  # noqa: A002
    assert rotary_mode == "half"
    assert input.dim() == r1.dim() == r2.dim() == 4
    assert input.dtype == r1.dtype == r2.dtype
    assert input.shape[-1] == r1.shape[-1]
    assert input.shape[-1] % 2 == 0
    # BSND: r1 and r2 are 1S1D, BS1D or BSND.
    assert r1.shape == r2.shape
    assert r1.shape[1] == input.shape[1]
    assert r1.shape[0] in (1, input.shape[0])
    assert r1.shape[2] in (1, input.shape[2])
    first, second = input.chunk(2, dim=-1)
    return r1 * input + r2 * torch.cat((-second, first), dim=-1)


def npu_swiglu(self: Tensor, dim: int = -1) -> Tensor:
    gate, up = self.chunk(2, dim=dim)
    return torch.nn.functional.silu(gate) * up


def npu_moe_token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    assert indices.dtype in (torch.int32, torch.int64)
    assert num_out_tokens is None
    assert not padded_mode
    chosen = 1 if indices.dim() == 1 else indices.shape[1]
    order = indices.flatten().argsort(stable=True)
    return tokens[order // chosen], order.argsort(stable=True).to(torch.int32)


def npu_moe_token_unpermute(
    permuted_tokens: Tensor, sorted_indices: Tensor, probs: Tensor | None = None, padded_mode: bool = False
) -> Tensor:
    assert not padded_mode
    tokens = permuted_tokens[sorted_indices.long()]
    if probs is None:
        return tokens
    assert probs.dtype == permuted_tokens.dtype
    return (tokens.unflatten(0, probs.shape) * probs.unsqueeze(-1)).sum(1)


def npu_grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    bias: None = None,
    group_list: Tensor | None = None,
    split_item: int = 0,
    group_type: int = -1,
    group_list_type: int = 0,
) -> list[Tensor]:
    assert bias is None
    assert group_list is not None
    assert group_list.dtype == torch.int64
    assert split_item in (2, 3), "one tensor comes back"
    left, right = x[0].detach(), weight[0].detach()
    assert left.dtype == right.dtype
    sizes = (group_list if group_list_type == 1 else group_list.diff(prepend=group_list.new_zeros(1))).tolist()
    if group_type == 0:  # groups along the rows of x, one matrix each
        assert right.dim() == 3
        assert len(sizes) == len(right)
        assert sum(sizes) == len(left)
        parts = [part @ matrix for part, matrix in zip(left.split(sizes), right, strict=True)]
        return [torch.cat(parts)]
    assert group_type == 2  # groups along the inner dimension
    assert left.dim() == right.dim() == 2
    assert left.shape[1] == right.shape[0] == sum(sizes)
    assert left.stride(0) == 1, "x is a transposed view, not a copy"
    pairs = zip(left.split(sizes, dim=1), right.split(sizes), strict=True)
    return [torch.stack([a @ b for a, b in pairs])]

"""Compares Muon with torch's implementation, and tests the singular values of its iteration."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from qwen35_trainer.engines.fsdp.muon import Muon, orthogonal


@pytest.mark.parametrize("shape", [(8, 8), (6, 20), (20, 6)], ids=str)
def test_whole_matrices_make_the_steps_of_torchs_muon(shape) -> None:
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.ones(shape)) for _ in range(2))
    optimizer = Muon([ours], lr=0.02, momentum=0.9, weight_decay=0.1)
    reference = torch.optim.Muon(
        [theirs], lr=0.02, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw", nesterov=True
    )
    for _ in range(4):
        ours.grad = torch.randn(shape)
        theirs.grad = ours.grad.clone()
        before = ours.detach().clone(), theirs.detach().clone()
        optimizer.step()
        reference.step()
        step, expected = (
            (after - at).flatten() for after, at in zip((ours.detach(), theirs.detach()), before, strict=True)
        )
        assert torch.cosine_similarity(step, expected, dim=0) > 0.997
        assert float(step.norm()) == pytest.approx(float(expected.norm()), rel=0.03)
    # Both iterate in bfloat16, in another order of operations.
    torch.testing.assert_close(ours, theirs, atol=4 * 0.02 * 0.2 * math.sqrt(max(shape)) * 2**-5, rtol=0)


def test_a_stack_is_stepped_matrix_by_matrix() -> None:
    torch.manual_seed(0)
    gradient = torch.randn(3, 5, 9)
    stack, singles = nn.Parameter(torch.zeros(3, 5, 9)), [nn.Parameter(torch.zeros(5, 9)) for _ in range(3)]
    stack.grad = gradient.clone()
    for single, part in zip(singles, gradient, strict=True):
        single.grad = part.clone()
    for parameters in ([stack], singles):
        Muon(parameters, lr=0.1, momentum=0.95, weight_decay=0.0).step()
    torch.testing.assert_close(stack.data, torch.stack([single.data for single in singles]), atol=2e-3, rtol=0)


@given(
    rows=st.integers(1, 24),
    columns=st.integers(1, 24),
    seed=st.integers(0, 99),
    scale=st.sampled_from([1e-6, 1.0, 1e4]),
)
def test_directions_have_singular_values_near_one_whatever_the_gradients_size(rows, columns, seed, scale) -> None:
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * scale
    before = torch.linalg.svdvals(matrix)
    after = torch.linalg.svdvals(orthogonal(matrix).float())
    # The iteration lifts a share of 1e-3 of the norm to 1 in five steps; smaller ones are on their way.
    lifted = before > 3e-3 * before.norm()
    assert after[: int(lifted.sum())].min() > 0.5
    assert after.max() < 1.3


def test_a_gradient_of_zero_moves_nothing() -> None:
    parameter = nn.Parameter(torch.ones(4, 4))
    parameter.grad = torch.zeros(4, 4)
    Muon([parameter], lr=0.1, momentum=0.95, weight_decay=0.0).step()
    assert torch.equal(parameter.data, torch.ones(4, 4))


@pytest.mark.usefixtures("alone")
def test_a_sharded_update_travels_in_bfloat16_and_makes_the_step_of_a_whole_one(monkeypatch) -> None:
    gathered: list[torch.dtype] = []
    full_tensor = DTensor.full_tensor

    def recording(self: DTensor, **settings: Any) -> torch.Tensor:
        gathered.append(self.dtype)
        return full_tensor(self, **settings)

    monkeypatch.setattr(DTensor, "full_tensor", recording)
    mesh, start, gradient = init_device_mesh("cpu", (1,)), torch.zeros(6, 20), torch.randn(6, 20)
    whole, sharded = nn.Parameter(start.clone()), nn.Parameter(distribute_tensor(start.clone(), mesh, [Shard(0)]))
    whole.grad, sharded.grad = gradient.clone(), distribute_tensor(gradient.clone(), mesh, [Shard(0)])
    for parameter in (whole, sharded):
        Muon([parameter], lr=0.1, momentum=0.95, weight_decay=0.0).step()
    assert gathered == [torch.bfloat16]
    assert torch.equal(sharded.detach().to_local(), whole.detach())


def test_a_vector_is_refused() -> None:
    with pytest.raises(ValueError, match="not a parameter of shape"):
        Muon([nn.Parameter(torch.ones(4))], lr=0.1, momentum=0.95, weight_decay=0.0)

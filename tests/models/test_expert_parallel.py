"""Experts whose tokens travel, in a group of one process: with each way to compute experts, the result of the undivided module.

`tests/distributed/test_expert_mesh.py` has several processes.
"""

import copy
import gc
from collections.abc import Iterator
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from qwen35_trainer.models.qwen3_5 import expert_parallel, npu
from tests.models import torch_npu_stand_in as operators


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()
    gc.collect()


def computed(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> list[Tensor]:
    """The outputs, and the gradients of tokens, weights and experts."""
    inputs = [hidden.clone().requires_grad_(), weights.clone().requires_grad_()]
    outputs = module(inputs[0], chosen, inputs[1])
    scale = torch.linspace(0.5, 1.5, outputs.numel(), dtype=outputs.dtype).view_as(outputs)
    gradients = torch.autograd.grad((outputs * scale).sum(), [*inputs, module.gate_up_proj, module.down_proj])
    return [outputs.detach(), *gradients]


@pytest.mark.parametrize("way", ["grouped_mm", "eager", "NPU"])
def test_every_way_to_compute_experts_also_computes_divided_ones(make_model, group, way):
    module = make_model(experts=8).model.layers[0].mlp.experts
    divided = copy.deepcopy(module)
    if way == "NPU":
        divided.forward = npu.MethodType(lambda module, *inputs: npu.experts(operators, module, *inputs), divided)
    else:
        divided.config._experts_implementation = way
    expert_parallel.divide(divided, group)
    hidden = torch.randn(5, 32)
    chosen = torch.tensor([[0, 7], [7, 3], [3, 0], [0, 5], [7, 0]])  # experts 1, 2, 4 and 6 get no token
    weights = torch.rand(5, 2).softmax(-1)
    for ours, expected in zip(
        computed(divided, hidden, chosen, weights), computed(module, hidden, chosen, weights), strict=True
    ):
        torch.testing.assert_close(ours, expected)


class _Recorded(TorchDispatchMode):
    """Records the operations that run, with the shapes of their float32 results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.float32: list[torch.Size] = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **kwargs or {})
        self.calls.append((str(operation), kwargs or {}))
        if isinstance(result, Tensor) and result.dtype == torch.float32:
            self.float32.append(result.shape)
        return result


@pytest.fixture
def recorded(make_model, group) -> _Recorded:
    """Forward and backward of divided experts that return their tokens: 5 tokens of 32 channels, 2 experts for each."""
    module = make_model(experts=8).model.layers[0].mlp.experts.bfloat16()
    module.forward = MethodType(lambda module, tokens, chosen, weights: tokens * 2, module)
    expert_parallel.divide(module, group)
    hidden, weights = torch.randn(5, 32, dtype=torch.bfloat16), torch.rand(5, 2).softmax(-1)
    chosen = torch.tensor([[0, 7], [7, 3], [3, 0], [0, 5], [7, 0]])
    with _Recorded() as recorded:
        outputs = module(hidden.requires_grad_(), chosen, weights.requires_grad_())
        outputs.float().sum().backward()
    torch.testing.assert_close(outputs, hidden * 2)
    return recorded


def test_the_device_waits_for_nothing_but_the_sizes_of_the_exchanges(recorded):
    """`bincount` reads the largest number on the host, and `repeat_interleave` the number of rows if it does not get it."""
    assert not [name for name, _ in recorded.calls if "bincount" in name]
    repeats = [arguments for name, arguments in recorded.calls if "repeat_interleave" in name]
    assert [arguments.get("output_size") for arguments in repeats] == [10]


def test_no_float32_tensor_is_as_large_as_the_outputs_of_all_experts(recorded):
    assert torch.Size((5, 32)) in recorded.float32
    assert max(shape.numel() for shape in recorded.float32) == 5 * 32


def test_a_process_without_tokens_has_a_gradient_of_zero(make_model, group):
    """Its graph reaches the tokens and every expert."""
    module = make_model(experts=4).model.layers[0].mlp.experts
    experts, tokens = expert_parallel._OwnExperts(module), torch.empty(0, 32, requires_grad=True)
    outputs = expert_parallel._computed(type(module).forward, experts, tokens, torch.empty(0, dtype=torch.int64))
    assert outputs.shape == (0, 32)
    gradients = torch.autograd.grad(outputs.sum(), [tokens, module.gate_up_proj, module.down_proj])
    assert [tuple(each.shape) for each in gradients] == [(0, 32), *(tuple(each.shape) for each in module.parameters())]
    assert not any(each.any() for each in gradients)

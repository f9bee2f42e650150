"""The short convolution against torch's general one, and what its rounding may cost."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from qwen35_trainer.models.qwen3_5 import convolution

WIDTH, CHANNELS = 4, 6


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def general(x: Tensor, filters: Tensor) -> Tensor:
    padded = F.pad(x.transpose(1, 2), (WIDTH - 1, 0))
    return F.silu(F.conv1d(padded, filters.unsqueeze(1), groups=CHANNELS)).transpose(1, 2)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 9])
def test_values_and_gradients_are_those_of_the_general_convolution(length: int) -> None:
    results = []
    for convolve in (convolution.convolve, general):
        x, filters = (y.requires_grad_() for y in (drawn(2, length, CHANNELS), drawn(CHANNELS, WIDTH, seed=1)))
        output = convolve(x, filters)
        (output * drawn(2, length, CHANNELS, seed=2)).sum().backward()
        results.append((output, x.grad, filters.grad))
    for own, expected in zip(*results, strict=True):
        torch.testing.assert_close(own, expected, atol=1e-6, rtol=1e-5)


def test_one_step_is_the_last_position_of_a_sequence() -> None:
    x, filters = drawn(3, WIDTH, CHANNELS), drawn(CHANNELS, WIDTH, seed=1)
    torch.testing.assert_close(convolution.step(x, filters), convolution.convolve(x, filters)[:, -1])


def test_sixteen_bits_are_rounded_once() -> None:
    """The result is the exact one, rounded: sums in 16 bits would be off by more in many places."""
    x, filters = drawn(2, 50, CHANNELS).bfloat16(), drawn(CHANNELS, WIDTH, seed=1).bfloat16()
    exact = general(x.double(), filters.double())
    torch.testing.assert_close(convolution.convolve(x, filters), exact.bfloat16(), atol=1e-6, rtol=2**-8)
    assert (convolution.convolve(x, filters) == exact.bfloat16()).float().mean() > 0.99


def test_only_the_inputs_are_kept_for_the_backward_pass() -> None:
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        x, filters = (y.bfloat16().requires_grad_() for y in (drawn(2, 9, CHANNELS), drawn(CHANNELS, WIDTH, seed=1)))
        convolution.convolve(x, filters)
    assert [tensor.data_ptr() for tensor in kept] == [x.data_ptr(), filters.data_ptr()]

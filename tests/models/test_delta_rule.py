"""The gated delta rule against the reference implementation of the transformers library."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from qwen35_trainer.models.qwen3_5 import delta_rule

LENGTHS = [1, 3, 63, 64, 65, 150]
B, H, K, V = 2, 3, 8, 12


def inputs(length: int, seed: int = 0) -> list[Tensor]:
    """query, key, value, log_decay, beta; the decay is slow, so that the first positions reach the last."""
    g = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(B, length, H, K, generator=g) for _ in range(2))
    value = torch.randn(B, length, H, V, generator=g)
    log_decay = -0.03 * torch.rand(B, length, H, generator=g)
    return [query, key, value, log_decay, torch.rand(B, length, H, generator=g)]


def initial_state() -> Tensor:
    return torch.randn(B, H, K, V, generator=torch.Generator().manual_seed(9))


def reference(
    rule: Callable[..., tuple[Tensor, Tensor]], arguments: list[Tensor], state: Tensor | None
) -> tuple[Tensor, Tensor]:
    query, key, value, log_decay, beta = arguments
    return rule(
        query,
        key,
        value,
        g=log_decay,
        beta=beta,
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("rule", [torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule])
def test_chunked_agrees_with_the_reference(rule, length, with_state):
    arguments, state = inputs(length), initial_state() if with_state else None
    output, final = delta_rule.chunked(*arguments, state)
    expected, expected_final = reference(rule, arguments, state)
    torch.testing.assert_close(output, expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(final, expected_final, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("length", LENGTHS)
def test_steps_one_after_another_agree_with_the_reference(length):
    arguments, state = inputs(length), initial_state()
    expected, expected_final = reference(torch_recurrent_gated_delta_rule, arguments, state.clone())
    outputs = [delta_rule.step(*(x[:, t] for x in arguments), state) for t in range(length)]
    torch.testing.assert_close(torch.stack(outputs, 1), expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(state, expected_final, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("length", LENGTHS)
def test_gradients_agree_with_the_reference(length):
    def gradients(compute: Callable[[list[Tensor], Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
        arguments, state = [x.requires_grad_() for x in inputs(length)], initial_state().requires_grad_()
        output, final = compute(arguments, state)
        weight = torch.linspace(-1, 1, output.numel()).view_as(output)
        return torch.autograd.grad((output * weight).sum() + final.square().sum(), [*arguments, state])

    ours = gradients(lambda arguments, state: delta_rule.chunked(*arguments, state))
    theirs = gradients(lambda arguments, state: reference(torch_chunk_gated_delta_rule, arguments, state))
    for own, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("length", [1, 5, 64, 100])
def test_padding_with_neither_decay_nor_strength_is_passed_over(length):
    arguments = inputs(length)
    # Ones, not zeros, stand where nothing should be read.
    padded = [F.pad(x, (0, 0, 0, 0, 0, 40), value=1.0) for x in arguments[:3]]
    padded += [F.pad(x, (0, 0, 0, 40)) for x in arguments[3:]]
    output, final = delta_rule.chunked(*arguments)
    padded_output, padded_final = delta_rule.chunked(*padded)
    torch.testing.assert_close(padded_output[:, :length], output, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(padded_final, final, atol=1e-5, rtol=1e-4)


def test_a_sequence_in_two_parts_is_the_sequence_in_one():
    arguments = inputs(150)
    whole, final = delta_rule.chunked(*arguments)
    first, state = delta_rule.chunked(*(x[:, :70] for x in arguments))
    second, state = delta_rule.chunked(*(x[:, 70:] for x in arguments), state)
    torch.testing.assert_close(torch.cat((first, second), 1), whole, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(state, final, atol=2e-5, rtol=1e-4)


def test_one_write_then_a_read_of_the_same_key_gives_the_value_scaled_by_strength():
    """In closed form: S = β k vᵀ with |k| = 1, read with q = k: β · v / √K."""
    key = torch.tensor([[[3.0, 4.0]]])
    value, beta, state = torch.tensor([[[7.0]]]), torch.tensor([[0.5]]), torch.zeros(1, 1, 2, 1)
    output = delta_rule.step(key, key, value, torch.zeros(1, 1), beta, state)
    torch.testing.assert_close(output, torch.tensor([[[0.5 * 7.0 / 2**0.5]]]))
    torch.testing.assert_close(state.flatten(), torch.tensor([0.6 * 3.5, 0.8 * 3.5]))


def test_decay_is_applied_before_the_read():
    state = torch.ones(1, 1, 2, 1)
    nothing = torch.zeros(1, 1, 1)
    key = torch.tensor([[[1.0, 0.0]]])
    output = delta_rule.step(key, key, nothing, torch.log(torch.tensor([[0.25]])), torch.zeros(1, 1), state)
    torch.testing.assert_close(output, torch.full((1, 1, 1), 0.25 / 2**0.5))
    torch.testing.assert_close(state, torch.full((1, 1, 2, 1), 0.25))

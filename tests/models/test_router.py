"""Routing and its losses against the transformers library's and closed forms."""

import math

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import load_balancing_loss_func

from qwen35_trainer.models.qwen3_5 import router
from qwen35_trainer.models.qwen3_5.adapter import adapt
from qwen35_trainer.models.qwen3_5.inputs import ModelInput
from qwen35_trainer.models.qwen3_5.router import Membership

LENGTHS = [5, 1, 12]
EXPERTS, TOP_K = 6, 2


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def membership(*, packed: bool, lengths: list[int] = LENGTHS) -> Membership:
    inputs = ModelInput.of_text([torch.ones(n, dtype=torch.int64) for n in LENGTHS], packed=packed, device="cpu")
    return Membership.of(inputs, torch.tensor(lengths), None)


def losses_of_each(logits: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The library's load balancing of each sequence alone, times its length, and the square of every token's logsumexp."""
    # The library counts every choice of a token in full: k times what the papers have.
    balance = [len(each) / TOP_K * load_balancing_loss_func((each,), EXPERTS, TOP_K) for each in logits]
    return torch.stack(balance).sum(), torch.cat(logits).logsumexp(-1).square().sum()


@pytest.mark.parametrize("packed", [False, True])
def test_losses_and_their_gradients_are_the_librarys_of_every_sequence(packed: bool) -> None:
    """Padding has no part in them, whatever its logits are."""
    own = [drawn(n, EXPERTS, seed=n).requires_grad_() for n in LENGTHS]
    padding = [drawn(max(LENGTHS) - n if not packed else 0, EXPERTS, seed=9) for n in LENGTHS]
    logits = torch.cat([torch.cat(pair) for pair in zip(own, padding, strict=True)])
    losses = router.losses(logits, logits.topk(TOP_K).indices, membership(packed=packed))
    expected = losses_of_each(own)
    torch.testing.assert_close(losses, torch.stack(expected))
    for index, weight in ((0, 2.0), (1, 0.3)):
        gradients = (
            torch.autograd.grad(weight * value, own, retain_graph=True) for value in (losses[index], expected[index])
        )
        for ours, theirs in zip(*gradients, strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("packed", [False, True])
def test_replayed_experts_get_the_weights_that_the_router_gives_them(make_model, packed: bool) -> None:
    """Where nothing is replayed, the router chooses. Its gradient is that of the weights of the replayed experts."""
    gate = adapt(make_model(experts=EXPERTS)).model.layers[0].mlp.gate
    hidden = drawn(3, gate.weight.shape[1]) if packed else drawn(1, 3, gate.weight.shape[1])
    _, _, own = gate(hidden)
    others = torch.tensor([[next(e for e in range(EXPERTS) if e not in row), row[0]] for row in own.tolist()])
    replayed = torch.where(torch.tensor([[True], [False], [True]]), others, router.NO_CHOICE).to(torch.int16)
    _, weights, chosen = gate(hidden, replayed)
    assert chosen.tolist() == [others[0].tolist(), own[1].tolist(), others[2].tolist()]
    probabilities = torch.nn.functional.linear(hidden.reshape(3, -1), gate.weight).softmax(-1).gather(1, chosen)
    expected = probabilities / probabilities.sum(-1, keepdim=True)
    torch.testing.assert_close(weights, expected)
    slopes = [torch.autograd.grad(each[:, 0].sum(), gate.weight, retain_graph=True)[0] for each in (weights, expected)]
    torch.testing.assert_close(*slopes)
    assert float(slopes[0].abs().max()) > 0


def test_replayed_experts_with_no_probability_left_still_have_weights() -> None:
    """A softmax over all experts would be 0 for them, and their weights 0 / 0."""
    gate = torch.nn.Module()
    gate.weight, gate.top_k = torch.nn.Parameter(torch.tensor([[200.0], [0.0], [-1.0]])), 2
    _, weights, _ = router.route(gate, torch.ones(1, 1), torch.tensor([[1, 2]]))
    torch.testing.assert_close(weights, torch.tensor([[0.0, -1.0]]).softmax(-1))


def test_experts_that_are_used_alike_have_a_loss_of_one_for_each_token() -> None:
    """And equal logits c have (c + log E)²."""
    logits = torch.full((sum(LENGTHS), EXPERTS), 0.7)
    chosen = torch.arange(sum(LENGTHS) * TOP_K).view(-1, TOP_K) % EXPERTS
    balance, z = router.losses(logits, chosen, membership(packed=True))
    assert float(balance) == pytest.approx(sum(LENGTHS))
    assert float(z) == pytest.approx(sum(LENGTHS) * (0.7 + math.log(EXPERTS)) ** 2)


def test_one_expert_that_takes_all_has_the_number_of_experts() -> None:
    logits = torch.zeros(sum(LENGTHS), EXPERTS)
    logits[:, 3] = 100.0
    balance, _ = router.losses(logits, torch.full((sum(LENGTHS), 1), 3), membership(packed=True))
    assert float(balance) == pytest.approx(sum(LENGTHS) * EXPERTS)


@pytest.mark.parametrize("packed", [False, True])
def test_a_token_that_stands_for_no_sample_has_no_losses(packed: bool) -> None:
    inputs = ModelInput.of_text([torch.zeros(1, dtype=torch.int64)], packed=packed, device="cpu")
    none = Membership.of(inputs, torch.tensor([0]), None)
    assert not router.losses(drawn(1, EXPERTS), torch.tensor([[0, 1]]), none).any()


def test_a_bfloat16_model_routes_in_float32(make_model) -> None:
    gate = adapt(make_model(experts=4).bfloat16()).model.layers[0].mlp.gate
    hidden = drawn(50, gate.hidden_dim).bfloat16()
    logits, weights, chosen = gate(hidden)
    exact = hidden.double() @ gate.weight.double().T
    torch.testing.assert_close(logits, exact.float(), atol=1e-6, rtol=1e-5)
    expected = exact.softmax(-1).topk(gate.top_k)
    assert torch.equal(chosen, expected.indices)
    torch.testing.assert_close(weights, (expected.values / expected.values.sum(-1, keepdim=True)).float())

"""The triangular systems of the gated delta rule against torch's solver in float64: products, and their gradients."""

import pytest
import torch
from torch import Tensor

from qwen35_trainer.models.qwen3_5 import delta_rule, triangular
from qwen35_trainer.models.qwen3_5.triangular import SolveByProducts, inverse

CHUNK, CHANNELS, SYSTEMS = 64, 128, 4
KEYS = ["random", "similar", "alike", "equal", "opposite", "of four directions"]
MAX_ERROR = 3e-6
"""Of the largest value. torch's solver in float32 has up to 1.2e-6 on these systems, the products have up to 6e-7."""


def system_of(kind: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A chunk's system and right-hand sides in float64, as `delta_rule.chunked` builds them, without rounding."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=g)

    keys, beta = normal(SYSTEMS, CHUNK, CHANNELS), torch.rand(SYSTEMS, CHUNK, dtype=torch.float64, generator=g)
    decay = -0.03 * torch.rand(SYSTEMS, CHUNK, dtype=torch.float64, generator=g)
    common = normal(SYSTEMS, 1, CHANNELS)
    if kind == "similar":
        keys = common + 0.5 * keys
    if kind in ("alike", "opposite"):
        keys = common + 0.01 * keys
    if kind == "equal":
        keys = common.expand_as(keys)
    if kind == "opposite":
        keys = keys * (2 * torch.randint(0, 2, (SYSTEMS, CHUNK, 1), generator=g) - 1)
    if kind == "of four directions":
        keys = keys * (torch.arange(CHANNELS) < 4)
    if kind not in ("random", "similar"):
        beta, decay = 0.95 + 0.05 * beta, 0 * decay
    keys = keys / keys.norm(dim=-1, keepdim=True)
    total = decay.cumsum(-1)
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp().tril()
    weighted = keys * beta.unsqueeze(-1)
    right = torch.cat((normal(SYSTEMS, CHUNK, CHANNELS), weighted * total.exp().unsqueeze(-1)), dim=-1)
    # What float32 receives is what float64 is compared with: only the errors of the solvers count.
    return ((weighted @ keys.mT) * between).float().double(), right.float().double()


def solved(solve, system: Tensor, right: Tensor) -> list[Tensor]:
    """The solution, and the gradients of system and right-hand sides."""
    system, right = system.clone().requires_grad_(), right.clone().requires_grad_()
    solution = solve(system, right)
    solution.backward(torch.randn(solution.shape, generator=torch.Generator().manual_seed(1)).to(solution))
    return [solution.detach(), system.grad.tril(-1), right.grad]


def by_solver(system: Tensor, right: Tensor) -> Tensor:
    return torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)


@pytest.mark.parametrize("keys", KEYS)
def test_products_in_float32_are_as_close_to_float64_as_the_solver(keys):
    system, right = system_of(keys)
    expected = solved(by_solver, system, right)
    actual = solved(SolveByProducts.apply, system.float(), right.float())
    for own, exact in zip(actual, expected, strict=True):
        assert float((own.double() - exact).abs().max() / exact.abs().max()) < MAX_ERROR


def test_the_product_of_powers_would_lose_every_digit():
    """(I - L)(I + L²)(I + L⁴)… is why blocks are inverted instead: the powers of L cancel where keys are alike."""
    system, right = system_of("alike")
    powers = -system.float().tril(-1)
    inverted = torch.eye(CHUNK) + powers
    for _ in range(5):
        powers = powers @ powers
        inverted = inverted @ (torch.eye(CHUNK) + powers)
    exact = by_solver(system, right)
    assert float(((inverted @ right.float()).double() - exact).abs().max() / exact.abs().max()) > 1e3


@pytest.mark.parametrize("length", [1, 2, 3, 5, 31, 63, 64])
def test_chunks_of_any_length_are_inverted(length):
    system, _ = system_of("similar")
    system = system[:, :length, :length]
    whole = system.tril(-1) + torch.eye(length, dtype=torch.float64)
    torch.testing.assert_close(inverse(system) @ whole, torch.eye(length, dtype=torch.float64).expand_as(whole))


def test_gradients_are_those_that_finite_differences_give():
    g = torch.Generator().manual_seed(2)
    system = torch.rand(2, 5, 5, dtype=torch.float64, generator=g).requires_grad_()
    right = torch.randn(2, 5, 3, dtype=torch.float64, generator=g).requires_grad_()
    assert torch.autograd.gradcheck(SolveByProducts.apply, (system, right))


def test_what_is_on_and_above_the_diagonal_is_not_read():
    system, right = (x.float() for x in system_of("similar"))
    filled = system + torch.full_like(system, 7.0).triu()
    assert torch.equal(SolveByProducts.apply(filled, right), SolveByProducts.apply(system, right))


@pytest.mark.parametrize("length", [3, 64, 150])
def test_the_delta_rule_without_a_solver_gives_the_same_outputs_and_gradients(monkeypatch, length):
    g = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(2, length, 3, n, generator=g) for n in (8, 8, 12))
    inputs = [query, key, value, -0.03 * torch.rand(2, length, 3, generator=g), torch.rand(2, length, 3, generator=g)]

    def results() -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        output, state = delta_rule.chunked(*leaves)
        (output.square().sum() + state.square().sum()).backward()
        return [output, state, *(leaf.grad for leaf in leaves)]

    expected = results()
    monkeypatch.setattr(triangular, "WITHOUT_SOLVER", {"cpu"})
    monkeypatch.setattr(torch.linalg, "solve_triangular", None)
    for own, other in zip(results(), expected, strict=True):
        torch.testing.assert_close(own, other, atol=2e-5, rtol=1e-4)

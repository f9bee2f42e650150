"""Losses of routers, in every layout, against the library's model with the losses of the papers, and against those that megatron-core has."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.distributed.distance import distance
from tests.distributed.group import Group
from tests.distributed.samples import batch_of, spec_of
from tests.distributed.test_parity import TEXT, library_model, scores_of
from tests.engines.megatron.test_parity import GRADIENTS, TOTAL, joined
from tests.models.rounding import allowed, in_float64

pytestmark = pytest.mark.processes

BALANCE, Z = 0.5, 0.1
"""Weights of the losses, large enough to move the gradients."""
TENSOR = {"tensor": 2, "sequence": True}
MICRO = {"batch": {"microBatchSequences": 4}}
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "1 process, micro-batch 1": (1, {}, {}),
    "1 process, micro-batch 4, recomputed": (1, {}, MICRO | {"activationCheckpointing": True}),
    "tensor 2, expert 2": (2, TENSOR | {"expert": 2}, MICRO),
    "pipeline 2, virtual 2": (2, {"pipeline": 2, "virtual": 2}, {"batch": {"microBatchSequences": 3}}),
    "tensor 2, pipeline 2, expert 2, recomputed": (
        4,
        TENSOR | {"pipeline": 2, "expert": 2},
        MICRO | {"activationCheckpointing": True},
    ),
    "tensor 2, expert 2, data 2": (4, TENSOR | {"expert": 2}, MICRO),
}


@dataclass(frozen=True)
class ClosedForm:
    """Of one batch: the whole loss, both losses of routers per token and layer, and the gradients."""

    loss: float
    balance: float
    z: float
    gradients: dict[str, Tensor]


def of_sequence(logits: Tensor, chosen: Tensor) -> Tensor:
    """Load balancing and z loss of the tokens of one sequence, (tokens, experts), with k chosen experts, (tokens, k), each summed
    over the tokens. Switch Transformer, eq. 4-6, with k choices for each token; ST-MoE, eq. 5.
    """
    tokens, experts = logits.shape
    choices = torch.bincount(chosen.flatten(), minlength=experts)
    balance = experts * (choices / chosen.numel() * logits.softmax(-1).mean(0)).sum()
    return torch.stack((tokens * balance, logits.logsumexp(-1).square().sum()))


@cache
def closed_form(*, float64: bool = False, router: bool = True) -> ClosedForm:
    model = library_model("MoE")
    model = in_float64(model) if float64 else model
    batch, seen = batch_of(8, 0, supervised=True), list[Tensor]()
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_pre_hook(
            lambda gate, hidden: seen.append(F.linear(hidden[0].flatten(0, -2), gate.weight))
        )
    objective = -sum(scores.sum() for scores in scores_of(model, batch)) / int(batch.trainable.sum())
    layers, top_k = len(model.model.layers), model.config.num_experts_per_tok
    read = batch.lengths - 1  # the model does not read the last token of a sequence
    routed = [logits[: read[each // layers]] for each, logits in enumerate(seen)]
    sums = sum(of_sequence(logits, logits.topk(top_k).indices) for logits in routed)
    balance, z = sums / int(read.sum())
    loss = objective + (BALANCE * balance + Z * z if router else 0.0)
    loss.backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return ClosedForm(loss.item(), balance.item() / layers, z.item() / layers, gradients)


def test_the_losses_matter() -> None:
    """Otherwise the other tests would pass without them."""
    with_losses, without = closed_form(), closed_form(router=False)
    assert with_losses.loss > 1.5 * without.loss
    name = "model.layers.0.mlp.gate.weight"
    change = with_losses.gradients[name] - without.gradients[name]
    assert float(change.norm()) > 0.1 * float(without.gradients[name].norm())


@pytest.mark.parametrize("name", LAYOUTS)
def test_loss_and_gradients_are_those_of_the_closed_form(groups: Callable[[int], Group], name: str) -> None:
    ranks, layout, train = LAYOUTS[name]
    spec = spec_of(ranks, random=TEXT["MoE"], router={"loadBalancingLoss": BALANCE, "zLoss": Z}, **train)
    results = groups(ranks).run("train", spec=spec, batches=[batch_of(8, 0, supervised=True)], layout=layout)
    assert all(each["metrics"] == results[0]["metrics"] for each in results), "any rank can report"
    [metrics], expected = results[0]["metrics"], closed_form()
    gradients = joined([part for each in results for part in each["gradients"]], expected.gradients)
    norm = float(torch.stack([each.norm() for each in expected.gradients.values()]).norm())
    scale = allowed(expected.gradients, closed_form(float64=True).gradients, GRADIENTS)
    print(f"\n| {name} | {distance(gradients, expected.gradients, scale):.0e} |", end="")
    assert metrics.loss == pytest.approx(expected.loss, rel=TOTAL)
    assert metrics.gradient_norm == pytest.approx(norm, rel=TOTAL)
    assert metrics.means["router_load_balancing"] == pytest.approx(expected.balance, rel=TOTAL)
    assert metrics.means["router_z"] == pytest.approx(expected.z, rel=TOTAL)
    assert distance(gradients, expected.gradients, scale) <= GRADIENTS


@pytest.mark.skipif(
    version("megatron-core").startswith("0.18."),
    reason="0.18 divides its own loss of sequences by their number (mended in 0.19)",
)
def test_sequences_of_one_length_have_the_gradients_of_megatron_cores_own_losses(
    groups: Callable[[int], Group],
) -> None:
    ours, theirs = groups(1).run("gradients_of_routers", weights=(BALANCE, Z))[0]
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, atol=1e-6, rtol=1e-5)
        assert float(other.norm()) > 1e-2


def test_losses_of_a_model_without_routers_are_refused_by_name(groups: Callable[[int], Group]) -> None:
    spec = spec_of(1, random={}, router={"zLoss": 0.1})
    with pytest.raises(
        AssertionError, match=r"spec\.train\.router: the model's type is qwen3_5_text, which has no router"
    ):
        groups(1).run("train", spec=spec, batches=[])

"""The check at load: what keeps sequences apart passes, what leaks is refused with what was measured."""

import math
from contextlib import nullcontext
from functools import partial

import pytest
import torch

from qwen35_trainer.models.qwen3_5.adapter import adapt
from qwen35_trainer.models.qwen3_5.buckets import Split
from qwen35_trainer.models.qwen3_5.packing import NEIGHBOUR_TOLERANCE, PackingDifference, PackingInexact, check_packing
from tests.models import kernels_stand_in
from tests.models.scenes import vision_language

EXPERTS = [pytest.param(0, id="dense"), pytest.param(4, id="mixture of experts")]
DTYPES = [torch.float32, torch.bfloat16]
LEAKS = r"other neighbours in the row: log-probs differ by [\d.]+ of their spread .*removePadding"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("apart", [True, False], ids=["at its boundaries", "nowhere"])
def test_a_row_must_be_taken_apart_at_its_boundaries(make_model, monkeypatch, experts, dtype, apart):
    of = Split.of
    if not apart:
        monkeypatch.setattr(Split, "of", lambda lengths, device: of([sum(lengths)], device))
    with nullcontext() if apart else pytest.raises(PackingInexact, match=LEAKS):
        check_packing(adapt(make_model(experts=experts).to(dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("leak", ["none", "state", "convolution", "attention"])
def test_a_kernel_that_ignores_boundaries_is_refused_and_no_other(make_model, monkeypatch, experts, dtype, leak):
    kernels_stand_in.install(
        monkeypatch,
        delta_rule=kernels_stand_in.leaky_delta_rule if leak == "state" else kernels_stand_in.chunk_gated_delta_rule,
        convolution=kernels_stand_in.leaky_convolution if leak == "convolution" else kernels_stand_in.causal_conv1d,
        attention=kernels_stand_in.leaky_attention if leak == "attention" else kernels_stand_in.varlen_attn,
    )
    with nullcontext() if leak == "none" else pytest.raises(PackingInexact, match=LEAKS):
        check_packing(adapt(make_model(experts=experts).to(dtype)))


def test_fresh_weights_that_forget_fast_do_not_hide_a_leak(make_model, monkeypatch):
    """Small random weights and the library's own decay: the hardest case that was measured."""
    kernels_stand_in.install(monkeypatch, delta_rule=kernels_stand_in.leaky_delta_rule)
    model = make_model().bfloat16()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(0.1)
    for layer in model.model.layers[:3]:
        layer.linear_attn.A_log.data.uniform_(0.01, 16).log_()
    with pytest.raises(PackingInexact, match="other neighbours"):
        check_packing(adapt(model))


def test_a_kernel_that_is_wrong_without_leaking_is_refused_too(make_model, monkeypatch):
    """Nothing crosses a boundary, but behind the first one every output is a tenth too small."""

    def too_small(*tensors, cu_seqlens=None, **settings):
        output, none = kernels_stand_in.chunk_gated_delta_rule(*tensors, cu_seqlens=cu_seqlens, **settings)
        return (output if cu_seqlens is None else torch.cat((output[:, :3], output[:, 3:] * 0.9), 1)), none

    kernels_stand_in.install(monkeypatch, delta_rule=too_small)
    with pytest.raises(
        PackingInexact, match=r"^a packed row is not exact here, from separate sequences, in torch\.float32"
    ):
        check_packing(adapt(make_model()))


def test_not_a_number_is_refused(make_model, monkeypatch):
    def broken(*tensors, cu_seqlens=None, **settings):
        output, none = kernels_stand_in.chunk_gated_delta_rule(*tensors, cu_seqlens=cu_seqlens, **settings)
        return (output if cu_seqlens is None else output * math.nan), none

    kernels_stand_in.install(monkeypatch, delta_rule=broken)
    with pytest.raises(PackingInexact, match="differ by nan"):
        check_packing(adapt(make_model()))


class Leak(torch.autograd.Function):
    """The right values; the gradient of a row that is one sequence."""

    @staticmethod
    def forward(ctx, right, leaked):
        return right.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None, gradient


def rule_with_leaking_gradient(*tensors, cu_seqlens=None, **settings):
    right, none = kernels_stand_in.chunk_gated_delta_rule(*tensors, cu_seqlens=cu_seqlens, **settings)
    return Leak.apply(right, kernels_stand_in.leaky_delta_rule(*tensors, **settings)[0]), none


@pytest.mark.parametrize("trained", ["all of it", "a part"])
@pytest.mark.parametrize("leaking", [False, True])
def test_a_leak_of_the_gradient_alone_is_refused_by_what_trains(make_model, monkeypatch, leaking, trained):
    rule = rule_with_leaking_gradient if leaking else kernels_stand_in.chunk_gated_delta_rule
    kernels_stand_in.install(monkeypatch, delta_rule=rule)
    model = adapt(make_model())
    if trained == "a part":
        model.requires_grad_(False)
        model.model.layers[1].mlp.requires_grad_(True)
    refused = pytest.raises(PackingInexact, match=r"log-probs differ by 0 .*gradients by")
    with refused if leaking else nullcontext():
        check_packing(model)


def test_the_check_leaves_no_gradient_and_the_weights_as_they_were(make_model):
    model = adapt(make_model())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    check_packing(model)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_both_measures_must_be_within_the_bound():
    assert NEIGHBOUR_TOLERANCE.within(NEIGHBOUR_TOLERANCE)
    assert not PackingDifference(NEIGHBOUR_TOLERANCE.log_prob * 1.01, 0.0).within(NEIGHBOUR_TOLERANCE)
    assert not PackingDifference(0.0, NEIGHBOUR_TOLERANCE.gradient * 1.01).within(NEIGHBOUR_TOLERANCE)
    assert not PackingDifference(math.nan, 0.0).within(NEIGHBOUR_TOLERANCE)
    assert not PackingDifference(0.0, math.nan).within(NEIGHBOUR_TOLERANCE)


@pytest.mark.parametrize("leaks", [False, True], ids=["apart", "as one"])
def test_pictures_of_a_row_must_be_kept_apart_by_the_tower(monkeypatch, leaks):
    model = adapt(vision_language())
    if leaks:
        for block in model.model.visual.blocks:
            monkeypatch.setattr(block, "forward", partial(_all_patches_as_one_picture, block.forward))
    with pytest.raises(PackingInexact, match=LEAKS) if leaks else nullcontext():
        check_packing(model, pictures=True)
    check_packing(model)  # a text has no picture that could leak
    assert all(parameter.grad is None for parameter in model.parameters())


def _all_patches_as_one_picture(forward, hidden, cu_seqlens, **settings):
    return forward(hidden, cu_seqlens=cu_seqlens[[0, -1]], **settings)

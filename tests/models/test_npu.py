"""Ascend kernels against the library, through a stand-in that computes what the operators' documentation says."""

import copy
import sys
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from qwen35_trainer.models.qwen3_5 import npu
from tests.models import torch_npu_stand_in as operators
from tests.models.scenes import as_the_library_wants, show, vision_language

EXPERTS = [pytest.param(0, id="dense"), pytest.param(4, id="mixture of experts")]


def installed(model: Any) -> Any:
    other = copy.deepcopy(model)
    npu.install(other, operators, device="cpu")
    return other


def test_the_norm_adds_one_to_its_weight_and_computes_in_float32(make_model):
    norm = make_model().model.norm
    norm.weight.data.normal_()
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(3, 5, 32, dtype=dtype) * 30
        actual = npu.rms_norm(operators, norm, x)
        assert actual.dtype == dtype
        torch.testing.assert_close(actual, norm(x))
    plain = operators.npu_rms_norm(x.float(), norm.weight)[0]
    assert (plain - norm(x).float()).abs().max() > 0.5, "a norm that forgets the one would show"


def test_the_gated_norm_takes_its_weight_as_it_stands_and_the_gate_through_silu(make_model):
    norm = make_model().model.layers[0].linear_attn.norm
    norm.weight.data.normal_()
    x, gate = torch.randn(7, 12), torch.randn(7, 12)
    torch.testing.assert_close(npu.gated_rms_norm(operators, norm, x, gate), norm(x, gate))
    low = (x.bfloat16(), gate.bfloat16())
    torch.testing.assert_close(npu.gated_rms_norm(operators, norm, *low), norm(*low), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("device", ["cpu", "npu"], ids=["on the device", "elsewhere"])
def test_only_the_first_channels_turn(make_model, device):
    from transformers.models.qwen3_5.modeling_qwen3_5 import apply_rotary_pos_emb

    model = make_model()
    npu.install(model, operators, device=device)
    query, key = torch.randn(2, 6, 4, 32), torch.randn(2, 6, 2, 32)
    angles = torch.randn(2, 6, 8)
    cos, sin = angles.cos(), angles.sin()
    expected = apply_rotary_pos_emb(query, key, cos, sin, unsqueeze_dim=2)
    rotate = model.model.layers[3].self_attn.rotate
    actual = [rotate(x, cos.unsqueeze(2), sin.unsqueeze(2)) for x in (query, key)]
    for own, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(own, other)
    assert torch.equal(actual[0][..., 8:], query[..., 8:])


@pytest.mark.parametrize("tokens", [1, 2, 40], ids=["one token", "experts without tokens", "all experts"])
def test_experts_and_their_gradients_are_those_of_the_library(make_model, tokens):
    module = make_model(experts=8).model.layers[0].mlp.experts
    x = torch.randn(tokens, 32)
    weights, chosen = torch.rand(tokens, 8).topk(2)
    results = []
    for forward in (module, lambda *a: npu.experts(operators, module, *a)):
        leaf, routed = x.clone().requires_grad_(), weights.clone().requires_grad_()
        module.zero_grad()
        output = forward(leaf, chosen, routed)
        output.square().sum().backward()
        results.append((output, leaf.grad, routed.grad, module.gate_up_proj.grad, module.down_proj.grad))
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_the_grouped_product_has_the_gradient_that_finite_differences_give():
    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 3, 5, dtype=torch.float64, requires_grad=True)
    counts = torch.tensor([2, 0, 3, 1])
    assert torch.autograd.gradcheck(lambda a, b: npu.GroupedMatmul.apply(operators, a, b, counts), (x, weight))


def test_a_frozen_expert_weight_costs_no_second_product(monkeypatch):
    kinds = []
    original = operators.npu_grouped_matmul
    monkeypatch.setattr(
        operators, "npu_grouped_matmul", lambda *a, **k: kinds.append(k["group_type"]) or original(*a, **k)
    )
    x = torch.randn(4, 3, requires_grad=True)
    npu.GroupedMatmul.apply(operators, x, torch.randn(2, 3, 5), torch.tensor([1, 3])).sum().backward()
    assert kinds == [0, 0]


@pytest.mark.parametrize("experts", EXPERTS)
def test_a_whole_model_and_its_gradients_are_those_of_the_library(experts):
    model = vision_language(experts=experts)
    tokens, shown = show([3, (1, 4, 6), 8])
    results = []
    for each in (model, installed(model)):
        logits = each(**as_the_library_wants(tokens, shown)).logits
        F.cross_entropy(logits[0, :-1], tokens[1:]).backward()
        results.append((logits, each))
    (expected, _), (actual, other) = results
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    for (name, own), reference in zip(other.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(
            own.grad, reference.grad, atol=1e-5, rtol=1e-3, msg=lambda m, name=name: f"{name}: {m}"
        )


def test_an_mlp_and_its_gradients_are_those_of_the_library(make_model):
    """The kernel takes the gate first: the other order would compute silu of the other factor."""
    module = make_model().model.layers[0].mlp
    x, results = torch.randn(2, 5, 32), []
    for forward in (module, lambda leaf: npu.mlp(operators, module, leaf)):
        leaf = x.clone().requires_grad_()
        module.zero_grad()
        output = forward(leaf)
        output.square().sum().backward()
        results.append((output, leaf.grad, *(each.grad.clone() for each in module.parameters())))
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


def test_each_mlp_runs_its_activation_in_the_kernel(make_model, monkeypatch, tokens):
    model, calls = make_model(), []
    npu.install(model, operators, device="cpu")
    plain = operators.npu_swiglu
    monkeypatch.setattr(operators, "npu_swiglu", lambda *a, **k: calls.append(k) or plain(*a, **k))
    model(input_ids=tokens(1, 5), use_cache=False)
    assert calls == [{"dim": -1}] * 4, "one for each layer"


def test_every_norm_and_every_expert_layer_is_replaced_on_the_instance_alone(make_model):
    model, other = make_model(experts=4), make_model(experts=4)
    npu.install(model, operators, device="cpu")
    names = {name for name, module in model.named_modules() if "forward" in vars(module)}
    norms = {name for name, _ in model.named_modules() if name.endswith("norm")}
    assert norms <= names
    parts = ("experts", "shared_expert")
    assert names - norms == {f"model.layers.{i}.mlp.{part}" for i in range(4) for part in parts}
    assert not any("forward" in vars(module) or "rotate" in vars(module) for module in other.modules())


def test_modules_that_fsdp_has_renamed_are_known_too(make_model):
    model = make_model()
    norm = model.model.norm
    norm.__class__ = type(f"FSDP{type(norm).__name__}", (type(norm),), {})
    npu.install(model, operators, device="cpu")
    assert "forward" in vars(norm)


def test_inputs_on_another_device_take_the_way_of_the_library(make_model, tokens, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", operators)
    model = make_model(experts=4)
    ids = tokens(2, 9)
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        assert npu.adapt(model)
        for name in ("npu_rms_norm", "npu_grouped_matmul"):
            monkeypatch.delattr(operators, name)
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, expected)


def test_without_torch_npu_nothing_is_replaced(make_model):
    model = make_model()
    assert not npu.adapt(model)
    assert not any("forward" in vars(module) for module in model.modules())

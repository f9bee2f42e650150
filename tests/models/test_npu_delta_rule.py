"""Kernels of `fla_npu` are used where they compute what torch computes. A stand-in has the signature of MindSpeed's function."""

import importlib.machinery
import logging
import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from qwen35_trainer.models.qwen3_5 import npu_delta_rule


def module(name: str) -> ModuleType:
    result = ModuleType(name)
    result.__spec__ = importlib.machinery.ModuleSpec(name, None)
    return result


@pytest.fixture
def install(monkeypatch):
    """install(rule, "fla_npu", …): the function `rule` as MindSpeed's, and the packages that are installed. Returns the calls."""
    calls: list[dict[str, object]] = []

    def install(rule, *packages: str) -> list[dict[str, object]]:
        def chunk_gated_delta_rule(
            query: Tensor, key: Tensor, value: Tensor, **settings: object
        ) -> tuple[Tensor, None]:
            assert query.shape == key.shape, "as many key heads as value heads"
            assert query.shape[:3] == value.shape[:3] == settings["g"].shape == settings["beta"].shape
            assert all(x.is_contiguous() for x in (query, key, value, settings["g"], settings["beta"]))
            assert settings["beta"].dtype == value.dtype == query.dtype
            calls.append(settings)
            return rule(query, key, value, settings["g"], settings["beta"]), None

        function = module(npu_delta_rule.FUNCTION)
        function.chunk_gated_delta_rule = chunk_gated_delta_rule  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, npu_delta_rule.FUNCTION, function)
        for name in packages:
            monkeypatch.setitem(sys.modules, name, module(name))
        monkeypatch.setattr(npu_delta_rule, "DEVICE", "cpu")
        return calls

    npu_delta_rule._checked_rule.cache_clear()
    yield install
    npu_delta_rule._checked_rule.cache_clear()


def right(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    # The library's function divides the query by √K, as fla's kernels do.
    return torch_chunk_gated_delta_rule(query, key, value, g, beta)[0]


def inputs(dtype: torch.dtype = torch.bfloat16, channels: int = 128) -> list[Tensor]:
    g = torch.Generator().manual_seed(5)
    query, key = (torch.randn(2, 9, 1, channels, generator=g).to(dtype) for _ in range(2))
    value = torch.randn(2, 9, 2, 128, generator=g).to(dtype)
    return [query, key, value, -0.03 * torch.rand(2, 9, 2, generator=g), torch.rand(2, 9, 2, generator=g)]


def test_kernels_that_agree_with_torch_are_used(install):
    calls = install(right, "fla_npu", "mindspeed")
    expected = npu_delta_rule._by_torch(*inputs())
    actual = npu_delta_rule.outputs(*inputs())
    npu_delta_rule.outputs(*inputs())
    assert len(calls) == 3, "one call checks, and each use is one"
    settings = calls[-1]
    assert settings["use_qk_l2norm_in_kernel"] is settings["output_final_state"] is False
    assert settings["initial_state"] is settings["cu_seqlens"] is None
    assert float((actual - expected).norm() / expected.norm()) < 0.02


def wrong_layout(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    return right(query, key, value, g.flip(1), beta)


class WrongGradient(torch.autograd.Function):
    """The gradient of the decay is lost, and outputs are right."""

    @staticmethod
    def forward(ctx, g: Tensor) -> Tensor:
        return g.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return torch.zeros_like(gradient)


def wrong_gradient(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    return right(query, key, value, WrongGradient.apply(g), beta)


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (lambda *tensors: right(*tensors) * 128**0.5, "outputs by 1031%"),
        (wrong_layout, "outputs by"),
        (wrong_gradient, "gradients of log_decay by 100%"),
        (lambda *tensors: right(*tensors) * torch.nan, "outputs by nan%"),
    ],
    ids=["a scale", "a layout", "a gradient", "nothing finite"],
)
def test_kernels_that_compute_something_else_are_not_used_and_the_log_says_so(install, caplog, rule, reason):
    calls = install(rule, "fla_npu", "mindspeed")
    with caplog.at_level(logging.WARNING):
        assert torch.equal(npu_delta_rule.outputs(*inputs()), npu_delta_rule._by_torch(*inputs()))
    assert len(calls) == 1
    assert "the kernels of fla_npu are not used: they differ from torch's results: " in caplog.text
    assert reason in caplog.text


@pytest.mark.parametrize("packages", [(), ("mindspeed",), ("fla_npu",)], ids=["neither", "MindSpeed", "fla_npu"])
def test_both_packages_are_needed(install, packages):
    calls = install(right, *packages)
    assert torch.equal(npu_delta_rule.outputs(*inputs()), npu_delta_rule._by_torch(*inputs()))
    assert calls == []


@pytest.mark.parametrize("other", [{"dtype": torch.float32}, {"channels": 64}], ids=["float32", "short keys"])
def test_inputs_that_the_kernels_do_not_take_are_computed_by_torch(install, other):
    calls = install(right, "fla_npu", "mindspeed")
    assert torch.equal(npu_delta_rule.outputs(*inputs(**other)), npu_delta_rule._by_torch(*inputs(**other)))
    assert calls == []

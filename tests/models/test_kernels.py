"""The paths through accelerators' kernels, by stand-ins that do their documented arithmetic. Hardware: `tests/gpu`."""

from dataclasses import replace

import pytest
import torch

from qwen35_trainer.data.expert_choices import NO_CHOICE
from qwen35_trainer.models.qwen3_5 import kernels
from qwen35_trainer.models.qwen3_5.adapter import adapt
from qwen35_trainer.models.qwen3_5.buckets import Split
from qwen35_trainer.models.qwen3_5.inputs import ModelInput
from qwen35_trainer.models.qwen3_5.shared_prompts import SharedPrompts
from tests.models import kernels_stand_in
from tests.models.test_forward import rows_of

LENGTHS = [5, 1, 70, 2, 30]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("experts", [0, 4])
def test_scores_and_gradients_are_those_without_kernels(make_model, tokens, monkeypatch, experts, packed):
    sequences, targets, results = [tokens(n, seed=n) for n in LENGTHS], tokens(sum(LENGTHS)), []
    inputs = ModelInput.of_text(sequences, packed=packed, device="cpu")
    for with_kernels in (False, True):
        if with_kernels:
            kernels_stand_in.install(monkeypatch)
        model = adapt(make_model(experts=experts))
        scores = model(inputs, rows_of(LENGTHS, packed=packed), targets)
        scores.log_probs.mean().backward()
        results.append([scores.log_probs.detach(), *(p.grad for p in model.parameters())])
    for own, expected in zip(*results, strict=True):
        torch.testing.assert_close(own, expected, atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize("sharing", [False, True], ids=["apart", "shared prompt"])
def test_all_layers_give_their_kernels_the_same_boundaries(make_model, tokens, monkeypatch, sharing):
    """flash-linear-attention remembers by object how it divides them into chunks, which it does on the host."""
    seen: list[torch.Tensor] = []

    def convolution(*tensors, cu_seqlens, **settings):
        seen.append(cu_seqlens)
        return kernels_stand_in.causal_conv1d(*tensors, cu_seqlens=cu_seqlens, **settings)

    def delta_rule(*tensors, cu_seqlens, **settings):
        seen.append(cu_seqlens)
        return kernels_stand_in.chunk_gated_delta_rule(*tensors, cu_seqlens=cu_seqlens, **settings)

    kernels_stand_in.install(monkeypatch, convolution=convolution, delta_rule=delta_rule)
    sequences = [torch.cat((tokens(3), tokens(n, seed=n))) for n in (2, 4)]
    inputs = ModelInput.of_text(sequences, packed=True, device="cpu")
    if sharing:
        inputs = inputs.sharing(SharedPrompts.of([3, 3], [5, 7], [0, 0]))
    # With experts to replay, each layer has a layout of its own.
    inputs = replace(inputs, choices=torch.full((*inputs.tokens.shape, 4, 2), NO_CHOICE, dtype=torch.int16))
    adapt(make_model(experts=4))(inputs, torch.arange(5), tokens(5))
    assert len(seen) == 3 * (3 if sharing else 2)
    assert len({id(boundaries) for boundaries in seen}) == (3 if sharing else 1)


@pytest.mark.parametrize("with_kernels", [False, True])
def test_a_row_is_split_only_where_a_kernel_is_missing(make_model, tokens, monkeypatch, with_kernels):
    """Taking a row apart reads its lengths and gathers on the device: kernels spare it."""
    split, of = [], Split.of
    monkeypatch.setattr(Split, "of", lambda lengths, device: split.append(list(lengths)) or of(lengths, device))
    if with_kernels:
        kernels_stand_in.install(monkeypatch)
    inputs = ModelInput.of_text([tokens(4), tokens(3)], packed=True, device="cpu")
    adapt(make_model())(inputs, torch.arange(7), tokens(7))
    assert (not split) == with_kernels
    assert all(lengths == [4, 3] for lengths in split)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_has_no_kernels_whatever_is_installed(monkeypatch, dtype):
    monkeypatch.setattr(kernels, "_has_flash_linear_attention", lambda: True)
    x = torch.zeros(1, dtype=dtype)
    assert not kernels.has_delta_rule(x)
    assert not kernels.has_varlen_attention(x)


def test_float32_on_an_accelerator_has_none_either(monkeypatch):
    monkeypatch.setattr(kernels, "_has_flash_linear_attention", lambda: True)
    full, half = (torch.empty(1, dtype=dtype, device="meta") for dtype in (torch.float32, torch.bfloat16))
    assert not kernels.has_delta_rule(full)
    assert kernels.has_delta_rule(half)


@pytest.mark.parametrize(("installed", "used"), [("0.5.0", False), ("0.5.1", True), ("0.6.0", True)])
def test_a_flash_linear_attention_whose_gradients_may_be_wrong_is_not_used(monkeypatch, caplog, installed, used):
    monkeypatch.setattr(kernels, "version", {"fla-core": installed}.__getitem__)
    kernels._has_flash_linear_attention.cache_clear()
    assert kernels.has_delta_rule(torch.empty(1, dtype=torch.bfloat16, device="meta")) == used
    kernels._has_flash_linear_attention.cache_clear()
    assert [record.getMessage() for record in caplog.records] == (
        [] if used else ["fla-core 0.5.0 is not used: its gradients may be wrong; install 0.5.1 or newer"]
    )

"""What vLLM on NPUs gets: the calls and settings that the source of vllm-ascend 0.23.0.post1 requires. Neither it nor vLLM runs here."""

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from qwen35_trainer.manifest import VLLMSpec
from qwen35_trainer.rollout.vllm_core import CoreSettings, core_arguments
from qwen35_trainer.rollout.vllm_environment import set_variables
from qwen35_trainer.rollout.vllm_worker import (
    begin_replacement,
    finish_replacement,
    for_vllm,
    load_portion,
    restore_expert_layout,
)

ON_CPU_ALONE = {"kv_cache_memory_bytes"}


def test_weights_are_replaced_by_the_calls_of_vllm_ascends_own_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """`NPUWorker`: start_weight_update, update_weights and finish_weight_update."""
    calls: list[str] = []
    of_weights = {"model.norm.weight": torch.ones(4), "lm_head.weight": torch.ones(3, 4)}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = SimpleNamespace(tie_word_embeddings=False)
            self.packed_modules_mapping: dict[str, list[str]] = {}
            self.lm_head = nn.Linear(4, 3, bias=False, dtype=torch.bfloat16)

        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
            calls.append(f"load {[(name, str(tensor.dtype)) for name, tensor in weights]}")
            return {"lm_head.weight"}

    @contextlib.contextmanager
    def current_config(_: object) -> Iterator[None]:
        yield

    reload = ModuleType("vllm.model_executor.model_loader.reload")
    reload.initialize_layerwise_reload = lambda model: calls.append(f"initialize {type(model).__name__}")  # type: ignore[attr-defined]
    reload.finalize_layerwise_reload = lambda model, config: calls.append(f"finalize {config}")  # type: ignore[attr-defined]
    config = ModuleType("vllm.config")
    config.set_current_vllm_config = current_config  # type: ignore[attr-defined]
    layers = ModuleType("vllm.model_executor.layers.fused_moe.layer")
    layers.FusedMoE = type("FusedMoE", (nn.Module,), {})  # type: ignore[attr-defined]
    for module in (reload, config, layers):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    packages = ("", ".model_executor", ".model_executor.model_loader")
    packages += (".model_executor.layers", ".model_executor.layers.fused_moe")
    for name in (f"vllm{package}" for package in packages):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    model = Model()
    runner = SimpleNamespace(
        get_model=lambda: model, device=SimpleNamespace(type="npu"), model_config="its configuration"
    )
    of_model = SimpleNamespace(hf_config=SimpleNamespace(model_type="qwen3_5"))
    worker = SimpleNamespace(model_runner=runner, vllm_config=SimpleNamespace(model_config=of_model))
    begin_replacement(worker)
    load_portion(worker, for_vllm(of_weights, "qwen3_5", tied=False))
    assert finish_replacement(worker) == []
    assert calls == [
        "initialize Model",
        "load [('model.language_model.norm.weight', 'torch.bfloat16'), ('lm_head.weight', 'torch.bfloat16')]",
        "finalize its configuration",
    ]


def test_experts_have_the_layout_of_their_kernels_again_after_they_woke_up() -> None:
    experts, hidden, size = 3, 8, 5

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w13_weight = nn.Parameter(torch.randn(experts, hidden, 2 * size), requires_grad=False)
            self.w2_weight = nn.Parameter(torch.randn(experts, size, hidden), requires_grad=False)

    layer = Experts()
    before = {name: weight.data for name, weight in layer.named_parameters()}
    worker = SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: layer))
    for is_transposed in (False, True):
        if is_transposed:  # as `NPUWorker.wake_up` does
            for name, weight in before.items():
                setattr(layer, name, nn.Parameter(weight.transpose(1, 2), requires_grad=False))
        restore_expert_layout(worker)
        for name, weight in layer.named_parameters():
            assert weight.is_contiguous()
            assert weight.data_ptr() == before[name].data_ptr(), "kernels and graphs keep their memory"
            assert torch.equal(weight, before[name])


@pytest.mark.parametrize(("chosen", "used"), [(None, "0"), ("1", "1")])
def test_weights_keep_the_layout_in_which_vllm_ascend_replaces_them(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None, used: str
) -> None:
    monkeypatch.setattr(os, "environ", {} if chosen is None else {"VLLM_ASCEND_ENABLE_NZ": chosen})
    set_variables()
    assert os.environ["VLLM_ASCEND_ENABLE_NZ"] == used


@pytest.mark.parametrize(("devices", "executor"), [(1, "uni"), (4, "mp")])
def test_accelerators_get_a_share_of_their_memory_and_record_their_steps(devices: int, executor: str) -> None:
    config = SimpleNamespace()  # on accelerators, nothing is computed from the model's shape
    settings = CoreSettings(
        slots=4, max_length=64, seed=1, memory_fraction=0.6, on_cpu=False, devices=devices, options=VLLMSpec()
    )
    arguments = core_arguments(Path("folder"), config, settings)
    assert not ON_CPU_ALONE & arguments.keys()
    assert arguments["gpu_memory_utilization"] == 0.6
    assert arguments["enforce_eager"] is False
    assert (arguments["tensor_parallel_size"], arguments["distributed_executor_backend"]) == (devices, executor)
    assert not {"worker_cls", "device", "additional_config"} & arguments.keys(), "vllm-ascend chooses them"


@pytest.mark.parametrize(
    ("on_cpu", "slots", "options", "tokens"),
    [
        (False, 256, {}, 8192),
        (False, 10_000, {}, 10_000),
        (False, 256, {"maxBatchedTokens": 1024}, 1024),
        (False, 2, {}, 16),
        (False, 256, {"extraArguments": {"enable_chunked_prefill": False}}, 16_384),
        (True, 256, {}, None),
        (True, 4096, {}, 4096),
    ],
)
def test_a_step_computes_the_tokens_that_are_planned(
    monkeypatch: pytest.MonkeyPatch, on_cpu: bool, slots: int, options: dict[str, object], tokens: int | None
) -> None:
    """vLLM's default for an engine without a server is 2048 on every device, and it refuses fewer tokens than slots."""
    monkeypatch.setattr("qwen35_trainer.rollout.vllm_core._memory", lambda config, settings: {})
    length = 8 if slots == 2 else 16_384  # no step has more tokens than all sequences
    settings = CoreSettings(
        slots=slots, max_length=length, seed=1, memory_fraction=0.6, on_cpu=on_cpu, options=VLLMSpec(**options)
    )
    assert core_arguments(Path("folder"), SimpleNamespace(), settings).get("max_num_batched_tokens") == tokens

"""The order of the calls with which vLLM sleeps and wakes up, proved with a stand-in that records them.

vLLM's worker for CPUs cannot sleep. How much memory vLLM gives back has not been measured on a GPU.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qwen35_trainer.manifest import LoRASpec, ModelSpec
from qwen35_trainer.models.qwen3_5.build_model import configuration
from qwen35_trainer.models.qwen3_5.classes import without_weights
from qwen35_trainer.rollout import vllm
from qwen35_trainer.rollout.vllm import VLLMEngine
from qwen35_trainer.rollout.vllm_core import CoreSettings, core_arguments
from qwen35_trainer.weights.memory_change import MemoryChange

CONFIG = configuration(
    ModelSpec.model_validate({"name": "tiny", "source": {"random": {"layers": 2, "fullAttentionInterval": 2}}}),
    vocabulary=20,
    max_length=16,
    base=Path(),
)
IN_USE = {"awake": 80, "asleep": 6}


class Core:
    """Records calls in the place of vLLM's LLMEngine, of two devices."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.asleep = False
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(world_size=1), model_config=SimpleNamespace(hf_config=CONFIG)
        )

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep, level {level}")
        self.asleep = True

    def reset_encoder_cache(self) -> None:
        self.calls.append("reset_encoder_cache")

    def wake_up(self) -> None:
        self.calls.append("wake_up")
        self.asleep = False

    def collective_rpc(self, function: Callable[..., Any], timeout: float, args: Sequence[Any] = ()) -> list[Any]:
        self.calls.append(function.__name__)
        used = IN_USE["asleep" if self.asleep else "awake"]
        return [used] * 2 if function.__name__ == "memory_in_use" else [[]]


class Requests:
    """Records that a step in flight would have ended."""

    in_flight = False

    def __init__(self, core: Core) -> None:
        self._core = core

    def abort(self, names: Sequence[str]) -> None:
        pass

    def settle(self) -> list[Any]:
        self._core.calls.append("settle")
        return []


@pytest.fixture
def build(monkeypatch) -> Callable[..., tuple[VLLMEngine, Core]]:
    monkeypatch.setattr(vllm, "CoreRequests", Requests)
    monkeypatch.setattr(vllm, "CacheRoom", lambda core, length: None)
    monkeypatch.setattr(vllm, "VLLMProbe", lambda requests: SimpleNamespace(drop=lambda: None, running=False))
    monkeypatch.setattr(vllm, "AdapterSlot", lambda *arguments: SimpleNamespace(request=None))

    def make(**settings: Any) -> tuple[VLLMEngine, Core]:
        core = Core()
        return VLLMEngine(core, CONFIG, end_token=2, max_length=16, **{"on_cpu": False} | settings), core

    return make


def test_weights_are_lost_in_sleep_and_loaded_after_it(build):
    engine, core = build()
    weights = dict(without_weights(CONFIG).named_parameters())
    waking = ["wake_up", "restore_expert_layout"]
    replacing = ["begin_replacement", "load_portion", "finish_replacement"]
    engine.receive(weights, 1)
    engine.commit(1)
    assert engine.sleep() == MemoryChange(2 * IN_USE["awake"], 2 * IN_USE["asleep"])
    with pytest.raises(RuntimeError, match="no complete weights"):
        engine.step()
    engine.wake()
    with pytest.raises(RuntimeError, match="no complete weights"):
        engine.step()
    engine.receive(weights, 2)
    engine.commit(2)
    sleeping = ["settle", "memory_in_use", "sleep, level 2", "memory_in_use"]
    assert core.calls == [*replacing, *sleeping, *waking, *replacing]


def test_base_weights_of_adapters_wait_in_host_memory(build):
    engine, core = build(lora=LoRASpec(rank=4))
    engine.sleep()
    assert core.calls == ["settle", "memory_in_use", "sleep, level 1", "memory_in_use"]


def test_features_of_pictures_are_dropped_before_vllm_sleeps(build):
    engine, core = build(reads_pictures=True)
    engine.sleep()
    assert core.calls == ["settle", "reset_encoder_cache", "memory_in_use", "sleep, level 2", "memory_in_use"]


def test_on_the_cpu_vllm_keeps_its_memory(build):
    engine, core = build(on_cpu=True)
    assert engine.sleep() == MemoryChange(0, 0)
    engine.wake()
    assert core.calls == ["settle"]


@pytest.mark.parametrize(
    ("sleeps", "on_cpu", "expected"), [(True, False, True), (False, False, None), (True, True, None)]
)
def test_vllm_is_built_so_that_it_can_sleep_where_it_has_to(monkeypatch, sleeps, on_cpu, expected):
    monkeypatch.setattr("qwen35_trainer.rollout.vllm_core.cpu_cache_bytes", lambda *arguments: 1)
    settings = CoreSettings(4, 16, seed=0, memory_fraction=0.5, on_cpu=on_cpu, sleeps=sleeps)
    assert core_arguments(Path(), CONFIG, settings).get("enable_sleep_mode") is expected

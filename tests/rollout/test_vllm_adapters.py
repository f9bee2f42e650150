"""Adapters (LoRA) in the engine on vLLM, with vLLM itself: one engine for all tests of this file, on a tiny model."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from qwen35_trainer.manifest import LoRASpec
from qwen35_trainer.models.adapted_linear import target_layers
from qwen35_trainer.rollout.vllm import VLLMEngine
from qwen35_trainer.rollout.vllm_adapters import AdapterSlot
from qwen35_trainer.weights.adapters import DOWN, SCALE, UP
from tests.rollout.laws import UnderTest, check_histories, check_versions
from tests.rollout.loading import load
from tests.rollout.test_vllm import (
    END,
    HISTORIES,
    MAX_LENGTH,
    SHAPE,
    Replica,
    assert_like_the_library,
    engine_of,
    laws_of,
    library_model,
    mean_difference,
    probe_difference,
    prompt_of,
    text_model_name,
)

LORA = LoRASpec(rank=5, alpha=7.0)
"""In vLLM, rank 5 is filled up with zeros, and the scale 7/5 cannot be written in bfloat16."""
NAMES = ("model.layers.0.mlp.down_proj", "model.layers.3.self_attn.q_proj")


def adapters_of(model: Any, seed: int) -> dict[str, Tensor]:
    """A version of adapters, as large as the weights that they change."""
    random = torch.Generator().manual_seed(seed)
    adapters = {SCALE: torch.tensor(LORA.alpha / LORA.rank)}
    for name, layer in target_layers(model, LORA.targets).items():
        out, into = layer.weight.shape
        adapters[f"{name}.{DOWN}"] = torch.randn(LORA.rank, into, generator=random) / into**0.5
        adapters[f"{name}.{UP}"] = torch.randn(out, LORA.rank, generator=random) * 0.15
    return adapters


def merged(model: Any, adapters: dict[str, Tensor]) -> Any:
    """The model of the library in float32 with W + scale · B·A."""
    model = copy.deepcopy(model)
    for name, layer in target_layers(model, LORA.targets).items():
        layer.weight.data += adapters[SCALE] * adapters[f"{name}.{UP}"] @ adapters[f"{name}.{DOWN}"]
    return model


@dataclass
class AdaptedReplica(Replica):
    """An engine with adapters, and models of the library with the adapters of each seed."""

    base: Any = None
    """The model without adapters."""

    def weights(self, seed: int) -> dict[str, Any]:
        return adapters_of(self.base, seed)


class AdaptersUnderTest(UnderTest):
    """The laws of an engine whose versions are adapters."""

    def weights(self, seed: int) -> dict[str, Any]:
        return adapters_of(self.models[0], seed)


@pytest.fixture(scope="module")
def built() -> Iterator[AdaptedReplica]:
    base = library_model(0, SHAPE)
    models = {seed: merged(base, adapters_of(base, seed)) for seed in (0, 1)}
    with engine_of(base.config, LORA) as (engine, core):
        engine.load_base(dict(base.named_parameters()))
        yield AdaptedReplica(engine, core, models, set(), base=base)


@pytest.fixture
def replica(built: AdaptedReplica) -> Iterator[AdaptedReplica]:
    """The engine with the adapters of seed 0, and afterwards without sequences."""
    built.load(0)
    yield built
    built.clear()


def test_adapters_change_what_is_generated_and_probed_as_they_do_in_the_library(replica: AdaptedReplica) -> None:
    for seed in (0, 1):
        replica.load(seed)
        assert_like_the_library(replica, replica.models[seed])
        assert probe_difference(replica, [np.array(prompt_of(30), np.int32)], seed) <= 0.02


def test_a_sequence_that_spans_three_versions_of_adapters_has_the_log_probs_of_its_replay(
    replica: AdaptedReplica,
) -> None:
    test = laws_of(replica, AdaptersUnderTest)
    check_versions(test)
    replica.loaded, replica.submitted = max(test.seeds), test.groups


def test_random_histories_keep_the_laws(replica: AdaptedReplica) -> None:
    test = laws_of(replica, AdaptersUnderTest)
    assert check_histories(test, range(HISTORIES // 6)) > HISTORIES // 3
    replica.loaded, replica.submitted = max(test.seeds), test.groups


def test_b_is_multiplied_by_the_scale_before_it_is_rounded(replica: AdaptedReplica) -> None:
    adapters = replica.weights(0)
    places = replica.core.engine_core.engine_core.model_executor.driver_worker.model_runner.lora_manager
    modules = {text_model_name(name): layer for name, layer in places._adapter_manager.modules.items()}
    down_proj, qkv_proj = (modules[name] for name in (NAMES[0], NAMES[1].replace("q_proj", "qkv_proj")))
    for name, place in zip(NAMES, (down_proj, qkv_proj), strict=True):
        down, up = place.lora_a_stacked[0][0, 0], place.lora_b_stacked[0][0, 0]
        expected = (adapters[f"{name}.{UP}"].double() * LORA.alpha / LORA.rank).bfloat16()
        assert torch.equal(up[:, : LORA.rank], expected)
        assert torch.equal(down[: LORA.rank], adapters[f"{name}.{DOWN}"].bfloat16())
        assert not up[:, LORA.rank :].any(), "the rest of vLLM's rank is zero"


def test_versions_that_do_not_fit_as_adapters_are_named_and_change_nothing(replica: AdaptedReplica) -> None:
    version = replica.engine.version
    whole = dict(replica.base.named_parameters())
    with pytest.raises(ValueError, match=f"version {version + 1} are not adapters, but the engine was built with"):
        load(replica.engine, whole, version + 1)
    missing, misshapen, other, whole_numbers = (f"{NAMES[0]}.{DOWN}", f"{NAMES[0]}.{UP}", "model.x", f"{NAMES[1]}.{UP}")
    wrong = replica.weights(1)
    del wrong[missing]
    wrong |= {misshapen: torch.zeros(3, LORA.rank), other: torch.zeros(1)}
    with pytest.raises(
        ValueError, match=rf"missing \['{missing}'\], unexpected \['{other}'\], of another shape \['{misshapen}'\]"
    ):
        load(replica.engine, wrong, version + 1)
    numbers = replica.weights(1)
    numbers[whole_numbers] = numbers[whole_numbers].long()
    with pytest.raises(ValueError, match=rf"no floating-point numbers \['{whole_numbers}'\]"):
        load(replica.engine, numbers, version + 1)
    assert replica.engine.version == version
    assert_like_the_library(replica, replica.models[0])


def test_adapters_need_base_weights(replica: AdaptedReplica) -> None:
    engine = VLLMEngine(replica.core, replica.base.config, end_token=END, max_length=MAX_LENGTH, on_cpu=True, lora=LORA)
    with pytest.raises(RuntimeError, match="no base weights for its adapters: call load_base first"):
        load(engine, replica.weights(0), 1)


def test_a_layer_without_a_place_in_vllm_is_named(replica: AdaptedReplica) -> None:
    name = "model.layers.0.mlp.other_proj"
    adapters = replica.weights(0) | {f"{name}.{DOWN}": torch.zeros(5, 64), f"{name}.{UP}": torch.zeros(64, 5)}
    with pytest.raises(
        ValueError, match=rf"vLLM has no place for adapters of its layers \['(language_model\.)?{name}'\]"
    ):
        AdapterSlot(replica.core, replica.base.config, LORA).replace(adapters)


def test_an_adapter_of_zeros_is_the_base_model(replica: AdaptedReplica) -> None:
    """As every training starts."""
    zeros = {
        name: torch.zeros_like(value) if name.endswith(UP) else value for name, value in replica.weights(0).items()
    }
    replica.loaded += 1
    load(replica.engine, zeros, replica.loaded)
    assert_like_the_library(replica, replica.base)


def test_a_prompt_is_never_continued_from_states_of_older_adapters(replica: AdaptedReplica) -> None:
    prompt = prompt_of(600, seed=9)
    replica.generate(prompt, 2)
    replica.load(1)
    finished = replica.generate(prompt, 4, samples=4)
    assert mean_difference(replica, finished, prompt, 1) <= 0.02

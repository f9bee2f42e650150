"""Mixtures of experts of Qwen3 in the engine on vLLM, with vLLM itself: one engine for all tests that generate, on a tiny model."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from qwen35_trainer.models.qwen3_5.hub_tensors import to_per_expert
from qwen35_trainer.rollout.vllm import VLLMEngine
from qwen35_trainer.rollout.vllm_worker import for_vllm
from qwen35_trainer.weights.division import ReplicaShape
from tests.publications import received
from tests.rollout.laws import check_versions
from tests.rollout.loading import load
from tests.rollout.qwen3 import qwen3_models
from tests.rollout.test_vllm import (
    END,
    MAX_LENGTH,
    SLOTS,
    Replica,
    distances,
    engine_of,
    laws_of,
    probe_difference,
    prompt_of,
    text_model_name,
)
from tests.rollout.test_vllm_divisions import assert_same_parameters

PROBED = [np.array(prompt_of(length, seed=length), np.int32) for length in (2, 300)]


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    """An engine without weights."""
    models = qwen3_models(tmp_path_factory.mktemp("model") / "folder", (0, 1, 2))
    with engine_of(models[0].config) as (engine, core):
        yield Replica(engine, core, models, set())


def assert_like_the_library(replica: Replica, seed: int) -> None:
    """As close to the library in float32 as that of other models, and as the library in bfloat16."""
    of_vllm, of_library, change = distances(replica, replica.models[seed])
    print(f"seed {seed}: vLLM {of_vllm}, the library in bfloat16 {of_library}, which changes logits by {change:.2f}")
    assert of_vllm.mean_difference <= min(0.02, 2 * of_library.mean_difference)
    assert of_vllm.greedy_share >= of_library.greedy_share - 0.1
    assert of_vllm.largest_loss <= 2 * change


def test_it_generates_and_probes_as_the_library_computes_with_each_version(replica: Replica) -> None:
    """The versions 1 and 2 are parameters of this process, and the version 3 is in shared memory."""
    for seed in (0, 1):
        replica.load(seed)
        assert_like_the_library(replica, seed)
    replica.loaded += 1
    load(replica.engine, received(replica.weights(2).items(), replica.loaded), replica.loaded)
    assert_like_the_library(replica, 2)
    assert probe_difference(replica, PROBED, 2) <= 0.02
    assert probe_difference(replica, PROBED, 1) > 0.3, "the weights of other versions compute something else"


@pytest.mark.parametrize(
    ("part", "own"),
    [
        ("mlp.experts.gate_up_proj", "mlp.experts.w13_weight"),
        ("mlp.experts.down_proj", "mlp.experts.w2_weight"),
        ("mlp.gate.weight", "mlp.gate.weight"),
        ("self_attn.k_norm.weight", "self_attn.k_norm.weight"),
    ],
)
def test_a_tensor_that_changes_replaces_the_parameter_of_its_layer_and_no_other(
    replica: Replica, part: str, own: str
) -> None:
    replica.load(0)
    before = replica.engine.checksums()
    replica.loaded += 1
    name = f"model.layers.2.{part}"
    changed = replica.weights(0) | {name: replica.weights(1)[name]}
    load(replica.engine, changed, replica.loaded)
    after = replica.engine.checksums()
    different = [text_model_name(each) for each in before if before[each] != after[each]]
    assert [each.replace(".routed_experts.", ".") for each in different] == [f"model.layers.2.{own}"]


def test_experts_are_recorded_only_by_a_core_that_was_built_to_record_them(replica: Replica) -> None:
    replica.load(0)
    [completed] = replica.generate(prompt_of(5), 3)
    assert completed.tokens.choices is None
    config = replica.models[0].config
    engine = VLLMEngine(replica.core, config, end_token=END, max_length=MAX_LENGTH, on_cpu=True, records_choices=True)
    load(engine, replica.weights(0), 1)
    [name] = Replica(engine, replica.core, replica.models, set()).submit(prompt_of(5), 3)
    with pytest.raises(RuntimeError, match="its engine core was not built to record them"):
        engine.step()
    engine.take([name])


def test_the_caches_have_room_for_all_slots_and_no_more(replica: Replica) -> None:
    assert replica.engine.token_room == SLOTS * MAX_LENGTH


@pytest.mark.soak
def test_a_sequence_that_spans_three_versions_has_the_log_probs_of_its_replay(replica: Replica) -> None:
    replica.load(0)
    test = laws_of(replica)
    check_versions(test)
    replica.loaded, replica.submitted = max(test.seeds), test.groups


def test_vllm_gets_the_tensors_of_the_published_files(tmp_path: Path) -> None:
    """By their names, where it must load experts one by one: vLLM 0.23 knows no others, and skips packed experts."""
    folder = tmp_path / "folder"
    [model] = qwen3_models(folder, (0,)).values()
    published = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    received = dict(to_per_expert(for_vllm(dict(model.named_parameters()), model.config.model_type, tied=False)))
    assert received.keys() == published.keys()
    assert [name for name in received if not torch.equal(received[name], published[name])] == []


@pytest.mark.parametrize("divides_experts", [False, True], ids=["parts of experts", "whole experts"])
@pytest.mark.parametrize(("ranks", "share"), [(2, 0.51), pytest.param(4, 0.3, marks=pytest.mark.soak)])
def test_a_rank_loads_the_same_parameters_from_its_slices_as_from_whole_tensors(
    tmp_path: Path, *, ranks: int, share: float, divides_experts: bool
) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    [model] = qwen3_models(tmp_path / "folder", (0,)).values()
    assert_same_parameters(model, ReplicaShape(ranks, divides_experts=divides_experts), share)

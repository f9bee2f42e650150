"""Which experts are loaded at once, and that vLLM's loader is then called three times for a layer.

`test_vllm_divisions.py` compares the loaded parameters with those that vLLM loads itself.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qwen35_trainer.rollout.vllm_environment import set_variables
from qwen35_trainer.rollout.vllm_expert_loading import consecutive, experts_at_once
from qwen35_trainer.rollout.vllm_worker import for_vllm
from qwen35_trainer.weights.division import ReplicaRank, ReplicaShape
from tests.rollout.test_vllm import library_model, process_restored
from tests.rollout.test_vllm_divisions import EXPERTS, vllm_rank


@pytest.mark.parametrize(
    ("table", "own"),
    [
        ([0, 1, 2, 3], slice(0, 4)),
        ([0, 1, -1, -1], slice(0, 2)),
        ([-1, 0, 1, 2], slice(1, 4)),
        ([-1, -1, -1, 0], slice(3, 4)),
        ([0, -1, 1, -1], None),  # vLLM's placement "round_robin"
        ([1, 0, -1, -1], None),
        ([1, 2, -1, -1], None),
        ([-1, -1], None),
        ([], None),
    ],
)
def test_a_process_has_a_slice_of_the_experts_if_they_are_consecutive_and_in_order(
    table: list[int], own: slice | None
) -> None:
    assert consecutive(table) == own


def layer(**changed: Any) -> Any:
    """A layer of vLLM with 4 experts, of which this process has the last two."""
    values = {
        "quantisation": None,
        "transposed": False,
        "balanced": False,
        "all_experts": 4,
        "shared": 0,
        "table": torch.tensor([-1, -1, 0, 1], dtype=torch.int32),
    } | changed
    return SimpleNamespace(
        quant_config=values["quantisation"],
        is_fused_checkpoint_transposed=values["transposed"],
        moe_config=SimpleNamespace(
            moe_parallel_config=SimpleNamespace(enable_eplb=values["balanced"]),
            num_experts=values["all_experts"],
            num_logical_experts=4,
        ),
        expert_map_manager=SimpleNamespace(num_fused_shared_experts=values["shared"], expert_map=values["table"]),
    )


@pytest.mark.parametrize(
    ("changed", "own"),
    [
        ({}, slice(2, 4)),
        ({"table": None}, slice(0, 4)),
        ({"table": torch.tensor([-1, 0, -1, 1])}, None),
        ({"quantisation": "fp8"}, None),
        ({"transposed": True}, None),
        ({"balanced": True}, None),
        ({"all_experts": 6}, None),
        ({"shared": 1}, None),
    ],
)
def test_experts_are_loaded_at_once_only_where_the_tensor_of_a_layer_has_its_experts_in_order(
    changed: dict[str, Any], own: slice | None
) -> None:
    assert experts_at_once(layer(**changed)) == own


@pytest.mark.parametrize("divides_experts", [False, True])
def test_vllm_loads_all_experts_of_a_layer_by_three_calls(
    monkeypatch: pytest.MonkeyPatch, *, divides_experts: bool
) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    with process_restored():
        set_variables()
        experts = pytest.importorskip(
            "vllm.model_executor.layers.fused_moe.routed_experts", reason="this vLLM has no RoutedExperts"
        )
        calls: list[str] = []
        load_matrices = experts.RoutedExperts.weight_loader

        def counted(*arguments: Any, **options: Any) -> Any:
            calls.append(options["shard_id"])
            return load_matrices(*arguments, **options)

        monkeypatch.setattr(experts.RoutedExperts, "weight_loader", counted)
        model = library_model(0, EXPERTS)
        kind, layers = model.config.model_type, model.config.get_text_config().num_hidden_layers
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        with vllm_rank(model.config, ReplicaRank(1, ReplicaShape(2, divides_experts))) as load:
            load(for_vllm(weights, kind, tied=False), at_once=True)
            assert sorted(calls) == sorted(["w1", "w2", "w3"] * layers)
            calls.clear()
            load(for_vllm(weights, kind, tied=False))
            assert len(calls) == 3 * layers * EXPERTS["experts"], "as vLLM itself does, for each expert of the model"

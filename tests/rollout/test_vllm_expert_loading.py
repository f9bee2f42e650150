"""Which experts are loaded together, into which layer, and that vLLM's loader is then called three times for a layer.

`test_vllm_divisions.py` compares the loaded parameters with those that vLLM loads itself.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from qwen35_trainer.models.qwen3_5 import qwen3_moe
from qwen35_trainer.rollout.vllm_environment import set_variables
from qwen35_trainer.rollout.vllm_expert_loading import ExpertMatrices, PackedExperts, consecutive, experts_together
from qwen35_trainer.rollout.vllm_versions import expert_class
from qwen35_trainer.rollout.vllm_worker import for_vllm
from qwen35_trainer.weights.division import HeldSection, ReplicaRank, ReplicaShape, TensorSection
from qwen35_trainer.weights.sliced_tensor import SlicedTensor, TensorSlices
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
        "all_experts": 4,
        "shared": 0,
        "table": torch.tensor([-1, -1, 0, 1], dtype=torch.int32),
    } | changed
    return SimpleNamespace(
        quant_config=values["quantisation"],
        is_fused_checkpoint_transposed=values["transposed"],
        moe_config=SimpleNamespace(
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
        ({"all_experts": 6}, None),
        ({"shared": 1}, None),
    ],
)
def test_experts_are_loaded_together_only_where_the_tensor_of_a_layer_has_its_experts_in_order(
    changed: dict[str, Any], own: slice | None
) -> None:
    assert experts_together(layer(**changed)) == own


@pytest.mark.parametrize("divides_experts", [False, True])
def test_vllm_loads_all_experts_of_a_layer_by_three_calls(
    monkeypatch: pytest.MonkeyPatch, *, divides_experts: bool
) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    with process_restored():
        set_variables()
        experts: Any = expert_class()
        calls: list[str] = []
        load_matrices = experts.weight_loader

        def counted(*arguments: Any, **options: Any) -> Any:
            calls.append(options["shard_id"])  # always given by name
            return load_matrices(*arguments, **options)

        monkeypatch.setattr(experts, "weight_loader", counted)
        model = library_model(0, EXPERTS)
        kind, layers = model.config.model_type, model.config.get_text_config().num_hidden_layers
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        with vllm_rank(model.config, ReplicaRank(1, ReplicaShape(2, divides_experts))) as load:
            load(for_vllm(weights, kind, tied=False), together=True)
            assert sorted(calls) == sorted(["w1", "w2", "w3"] * layers)
            calls.clear()
            load(for_vllm(weights, kind, tied=False))
            assert len(calls) == 3 * layers * EXPERTS["experts"], "as vLLM itself does, for each expert of the model"


class Copies(TorchDispatchMode):
    """Records the targets and sources of all copies."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and type(args[1]) is Tensor:
            self.seen.append(args[:2])
        return func(*args, **(kwargs or {}))


def sliced(tensor: Tensor) -> SlicedTensor:
    """The same values, for a rank that has all of them."""
    rows, columns = tensor.shape[0], tensor[0].numel()
    held = HeldSection(TensorSection(rows, columns, 1), 0, range(rows), range(columns))
    slices = TensorSlices("experts", [held], lambda _: tensor.reshape(rows, columns))
    return SlicedTensor.whole(tuple(tensor.shape), tensor.dtype, slices)


@pytest.mark.parametrize("source", [lambda tensor: tensor, sliced], ids=["whole tensor", "slices"])
def test_gates_are_copied_one_expert_after_another_so_that_no_copy_needs_another_tensor(
    source: Callable[[Tensor], Tensor],
) -> None:
    packed, target = torch.randn(4, 6, 2), torch.zeros(4, 6, 2)
    gates = ExpertMatrices(source(packed)[:, :3])
    target.narrow(1, 0, 3).copy_(gates.narrow(1, 0, 3))
    assert torch.equal(target[:, :3], packed[:, :3])
    assert not target[:, 3:].any()
    with Copies() as copies:  # It would not see what a copy by another class does, so this calls the class.
        ExpertMatrices.__torch_dispatch__(torch.ops.aten.copy_.default, (), (target[:, 3:], gates.narrow(1, 0, 3)))
    assert torch.equal(target[:, 3:], packed[:, :3])
    assert len(copies.seen) == 4
    assert all(tensor.is_contiguous() for pair in copies.seen for tensor in pair)
    assert torch.equal(gates + 0, packed[:, :3]), "whatever else needs values gets them"
    torch.empty(4, 3, 2, device="meta").copy_(gates)


class Experts(nn.Module):
    """A layer of vLLM whose experts can be loaded together."""

    def __init__(self) -> None:
        super().__init__()
        for name, value in vars(layer()).items():
            setattr(self, name, value)
        self.seen: list[tuple[str, str, int, Tensor]] = []
        loader = SimpleNamespace(weight_loader=self._load)
        self.w13_weight, self.w2_weight = loader, loader

    def _load(self, *, loaded_weight: Tensor, weight_name: str, shard_id: str, expert_id: int, **_: Any) -> bool:
        self.seen.append((weight_name, shard_id, expert_id, loaded_weight))
        return True


@pytest.mark.parametrize("path", ["model.", "language_model.model."])
@pytest.mark.parametrize("suffix", ["", ".routed_experts", ".base_layer", ".base_layer.routed_experts"])
def test_a_packed_tensor_reaches_the_layer_of_its_number_and_no_other_tensor_does(
    monkeypatch: pytest.MonkeyPatch, path: str, suffix: str
) -> None:
    monkeypatch.setattr("qwen35_trainer.rollout.vllm_expert_loading.expert_class", lambda: Experts)
    layers = [Experts(), Experts()]
    places = {f"{path}layers.{number}.mlp.experts{suffix}": each for number, each in enumerate(layers)}
    model = SimpleNamespace(named_modules=lambda: list(places.items()))
    experts = PackedExperts(model, "qwen3_5_moe")
    gate_up, down = torch.randn(4, 6, 2), torch.randn(4, 2, 3)
    others = {
        "mtp.layers.1.mlp.experts.gate_up_proj": gate_up,
        "model.language_model.layers.7.mlp.experts.down_proj": down,  # of another process
        "model.language_model.layers.1.mlp.experts.3.down_proj.weight": down[3],
        "model.language_model.layers.1.mlp.shared_expert.down_proj.weight": down[0],
    }
    weights = [
        ("model.language_model.layers.1.mlp.experts.gate_up_proj", gate_up),
        *others.items(),
        ("model.layers.1.mlp.experts.down_proj", down),  # as in Qwen3
    ]
    assert [name for name, _ in experts.others(weights)] == list(others)
    assert layers[0].seen == []
    names, shards, numbers, tensors = zip(*layers[1].seen, strict=True)
    assert (names, shards) == (("w13_weight", "w13_weight", "w2_weight"), ("w1", "w3", "w2"))
    assert set(numbers) == {2}, "the first expert of this process"
    for loaded, expected in zip(tensors, (gate_up[2:, :3], gate_up[2:, 3:], down[2:]), strict=True):
        assert torch.equal(loaded, expected)
    whole = f"{path}layers.1.mlp.experts{suffix}"
    assert experts.loaded == {f"{whole}.w13_weight", f"{whole}.w2_weight"}


def test_experts_of_qwen3_that_are_loaded_one_by_one_have_tensors_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.23 skips packed tensors of Qwen3."""
    monkeypatch.setattr("qwen35_trainer.rollout.vllm_expert_loading.expert_class", lambda: Experts)
    quantised = Experts()
    quantised.quant_config = "fp8"
    model = SimpleNamespace(named_modules=lambda: [("model.layers.0.mlp.experts", quantised)])
    packed = [("model.layers.0.mlp.experts.down_proj", torch.randn(4, 2, 3))]
    names = [name for name, _ in PackedExperts(model, qwen3_moe.MODEL_TYPE).others(packed)]
    assert names == [f"model.layers.0.mlp.experts.{expert}.down_proj.weight" for expert in range(4)]
    assert [name for name, _ in PackedExperts(model, "qwen3_5_moe").others(packed)] == [packed[0][0]]
    assert quantised.seen == []

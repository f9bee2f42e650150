"""Weights under the names that rollout engines load."""

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from qwen35_trainer.models.qwen3_5.checkpoint_files import CheckpointFiles
from qwen35_trainer.models.qwen3_5.hub_tensors import exported, mtp_heads, to_packed, to_per_expert
from qwen35_trainer.models.qwen3_5.model_files import SINGLE
from tests.models.scenes import vision_language
from tests.patience import PATIENCE
from tests.profiles import examples

# Maps names as vLLM's loader does: the prefixes of the whole model, then the projections that it fuses, then experts.
MAPPED = """
import json, sys
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.models.qwen3_5 import Qwen3_5Model, Qwen3_5MoeForConditionalGeneration as Whole
experts = RoutedExperts.build_expert_params_mapping(
    "gate_proj", "down_proj", "up_proj", num_experts=4, num_redundant_experts=0, routed_experts_prefix="",
    lora_base_layer_prefix="", include_fused=True)
def mapped(name):
    name = Whole.hf_to_vllm_mapper.map_name(name)
    if name is None:
        return None
    if "mlp.experts." in name:
        return sorted({name.replace(key, parameter) for parameter, key, _, _ in experts if key in name})
    return Qwen3_5Model.hf_to_vllm_mapper.map_name(name)
print("MAPPED" + json.dumps({name: mapped(name) for name in json.load(sys.stdin)}))
"""


@st.composite
def layers(draw: st.DrawFn) -> list[tuple[str, Tensor]]:
    """Tensors of a few layers in the module's layout, experts packed, others between them."""
    weights: list[tuple[str, Tensor]] = [("model.embed_tokens.weight", torch.randn(5, 4))]
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    for layer in range(draw(st.integers(1, 3))):
        count, inner, outer = (draw(st.integers(1, n)) for n in (12, 4, 4))
        prefix = f"model.language_model.layers.{layer}.mlp"
        weights.append((f"{prefix}.gate.weight", torch.randn(count, outer)))
        weights.append((f"{prefix}.experts.gate_up_proj", torch.randn(count, 2 * inner, outer, dtype=dtype)))
        weights.append((f"{prefix}.experts.down_proj", torch.randn(count, outer, inner, dtype=dtype)))
    return [*weights, ("model.language_model.norm.weight", torch.randn(3))]


@settings(max_examples=examples(50))
@given(weights=layers())
def test_packed_to_single_experts_and_back_is_exact(weights):
    again = list(to_packed(to_per_expert(weights)))
    assert {name for name, _ in again} == {name for name, _ in weights}
    expected = dict(weights)
    for name, tensor in again:
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name])


def test_single_experts_are_gate_above_up():
    packed = torch.arange(12.0).view(1, 4, 3)
    singles = dict(to_per_expert([("m.experts.gate_up_proj", packed)]))
    assert torch.equal(singles["m.experts.0.gate_proj.weight"], packed[0, :2])
    assert torch.equal(singles["m.experts.0.up_proj.weight"], packed[0, 2:])


def test_taking_apart_copies_nothing():
    packed = torch.randn(3, 4, 2)
    for _, tensor in to_per_expert([("m.experts.gate_up_proj", packed), ("m.experts.down_proj", packed)]):
        assert tensor.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr()


def test_a_layer_is_yielded_before_the_next_one_is_complete():
    taken = []

    def source() -> Any:
        for layer in range(3):
            for kind, shape in (("gate_proj", (2, 3)), ("up_proj", (2, 3)), ("down_proj", (3, 2))):
                taken.append(layer)
                yield f"layers.{layer}.mlp.experts.0.{kind}.weight", torch.zeros(shape)

    next(iter(to_packed(source())))
    assert max(taken) == 1


def test_an_incomplete_layer_is_refused_by_name():
    weights = [("layers.0.mlp.experts.1.gate_proj.weight", torch.zeros(2, 3))]
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.experts: 0\.gate_proj, .* missing of 2 experts"):
        list(to_packed(weights))


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_output_layer_is_left_out(tied):
    model = vision_language(tied=tied)
    names = [name for name, _ in exported(model.state_dict().items(), tied=tied)]
    assert ("lm_head.weight" in names) is not tied
    assert len(names) == len(set(names)) == len(list(model.named_parameters()))


@pytest.mark.parametrize("layout", ["packed", "per expert"])
def test_what_is_exported_is_a_checkpoint_with_tower_and_heads(tmp_path, layout):
    model = vision_language(experts=4)
    source, target = tmp_path / "source", tmp_path / "target"
    model.save_pretrained(source)
    heads = {"mtp.fc.weight": torch.randn(4, 8), "mtp.layers.0.mlp.experts.0.up_proj.weight": torch.randn(2, 3)}
    save_file(load_file(source / SINGLE) | heads, source / SINGLE, {"format": "pt"})

    passed = mtp_heads(CheckpointFiles.open(source))
    weights = dict(exported(model.state_dict().items(), tied=False, layout=layout, heads=passed.items()))

    target.mkdir()
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, target / SINGLE, {"format": "pt"})
    files = CheckpointFiles.open(target)
    assert any(stored.stacked for stored in files.tensors.values()) is (layout == "per expert")
    assert all(torch.equal(files.read(name), tensor) for name, tensor in model.named_parameters())
    assert any(name.startswith("model.visual.") for name in files.tensors)
    assert set(files.passed) == set(heads)
    assert all(torch.equal(files.read(name), tensor) for name, tensor in heads.items())


def test_a_checkpoint_without_heads_passes_none(tmp_path):
    vision_language().save_pretrained(tmp_path)
    assert mtp_heads(CheckpointFiles.open(tmp_path)) == {}


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.processes
def test_vllm_has_a_place_for_every_name():
    weights = vision_language(experts=4).state_dict().items()
    packed = {name for name, _ in exported(weights, tied=False)}
    single = {name for name, _ in exported(weights, tied=False, layout="per expert")}
    names = sorted({*packed, *single, "mtp.fc.weight"})
    # In a process of its own: vLLM configures logging and more when it is imported.
    done = subprocess.run(
        [sys.executable, "-c", MAPPED],
        input=json.dumps(names),
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE,
    )
    mapped = json.loads(done.stdout.split("MAPPED")[-1])

    assert mapped.pop("mtp.fc.weight") is None, "the main model skips the heads; the draft model reads them"
    assert mapped["lm_head.weight"] == "language_model.lm_head.weight"
    assert mapped["model.visual.merger.linear_fc1.weight"] == "visual.merger.linear_fc1.weight"
    layer = "language_model.model.layers.0"
    of = "model.language_model.layers.0"
    assert mapped[f"{of}.linear_attn.in_proj_qkv.weight"] == f"{layer}.linear_attn.in_proj_qkvz.weight"
    assert mapped[f"{of}.linear_attn.in_proj_a.weight"] == f"{layer}.linear_attn.in_proj_ba.weight"
    w13, w2 = f"{layer}.mlp.experts.w13_weight", f"{layer}.mlp.experts.w2_weight"
    assert mapped[f"{of}.mlp.experts.gate_up_proj"] == [w13]
    assert mapped[f"{of}.mlp.experts.down_proj"] == [w2]
    assert mapped[f"{of}.mlp.experts.3.up_proj.weight"] == [w13]
    assert mapped[f"{of}.mlp.experts.3.down_proj.weight"] == [w2]
    assert all(target for target in mapped.values())

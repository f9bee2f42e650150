"""What a checkpoint folder holds, and everything that can be wrong with it."""

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from qwen35_trainer.models.qwen3_5 import classes
from qwen35_trainer.models.qwen3_5.checkpoint_files import CheckpointFiles, CheckpointUnusable, check_finite
from qwen35_trainer.models.qwen3_5.hub_tensors import to_packed, to_per_expert
from qwen35_trainer.models.qwen3_5.model_files import INDEX, SINGLE
from tests.models.scenes import vision_language
from tests.profiles import examples

GATE_UP = "model.language_model.layers.1.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def model() -> Any:
    return vision_language(experts=4)


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory) -> Path:
    """With experts one by one."""
    folder = Path(tmp_path_factory.mktemp("saved"))
    model.save_pretrained(folder)
    rewrite(folder, lambda weights: replace(weights, to_per_expert(to_packed(weights.items()))))
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(saved, tmp_path / "checkpoint"))


@pytest.fixture
def sharded(model, tmp_path) -> Path:
    model.save_pretrained(tmp_path / "sharded", max_shard_size="30KB")
    return tmp_path / "sharded"


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    weights = load_file(folder / SINGLE)
    change(weights)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / SINGLE, {"format": "pt"})


def replace(weights: dict[str, torch.Tensor], others: Iterable[tuple[str, torch.Tensor]]) -> None:
    others = dict(others)
    weights.clear()
    weights.update(others)


def configure(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def problems(folder: Path) -> tuple[str, ...]:
    with pytest.raises(CheckpointUnusable) as caught:
        CheckpointFiles.open(folder)
    return caught.value.problems


def same_as(files: CheckpointFiles, model: Any) -> None:
    expected = dict(model.named_parameters())
    assert list(files.tensors) == list(expected)
    for name, tensor in expected.items():
        assert files.tensors[name].shape == tuple(tensor.shape)
        assert torch.equal(files.read(name), tensor), name


def test_experts_stored_one_by_one_are_read_as_the_module_has_them(saved, model):
    assert f"{GATE_UP.removesuffix('gate_up_proj')}0.up_proj.weight" in load_file(saved / SINGLE)
    same_as(CheckpointFiles.open(saved), model)


def test_packed_experts_are_read_as_they_are(folder, model):
    rewrite(folder, lambda weights: replace(weights, to_packed(weights.items())))
    assert GATE_UP in load_file(folder / SINGLE)
    same_as(CheckpointFiles.open(folder), model)


def test_several_shards_are_one_checkpoint(sharded, model):
    assert len(list(sharded.glob("*.safetensors"))) > 3
    same_as(CheckpointFiles.open(sharded), model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_tensors_are_read_in_the_stored_dtype(model, tmp_path, dtype):
    import copy

    copy.deepcopy(model).to(dtype).save_pretrained(tmp_path)
    files = CheckpointFiles.open(tmp_path)
    assert {stored.dtype for stored in files.tensors.values()} == {dtype}
    assert {files.read(name).dtype for name in files.tensors} == {dtype}


@settings(max_examples=examples(40))
@given(data=st.data())
def test_any_part_of_any_tensor_is_the_part_of_the_whole(saved, model, data):
    files = CheckpointFiles.open(saved)
    experts = [GATE_UP, GATE_UP.replace("gate_up", "down")]
    assert all(files.tensors[name].stacked for name in experts)
    name = data.draw(st.one_of(st.sampled_from(experts), st.sampled_from(list(files.tensors))))
    shape = files.tensors[name].shape
    bounds = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    index = tuple(slice(start, stop) for start, stop in bounds[: data.draw(st.integers(0, len(shape)))])
    part = files.read(name, *index)
    whole = dict(model.named_parameters())[name].detach()
    assert part.shape == whole[index].shape
    assert torch.equal(part, whole[index])


def test_only_headers_are_read_when_a_folder_is_opened(saved, monkeypatch):
    from qwen35_trainer.models.qwen3_5 import checkpoint_files

    touched = []
    original = checkpoint_files.torch.stack
    monkeypatch.setattr(checkpoint_files.torch, "stack", lambda *a: touched.append(1) or original(*a))
    files = CheckpointFiles.open(saved)
    assert not touched
    files.read(GATE_UP)
    assert touched


@pytest.mark.parametrize("stored", [False, True], ids=["left out", "stored"])
def test_a_tied_output_layer_may_be_stored_or_not(tmp_path, stored):
    model = vision_language(tied=True)
    model.save_pretrained(tmp_path)
    if stored:
        embedding = model.get_input_embeddings().weight.detach()
        rewrite(tmp_path, lambda weights: weights.update({"lm_head.weight": embedding.clone()}))
    files = CheckpointFiles.open(tmp_path)
    assert "lm_head.weight" not in files.tensors
    same_as(files, model)


def test_a_stored_copy_of_the_tied_output_layer_has_the_shape_of_the_embedding(tmp_path):
    vision_language(tied=True).save_pretrained(tmp_path)
    rewrite(tmp_path, lambda weights: weights.update({"lm_head.weight": torch.zeros(5, 32)}))
    assert problems(tmp_path) == ("lm_head.weight: shape (5, 32), config.json requires (23, 32).",)


def test_an_untied_output_layer_must_be_there(folder):
    rewrite(folder, lambda weights: weights.pop("lm_head.weight"))
    assert problems(folder) == ("missing lm_head.weight: config.json describes another model, or files are missing.",)


def test_a_text_class_named_in_the_folder_takes_the_text_model_out_of_it(saved, folder, model):
    configure(folder, architectures=["Qwen3_5MoeForCausalLM"])
    files = CheckpointFiles.open(folder)
    assert files.config.model_type == "qwen3_5_moe_text"
    assert set(files.tensors) == {name for name, _ in classes.without_weights(files.config).named_parameters()}
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert torch.equal(files.read(name), dict(model.named_parameters())[GATE_UP])


def test_a_tower_under_the_name_that_transformers_5_5_gives_it_is_found(folder, model):
    def change(weights: dict[str, torch.Tensor]) -> None:
        for name in [name for name in weights if name.startswith("model.visual.")]:
            weights[name.replace("model.", "model.language_model.", 1)] = weights.pop(name)

    rewrite(folder, change)
    same_as(CheckpointFiles.open(folder), model)


def test_heads_for_multi_token_prediction_are_set_aside_and_can_be_read(folder):
    head = torch.randn(3, 5)
    rewrite(folder, lambda weights: weights.update({"mtp.fc.weight": head}))
    files = CheckpointFiles.open(folder)
    assert "mtp.fc.weight" not in files.tensors
    assert torch.equal(files.read("mtp.fc.weight"), head)


def test_another_family_is_refused_by_name(folder):
    configure(folder, model_type="llama")
    assert problems(folder) == (
        "config.json: model_type 'llama' is not supported; supported: qwen3_5, qwen3_5_text, qwen3_5_moe, qwen3_5_moe_text, qwen3_moe.",
    )


def test_a_folder_without_config_or_weights_says_what_to_bring(tmp_path, folder):
    (tmp_path / "empty").mkdir()
    assert "no config.json" in problems(tmp_path / "empty")[0]
    (folder / SINGLE).unlink()
    assert problems(folder) == (
        f"{folder} has neither {INDEX} nor {SINGLE}. Download it completely, or convert its weights to safetensors.",
    )


@pytest.mark.parametrize("file", ["config.json", INDEX])
def test_a_file_that_is_not_json_is_named(sharded, file):
    (sharded / file).write_text('{"model_type": "qwen3_5')
    assert problems(sharded)[0].startswith(f"{file}: not JSON (Unterminated string")


def test_all_missing_and_damaged_shards_are_named_together(sharded):
    first, second, third = sorted(sharded.glob("*.safetensors"))[:3]
    first.unlink()
    third.unlink()
    second.write_bytes(second.read_bytes()[:-100])
    texts = problems(sharded)
    assert [each.split(":")[0] for each in texts] == [first.name, second.name, third.name]
    assert "missing; model.safetensors.index.json places" in texts[0]
    assert "damaged or cut off" in texts[1]


def test_an_index_that_promises_what_its_file_lacks_is_refused(sharded):
    index = json.loads((sharded / INDEX).read_text())
    name, file = next(iter(index["weight_map"].items()))
    index["weight_map"][name] = next(other for other in index["weight_map"].values() if other != file)
    (sharded / INDEX).write_text(json.dumps(index))
    assert [each.split(":")[0] for each in problems(sharded)] == [name]


def test_a_quantised_checkpoint_is_refused_tensor_by_tensor(folder):
    names = ["lm_head.weight", "model.language_model.norm.weight"]
    rewrite(folder, lambda weights: weights.update({name: weights[name].to(torch.int8) for name in names}))
    assert sorted(problems(folder)) == [
        f"{name}: stored as I8, weights are one of F32, BF16, F16; use the checkpoint before quantisation."
        for name in names
    ]


def test_missing_unexpected_and_misshapen_tensors_are_named_together(folder):
    def change(weights: dict[str, torch.Tensor]) -> None:
        del weights["model.language_model.norm.weight"]
        weights["model.language_model.extra.weight"] = torch.zeros(2)
        weights["lm_head.weight"] = weights["lm_head.weight"][:5]

    rewrite(folder, change)
    missing, unexpected, shape = problems(folder)
    assert missing.startswith("missing model.language_model.norm.weight:")
    assert unexpected.startswith("unexpected model.language_model.extra.weight:")
    assert shape == "lm_head.weight: shape (5, 32), config.json requires (23, 32)."


def test_a_missing_expert_is_named(folder):
    prefix = GATE_UP.removesuffix(".gate_up_proj")
    rewrite(folder, lambda weights: weights.pop(f"{prefix}.2.up_proj.weight"))
    assert problems(folder)[0].startswith(f"{prefix}: 2.up_proj missing of 4 experts.")


def test_values_that_are_not_finite_are_counted_for_every_tensor():
    weights = {"a": torch.tensor([1.0, float("nan"), 2.0]), "b": torch.ones(3), "c": torch.full((2,), float("-inf"))}
    with pytest.raises(CheckpointUnusable) as caught:
        check_finite(Path("folder"), weights.items())
    assert [each.split(";")[0] for each in caught.value.problems] == [
        "a: 1 of 3 values are NaN or infinite",
        "c: 2 of 2 values are NaN or infinite",
    ]


def test_a_long_list_of_problems_is_cut_and_counted():
    error = CheckpointUnusable(Path("folder"), [f"problem {i}" for i in range(30)])
    assert str(error).splitlines()[0] == "folder: 30 problems"
    assert str(error).splitlines()[-1].strip() == "… and 10 more"
    assert len(error.problems) == 30


def test_both_layouts_of_one_checkpoint_hold_the_same_bytes(saved):
    weights = load_file(saved / SINGLE)
    again = dict(to_per_expert(to_packed(weights.items())))
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[name], weights[name]) for name in weights)

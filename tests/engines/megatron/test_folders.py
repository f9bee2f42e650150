"""Published folders, in and out again, and what the engine refuses before it trains."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.distributed.group import Group
from tests.distributed.samples import spec_of
from tests.models import published

pytestmark = pytest.mark.processes

TEXT_CLASS = {
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
}


def folder_of(
    place: Path, shape: str, *, text: bool = False, **options: Any
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A spec that reads a folder of published shape, and the tensors of its model. text: config.json names the text model."""
    model = published.write(place / "model", shape, **options)
    spec = spec_of(2)
    spec["model"]["source"] = {"path": "model"}
    tensors = {name: each.detach() for name, each in model.named_parameters()}
    if not text:
        return spec, tensors
    file = place / "model" / "config.json"
    config = json.loads(file.read_text())
    config["architectures"] = [TEXT_CLASS.get(name, name) for name in config["architectures"]]
    file.write_text(json.dumps(config))
    of_text = {name.replace("model.language_model.", "model."): each for name, each in tensors.items()}
    return spec, {name: each for name, each in of_text.items() if not name.startswith("model.visual.")}


@pytest.mark.parametrize(
    ("shape", "options", "layout"),
    [
        ("27B, untied", {}, {"pipeline": 2}),
        ("27B, untied", {"text": True}, {"pipeline": 2, "virtual": 2}),
        ("35B-A3B", {}, {"expert": 2}),
        ("35B-A3B", {"per_expert": True}, {"tensor": 2, "sequence": True, "expert_tensor": 2}),
        ("0.8B, tied", {}, {"tensor": 2, "sequence": True}),
        ("0.8B, tied", {"text": True}, {"tensor": 2, "sequence": True}),
    ],
)
def test_what_is_loaded_is_published_bit_for_bit(
    groups: Callable[[int], Group], tmp_path: Path, shape: str, options: dict[str, Any], layout: dict[str, Any]
) -> None:
    spec, tensors = folder_of(tmp_path, shape, **options)
    first = groups(2).run("train", spec=spec, batches=[], layout=layout, folder=tmp_path)[0]["first"]
    assert first.keys() == tensors.keys()
    assert all(torch.equal(first[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    ("shape", "layout", "message"),
    [
        ("35B-A3B", {"expert": 3}, "expert: 3 does not divide the model's 4 experts"),
        ("27B, untied", {"expert": 2}, "expert: 2, but the model has no experts"),
        ("27B, untied", {"tensor": 4}, "tensor: 4 does not divide num_key_value_heads 2"),
        ("0.8B, tied", {"pipeline": 2}, "output layer is its embedding"),
        ("27B, untied", {"virtual": 2}, "virtualPipeline: 2, but pipeline is 1"),
        ("27B, untied", {"pipeline": 2, "virtual": 3}, "virtualPipeline: 3 does not divide the model's 4 layers"),
        ("27B, untied", {"pipeline": 2, "virtual": 4}, "virtualPipeline: 4 × pipeline 2 is above the model's 4 layers"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_by_name(
    groups: Callable[[int], Group], tmp_path: Path, shape: str, layout: dict[str, Any], message: str
) -> None:
    spec, _ = folder_of(tmp_path, shape)
    for text, formed in groups(2).run("refusal_of_settings", spec=spec, layout=layout, folder=tmp_path):
        assert message in text
        assert not formed, "before megatron-core's groups"


@pytest.mark.parametrize(
    ("place", "values", "message"),
    [
        (
            ("text_config", "rope_parameters"),
            {"rope_type": "linear", "factor": 4.0},
            "rope_type of the model's config.json is linear",
        ),
        ((), {"model_type": "llama"}, "config.json: model_type 'llama' is not supported"),
        (("text_config",), {"hidden_size": 48}, "shape (32,), config.json requires (48,)"),
    ],
    ids=["scaled positions", "another family", "other sizes"],
)
def test_a_model_of_another_architecture_is_refused_by_name(
    groups: Callable[[int], Group], tmp_path: Path, place: tuple[str, ...], values: dict[str, Any], message: str
) -> None:
    spec, _ = folder_of(tmp_path, "27B, untied")
    file = tmp_path / "model" / "config.json"
    config = part = json.loads(file.read_text())
    for name in place:
        part = part[name]
    part |= values
    file.write_text(json.dumps(config))
    for text, formed in groups(2).run("refusal_of_settings", spec=spec, layout={"tensor": 2}, folder=tmp_path):
        assert message in text
        assert not formed, "before megatron-core's groups"


def test_a_tensor_with_a_nan_is_named(groups: Callable[[int], Group], tmp_path: Path) -> None:
    spec, _ = folder_of(tmp_path, "27B, untied")
    name = "model.language_model.layers.0.mlp.up_proj.weight"
    for file in (tmp_path / "model").glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            tensors[name][0, 0] = torch.nan
            save_file(tensors, file, metadata={"format": "pt"})
            break
    else:
        pytest.fail(f"no file has {name}")
    with pytest.raises(AssertionError, match=r"model\.language_model\.layers\.0\.mlp\.up_proj\.weight: 1 of"):
        groups(2).run("train", spec=spec, batches=[], layout={"tensor": 2}, folder=tmp_path)

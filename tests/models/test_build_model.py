"""Models as the spec names them."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qwen35_trainer.data.tokenizer import character_tokenizer
from qwen35_trainer.manifest import ModelSourceSpec, ModelSpec, RandomModelSpec, RandomVisionSpec
from qwen35_trainer.models.qwen3_5.build_model import VISION_TOKENS, ModelSettings, base_weights, build
from qwen35_trainer.models.qwen3_5.checkpoint_files import CheckpointUnusable
from qwen35_trainer.models.qwen3_5.forward import logits
from qwen35_trainer.models.qwen3_5.inputs import ModelInput

SHAPES: dict[str, dict[str, Any]] = {
    "dense": {},
    "mixture of experts": {"experts": 4, "expertsPerToken": 2},
    "tied": {"tieEmbeddings": True},
    "vision": {"vision": RandomVisionSpec()},
    "vision, mixture of experts, tied": {"vision": RandomVisionSpec(), "experts": 4, "tieEmbeddings": True},
}


def from_shape(**shape: Any) -> ModelSpec:
    return ModelSpec(
        name="tiny", source=ModelSourceSpec(random=RandomModelSpec(hiddenSize=32, intermediateSize=48, **shape))
    )


def from_folder() -> ModelSpec:
    return ModelSpec(name="tiny", source=ModelSourceSpec(path="saved"))


def built(model: ModelSpec, *, seed: int = 0, base: Path = Path()) -> Any:
    return build(ModelSettings(model, seed=seed, vocabulary=13, max_length=64, base=base))


def read(model: Any) -> Tensor:
    """Logits of some text."""
    tokens = torch.tensor(random.Random(0).choices(range(7, 13), k=20))
    with torch.no_grad():
        return logits(model, ModelInput.of_text([tokens], packed=False, device="cpu"))


def test_the_same_seed_gives_the_same_weights_whatever_was_drawn_before():
    first = built(from_shape(vision=RandomVisionSpec())).state_dict()
    torch.manual_seed(77)
    second = built(from_shape(vision=RandomVisionSpec())).state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_another_seed_gives_other_weights():
    first, second = built(from_shape(), seed=1), built(from_shape(), seed=2)
    assert not torch.equal(first.lm_head.weight, second.lm_head.weight)


def test_building_draws_nothing_from_the_process_generator():
    before = torch.get_rng_state()
    built(from_shape())
    assert torch.equal(torch.get_rng_state(), before)


def test_tied_embeddings_are_one_tensor_and_untied_ones_are_two():
    tied, untied = built(from_shape(tieEmbeddings=True)), built(from_shape())
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight


def test_the_shape_is_the_one_asked_for():
    model = built(from_shape(layers=3, fullAttentionInterval=2, linearKeyHeads=1, linearValueHeads=3))
    assert [hasattr(layer, "linear_attn") for layer in model.model.layers] == [True, False, True]
    assert model.model.layers[0].linear_attn.num_v_heads == 3
    assert tuple(model.lm_head.weight.shape) == (13, 32)
    assert model.model.embed_tokens.weight.dtype == torch.float32


def test_a_tower_makes_a_vision_language_model_of_the_shape_asked_for():
    shape = RandomVisionSpec(
        depth=3, heads=4, headDim=8, patchSize=2, temporalPatchSize=1, spatialMergeSize=1, positionGrid=5
    )
    model = built(from_shape(vision=shape))
    tower = model.model.visual
    assert model.config.model_type == "qwen3_5"
    assert len(tower.blocks) == 3
    assert tuple(tower.patch_embed.proj.weight.shape) == (32, 3, 1, 2, 2)
    assert tuple(tower.pos_embed.weight.shape) == (25, 32)
    assert tower.merger.linear_fc2.out_features == 32


def test_the_ids_around_pictures_are_those_of_the_character_tokenizer():
    tokenizer = character_tokenizer("abc", vision=True)
    names = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    assert tokenizer.convert_tokens_to_ids(names) == list(VISION_TOKENS.values())
    config = built(from_shape(vision=RandomVisionSpec())).config
    assert {name: getattr(config, name) for name in VISION_TOKENS} == VISION_TOKENS


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_a_saved_model_is_the_same_when_built_from_its_folder(tmp_path, shape):
    model = built(from_shape(**shape))
    model.save_pretrained(tmp_path / "saved")
    loaded = built(from_folder(), base=tmp_path)
    assert type(loaded) is type(model)
    before, after = model.state_dict(), loaded.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert loaded.lm_head.weight.requires_grad
    assert (loaded.lm_head.weight is loaded.get_input_embeddings().weight) is bool(shape.get("tieEmbeddings"))
    assert torch.equal(read(loaded), read(model))


def test_a_folder_is_read_as_the_library_reads_it(tmp_path):
    from transformers import Qwen3_5MoeForConditionalGeneration as Library

    built(from_shape(vision=RandomVisionSpec(), experts=4)).save_pretrained(tmp_path / "saved")
    expected = Library.from_pretrained(tmp_path / "saved").state_dict()
    loaded = built(from_folder(), base=tmp_path).state_dict()
    assert expected.keys() == loaded.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_a_folder_of_another_precision_is_read_in_float32(tmp_path):
    built(from_shape()).to(torch.bfloat16).save_pretrained(tmp_path / "saved")
    loaded = built(from_folder(), base=tmp_path)
    assert {tensor.dtype for tensor in loaded.state_dict().values()} == {torch.float32}


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_folder", [False, True])
def test_base_weights_are_those_of_the_model_that_is_built(tmp_path, *, in_folder, precision):
    """A rollout engine of another library loads them. Those of a folder are read one by one."""
    source = from_shape(tieEmbeddings=True, experts=4)
    arguments: dict[str, Any] = {
        "seed": 3,
        "vocabulary": 13,
        "max_length": 64,
        "base": tmp_path,
        "precision": precision,
    }
    model = build(ModelSettings(source, **arguments))
    if in_folder:
        model.save_pretrained(tmp_path / "saved")
    weights = base_weights(ModelSettings(from_folder() if in_folder else source, **arguments))
    parameters = dict(model.named_parameters())
    assert len(weights) == len(parameters)
    assert set(weights) == parameters.keys()
    for name, tensor in weights.items():
        assert tensor.dtype == parameters[name].dtype
        assert torch.equal(tensor, parameters[name])


def test_another_family_in_the_folder_is_refused(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=13, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "saved")
    with pytest.raises(CheckpointUnusable, match="'llama' is not supported; supported: qwen3_5, "):
        built(from_folder(), base=tmp_path)


def test_every_tensor_with_values_that_are_not_finite_is_named(tmp_path):
    built(from_shape()).save_pretrained(tmp_path / "saved")
    file = tmp_path / "saved" / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"][2, 3] = float("nan")
    weights["model.norm.weight"][:] = float("inf")
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(CheckpointUnusable) as caught:
        built(from_folder(), base=tmp_path)
    assert sorted(each.split(";")[0] for each in caught.value.problems) == [
        "lm_head.weight: 1 of 416 values are NaN or infinite",
        "model.norm.weight: 32 of 32 values are NaN or infinite",
    ]

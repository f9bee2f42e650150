"""Models as the spec names them."""

import random
from pathlib import Path

import pytest
import torch

from qwen35_trainer.models.qwen3_5.build import build
from qwen35_trainer.spec import Model, ModelSource, RandomModel


def from_shape(**shape: object) -> Model:
    return Model(name="tiny", source=ModelSource(random=RandomModel(hiddenSize=32, intermediateSize=48, **shape)))


def built(model: Model, *, seed: int = 0, base: Path = Path()):
    return build(model, seed=seed, vocabulary=13, max_length=64, base=base)


def test_the_same_seed_gives_the_same_weights_whatever_was_drawn_before():
    first = built(from_shape()).state_dict()
    torch.manual_seed(77)
    second = built(from_shape()).state_dict()
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


@pytest.mark.parametrize("shape", [{}, {"experts": 4, "expertsPerToken": 2}, {"tieEmbeddings": True}])
def test_a_saved_model_is_the_same_when_built_from_its_folder(tmp_path, shape):
    model = built(from_shape(**shape))
    model.save_pretrained(tmp_path / "saved")
    loaded = built(Model(name="tiny", source=ModelSource(path="saved")), base=tmp_path)
    assert type(loaded) is type(model)
    before, after = model.state_dict(), loaded.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    ids = torch.tensor([random.Random(0).choices(range(13), k=20)])
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids, use_cache=False).logits, model(input_ids=ids, use_cache=False).logits)
    assert "forward" in vars(loaded.model.layers[0].linear_attn), "a loaded model is adapted too"


def test_a_folder_of_another_precision_is_read_in_float32(tmp_path):
    built(from_shape()).to(torch.bfloat16).save_pretrained(tmp_path / "saved")
    loaded = built(Model(name="tiny", source=ModelSource(path="saved")), base=tmp_path)
    assert {tensor.dtype for tensor in loaded.state_dict().values()} == {torch.float32}


def test_another_family_in_the_folder_is_refused(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=13, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"'llama' is not Qwen3\.5"):
        built(Model(name="tiny", source=ModelSource(path="saved")), base=tmp_path)

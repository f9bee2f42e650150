"""Names that are known without torch, against the library's own modules."""

import json

import pytest
from torch import nn

from qwen35_trainer.models.qwen3_5 import classes
from qwen35_trainer.models.qwen3_5.family import text_model
from qwen35_trainer.models.qwen3_5.linear_layers import linear_layers
from tests.models.scenes import vision_language


def of_modules(model) -> set[str]:
    modules = text_model(model).layers.named_modules()
    return {name.rpartition(".")[2] for name, module in modules if isinstance(module, nn.Linear)}


@pytest.mark.parametrize("experts", [0, 4])
def test_the_names_of_a_configuration_are_those_of_the_models_modules(make_model, experts, tmp_path):
    model = make_model(experts=experts)
    model.config.save_pretrained(tmp_path)
    assert linear_layers(json.loads((tmp_path / "config.json").read_text())) == of_modules(model)


@pytest.mark.parametrize("kind", ["full_attention", "linear_attention"])
def test_a_decoder_of_one_kind_of_layer_lacks_the_names_of_the_other(make_model, kind):
    config = make_model().config
    config.num_hidden_layers, config.layer_types = 2, [kind] * 2
    assert linear_layers(config.to_dict()) == of_modules(classes.without_weights(config))


def test_a_vision_language_configuration_is_asked_for_its_text_model():
    model = vision_language()
    assert linear_layers(model.config.to_dict()) == of_modules(model)


def test_kinds_of_layers_follow_from_the_interval_where_they_are_not_listed():
    config = {"model_type": "qwen3_5_text", "num_hidden_layers": 3, "full_attention_interval": 4}
    assert "q_proj" not in linear_layers(config)
    assert "q_proj" in linear_layers(config | {"num_hidden_layers": 4})

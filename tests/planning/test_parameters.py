"""The numbers of parameters of the catalog's models, against the transformers library and the models' names."""

import math
from dataclasses import replace

import pytest

from qwen35_trainer.catalog.model_sizes import ModelSizes
from qwen35_trainer.catalog.models import MODELS, find
from qwen35_trainer.planning import parameters, pinned_memory

PUBLISHED_BILLIONS = {
    "Qwen/Qwen3.5-27B": (27, 27),
    "Qwen/Qwen3.5-35B-A3B": (35, 3),
    "Qwen/Qwen3.5-122B-A10B": (122, 10),
    "Qwen/Qwen3.5-397B-A17B": (397, 17),
    "Qwen/Qwen3-30B-A3B": (30.5, 3.3),
    "Qwen/Qwen3-32B": (32.8, 32.8),
    "Qwen/Qwen3-235B-A22B": (235, 22),
}
"""Total and active, as the model's name or its card says."""


@pytest.mark.parametrize("name", PUBLISHED_BILLIONS)
def test_a_model_has_the_parameters_that_its_name_says(name):
    total, active = PUBLISHED_BILLIONS[name]
    assert parameters.text(MODELS[name]).total / 1e9 == pytest.approx(total, rel=0.02)
    assert parameters.active(MODELS[name]) / 1e9 == pytest.approx(active, rel=0.12)


@pytest.mark.torch
@pytest.mark.parametrize("experts", [0, 8])
@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_of_the_library_s_class_is_counted(experts, tied):
    """A vision-language model of published form, shrunk, whose config.json is read as a user's would be."""
    import transformers

    from qwen35_trainer.models.qwen3_5.classes import without_weights

    sizes = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 8}
    sizes |= {"hidden_size": 48, "vocab_size": 300, "intermediate_size": 80, "moe_intermediate_size": 24}
    sizes |= {"shared_expert_intermediate_size": 40, "num_experts": experts, "num_experts_per_tok": 2}
    sizes |= {
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
    }
    tower = {"depth": 3, "hidden_size": 32, "intermediate_size": 56, "num_heads": 4, "out_hidden_size": 48}
    family = "Qwen3_5Moe" if experts else "Qwen3_5"
    config = getattr(transformers, f"{family}Config")(text_config=sizes, vision_config=tower, tie_word_embeddings=tied)
    shape = ModelSizes.of_config(config.to_dict())
    counted = {name: each.numel() for name, each in without_weights(config).named_parameters()}
    of_tower = sum(size for name, size in counted.items() if ".visual." in name)
    assert parameters.vision(shape) == of_tower
    assert parameters.text(shape).total == sum(counted.values()) - of_tower
    parts = [
        each.shape
        for name, each in without_weights(config).named_parameters()
        if ".visual." not in name and each.dim() > 1 and each.shape[0] > 1  # not the gate of a shared expert, one row
    ]
    of_ranks = [-(-rows // 4) * math.prod(others) for rows, *others in parts]
    exact = sum(math.prod(part) for part in parts) / 4
    pinned = sum(2 ** math.ceil(math.log2(4 * part)) for part in of_ranks)
    assert pinned_memory.rounding(shape, 4, 4) == pytest.approx(pinned / (4 * exact))


def test_a_model_is_found_without_its_owner_and_with_a_suffix():
    assert find("Qwen3.5-35B-A3B-Base") == replace(MODELS["Qwen/Qwen3.5-35B-A3B"], positions=None)
    assert find("my/qwen3.5-9b") is MODELS["Qwen/Qwen3.5-9B"]
    assert find("Qwen/Qwen2.5-7B") is None

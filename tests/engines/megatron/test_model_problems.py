"""What the Megatron engine does not compute of a model is refused by the field's name in config.json."""

from types import SimpleNamespace
from typing import Any

import pytest

from qwen35_trainer.engines.megatron.model_problems import problems, router_problems
from qwen35_trainer.manifest.train import RouterSpec

TEXT: dict[str, Any] = {
    "model_type": "qwen3_5_moe_text",
    "hidden_act": "silu",
    "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"},
    "num_experts_per_tok": 8,
}


@pytest.mark.parametrize("values", [{}, {"rope_parameters": {"rope_theta": 1e4}}, {"num_experts_per_tok": 2}], ids=str)
def test_published_models_are_computed(values: dict[str, Any]) -> None:
    assert not list(problems(SimpleNamespace(**TEXT | values)))


def test_a_dense_model_has_no_field_of_experts() -> None:
    values = {name: value for name, value in TEXT.items() if name != "num_experts_per_tok"}
    assert not list(problems(SimpleNamespace(**values)))


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, ["rope_type of the model's config.json is yarn"]),
        ({"rope_parameters": {"rope_type": "linear"}}, ["rope_type of the model's config.json is linear"]),
        ({"hidden_act": "gelu"}, ["hidden_act of the model's config.json is gelu"]),
        ({"num_experts_per_tok": 1}, ["num_experts_per_tok of the model's config.json is 1"]),
        ({"model_type": "qwen3_5"}, ["the model's type is qwen3_5"]),
        ({"hidden_act": "relu", "num_experts_per_tok": 1}, ["hidden_act", "num_experts_per_tok"]),
    ],
    ids=str,
)
def test_each_other_value_is_named_with_the_fix(values: dict[str, Any], texts: list[str]) -> None:
    refusals = list(problems(SimpleNamespace(**TEXT | values)))
    assert len(refusals) == len(texts)
    for problem, text in zip(refusals, texts, strict=True):
        assert text in problem
        assert problem.startswith("spec.train.engine: ")
        assert "FSDP" in problem


@pytest.mark.parametrize("router", [RouterSpec(zLoss=0.1), RouterSpec(replay=True)], ids=["losses", "replay"])
def test_routers_with_losses_or_replay_need_all_tokens_of_a_layer(router: RouterSpec) -> None:
    model, chunks = SimpleNamespace(**TEXT, num_experts=4), {"mlp_chunks_for_training": 2}
    assert not list(router_problems(model, router, {}))
    assert not list(router_problems(model, RouterSpec(), chunks))
    [problem] = router_problems(model, router, chunks)
    assert problem.startswith("spec.train.overrideTransformerConfig.mlp_chunks_for_training: 2, but routers")

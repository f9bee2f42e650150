"""What adapting touches, and what it refuses."""

import copy
import re
import tomllib
from pathlib import Path

import pytest
import torch

from qwen35_trainer.models.qwen3_5 import adapter
from qwen35_trainer.models.qwen3_5.adapter import adapt
from qwen35_trainer.models.qwen3_5.family import TRANSFORMERS
from qwen35_trainer.models.qwen3_5.inputs import ModelInput
from tests.models.scenes import vision_language


def test_only_the_instance_is_adapted(make_model, tokens):
    model, other = make_model(), make_model()
    classes = [type(model), *{type(module) for module in model.modules()}]
    forwards = [each.forward for each in classes]
    adapt(model)
    assert [each.forward for each in classes] == forwards
    assert not any("forward" in vars(module) for module in other.modules())
    assert other(input_ids=tokens(1, 4), use_cache=False).logits.shape == (1, 4, 23)


@pytest.mark.parametrize("experts", [0, 4])
def test_text_and_vision_language_classes_are_taken(make_model, tokens, experts):
    kinds = []
    for model in (make_model(experts=experts), vision_language(experts=experts)):
        inputs = ModelInput.of_text([tokens(9) % 19], packed=True, device="cpu")
        assert adapt(model)(inputs, torch.arange(9), tokens(9)).log_probs.shape == (9,)
        kinds.append(model.config.model_type)
    assert kinds == (["qwen3_5_moe_text", "qwen3_5_moe"] if experts else ["qwen3_5_text", "qwen3_5"])


@pytest.mark.parametrize("experts", [0, 4])
def test_parameters_buffers_and_modules_keep_their_names(make_model, experts):
    model = make_model(experts=experts)
    before = [list(model.state_dict()), [name for name, _ in model.named_modules()], list(dict(model.named_buffers()))]
    adapt(model)
    after = [list(model.state_dict()), [name for name, _ in model.named_modules()], list(dict(model.named_buffers()))]
    assert after == before


def test_adapting_twice_is_adapting_once(make_model, tokens):
    once, twice = adapt(make_model()), adapt(adapt(make_model()))
    inputs = ModelInput.of_text([tokens(9)], packed=True, device="cpu")
    with torch.no_grad():
        assert torch.equal(*(m(inputs, torch.arange(9), tokens(9)).log_probs for m in (once, twice)))


def test_a_copy_of_an_adapted_model_runs_on_its_own_weights(make_model, tokens):
    model = adapt(make_model())
    other = copy.deepcopy(model)
    inputs = ModelInput.of_text([tokens(9)], packed=False, device="cpu")
    with torch.no_grad():
        before = model(inputs, torch.arange(9), tokens(9)).log_probs
        for parameter in other.parameters():
            parameter.mul_(1.5)
        assert torch.equal(model(inputs, torch.arange(9), tokens(9)).log_probs, before)
        assert not torch.equal(other(inputs, torch.arange(9), tokens(9)).log_probs, before)


def test_another_family_is_refused_by_name(make_model):
    model = make_model()
    model.config.model_type = "llama"
    expected = "'llama' is not supported; supported: qwen3_5, qwen3_5_text, qwen3_5_moe, qwen3_5_moe_text, qwen3_moe"
    with pytest.raises(ValueError, match=re.escape(expected)):
        adapt(model)


# Of the module that the adapter sees: importing a model's own module can put another object in its place in sys.modules.
@pytest.mark.parametrize(
    ("version", "taken"),
    [("4.57.1", False), ("5.2.9", False), ("5.3.0", True), ("5.19.9", True), ("5.20.0", False), ("6.0", False)],
)
def test_transformers_versions_are_taken_from_end_to_end_of_the_range_and_no_other(
    make_model, monkeypatch, version, taken
):
    monkeypatch.setattr(adapter.transformers, "__version__", version)
    if taken:
        assert "forward" in vars(adapt(make_model()))
        return
    with pytest.raises(ValueError, match=re.escape(f"transformers {version} is not supported; install >=5.3.0,<5.20")):
        adapt(make_model())


def test_the_newest_version_is_the_one_that_the_distribution_allows():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    [requirement] = [each for each in project["optional-dependencies"]["trainer"] if each.startswith("transformers")]
    assert requirement.endswith(f",<{TRANSFORMERS[1]}")


def test_dropout_is_refused_because_no_kernel_here_applies_it(make_model):
    model = make_model()
    model.config.attention_dropout = 0.1
    with pytest.raises(ValueError, match=r"attention_dropout 0\.1 is not supported; set it to 0 in config\.json"):
        adapt(model)

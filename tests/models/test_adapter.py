"""The adapted model is the library's model, at another cost."""

import copy

import pytest
import torch
from torch.nn import functional as F

from qwen35_trainer.models.qwen3_5.adapter import adapt

EXPERTS = [pytest.param(0, id="dense"), pytest.param(4, id="mixture of experts")]


@pytest.mark.parametrize("length", [1, 3, 64, 65, 150])
@pytest.mark.parametrize("experts", EXPERTS)
def test_logits_are_those_of_the_library(make_model, tokens, experts, length):
    model = make_model(experts=experts)
    adapted = adapt(copy.deepcopy(model))
    ids = tokens(2, length)
    with torch.no_grad():
        torch.testing.assert_close(
            adapted(input_ids=ids, use_cache=False).logits,
            model(input_ids=ids, use_cache=False).logits,
            atol=1e-4,
            rtol=1e-4,
        )


@pytest.mark.parametrize("length", [2, 30, 70])
@pytest.mark.parametrize("experts", EXPERTS)
def test_gradients_are_those_of_the_library(make_model, tokens, experts, length):
    model = make_model(experts=experts)
    adapted = adapt(copy.deepcopy(model))
    ids = tokens(2, length)
    for each in (model, adapted):
        logits = each(input_ids=ids, use_cache=False).logits[:, :-1]
        F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    for (name, own), expected in zip(adapted.named_parameters(), model.parameters(), strict=True):
        assert own.grad is not None, name
        torch.testing.assert_close(
            own.grad, expected.grad, atol=1e-5, rtol=1e-3, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("experts", EXPERTS)
def test_what_stands_to_the_right_of_a_sequence_changes_nothing(make_model, tokens, experts):
    adapted = adapt(make_model(experts=experts))
    short = tokens(1, 50)
    with torch.no_grad():
        alone = adapted(input_ids=short, use_cache=False).logits
        for seed in (1, 2):
            padded = torch.cat((short, tokens(1, 60, seed=seed)), 1)
            logits = adapted(input_ids=padded, use_cache=False).logits[:, :50]
            torch.testing.assert_close(logits, alone, atol=1e-4, rtol=1e-4)


def test_the_first_token_reaches_the_last_logits_so_that_a_lost_state_would_show(make_model, tokens):
    adapted = adapt(make_model())
    ids = tokens(1, 100)
    other = ids.clone()
    other[0, 0] = (ids[0, 0] + 1) % 23
    # Full attention carries the first token too: without it only the delta rule's state is left.
    for layer in adapted.model.layers:
        if hasattr(layer, "self_attn"):
            layer.self_attn.o_proj.weight.data.zero_()
    with torch.no_grad():
        first, second = (adapted(input_ids=x, use_cache=False).logits[0, -1] for x in (ids, other))
    assert (first - second).abs().max() > 1e-2


def test_only_the_instance_is_adapted(make_model):
    model, other = make_model(), make_model()
    layer_class = type(model.model.layers[0].linear_attn)
    forward = layer_class.forward
    other_forward = other.model.layers[0].linear_attn.forward
    adapt(model)
    assert layer_class.forward is forward
    assert other.model.layers[0].linear_attn.forward == other_forward
    assert model.model.layers[0].linear_attn.forward.__func__ is not forward


def test_every_delta_layer_is_adapted_and_no_attention_layer(make_model):
    model = adapt(make_model())
    own = ["forward" in vars(layer.linear_attn) for layer in model.model.layers if hasattr(layer, "linear_attn")]
    assert own == [True, True, True]
    assert "forward" not in vars(model.model.layers[3].self_attn)


def test_a_mask_or_a_cache_is_refused(make_model, tokens):
    adapted = adapt(make_model())
    mask = torch.tensor([[0, 0, 1, 1]])
    with pytest.raises(ValueError, match="without a cache or an attention mask"):
        adapted(input_ids=tokens(1, 4), attention_mask=mask, use_cache=False)
    with pytest.raises(ValueError, match="without a cache"):
        adapted(input_ids=tokens(1, 4), use_cache=True)


def test_another_family_is_refused_by_name(make_model):
    model = make_model()
    model.config.model_type = "llama"
    with pytest.raises(ValueError, match=r"'llama' is not Qwen3\.5; supported: qwen3_5_text, qwen3_5_moe_text"):
        adapt(model)

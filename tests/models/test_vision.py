"""Images and videos in the forward pass, against the library's."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qwen35_trainer.models.qwen3_5 import vision
from qwen35_trainer.models.qwen3_5.adapter import adapt
from qwen35_trainer.models.qwen3_5.forward import logits
from qwen35_trainer.models.qwen3_5.inputs import ModelInput
from qwen35_trainer.models.qwen3_5.multimodal import multimodal_input
from tests.models.scenes import IMAGE, as_the_library_wants, show, vision_language

EXPERTS = [pytest.param(0, id="dense"), pytest.param(4, id="mixture of experts")]
SCENES: dict[str, list[Any]] = {
    "one image": [3, (1, 4, 6), 5],
    "several images of different shapes": [2, (1, 8, 2), (1, 2, 2), 4, (1, 6, 10), 3],
    "a video": [2, ("video", (3, 4, 6)), 4],
    "images and videos": [1, (1, 6, 4), 2, ("video", (2, 4, 4)), 1, (1, 2, 2), ("video", (1, 2, 6)), 3],
}


def ready(model: Any) -> Any:
    """An adapted copy."""
    adapted = adapt(copy.deepcopy(model))
    vision.adapt(adapted)
    return adapted


def read(model: Any, *scenes: list[Any], packed: bool = False) -> ModelInput:
    shown = [show(scene, seed) for seed, scene in enumerate(scenes)]
    return multimodal_input(
        [tokens for tokens, _ in shown], [each for _, each in shown], model.config, packed=packed, device="cpu"
    )


def text(length: int = 12) -> Tensor:
    return show([length])[0]


def loss(scores: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def calls(module: nn.Module) -> list[int]:
    """Grows by one entry, the number of patches, at each forward pass of a tower."""
    seen: list[int] = []
    module.register_forward_hook(lambda _, arguments, __: seen.append(len(arguments[0])))
    return seen


@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES.keys())
@pytest.mark.parametrize("experts", EXPERTS)
def test_logits_are_those_of_the_library(experts, scene):
    model = vision_language(experts=experts)
    expected = model(**as_the_library_wants(*show(scene))).logits
    with torch.no_grad():
        torch.testing.assert_close(logits(ready(model), read(model, scene)), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("experts", EXPERTS)
def test_gradients_are_those_of_the_library_in_the_tower_too(experts):
    model = vision_language(experts=experts)
    adapted, scene = ready(model), SCENES["images and videos"]
    tokens, shown = show(scene)
    loss(model(**as_the_library_wants(tokens, shown)).logits, tokens[None]).backward()
    loss(logits(adapted, read(model, scene)), tokens[None]).backward()
    for (name, own), expected in zip(adapted.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(
            own.grad, expected.grad, atol=1e-5, rtol=1e-3, msg=lambda m, name=name: f"{name}: {m}"
        )
    assert adapted.model.visual.patch_embed.proj.weight.grad.abs().max() > 0


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_each_sequence_of_a_batch_sees_its_own_pictures(packed):
    model = ready(vision_language())
    with torch.no_grad():
        together = logits(model, read(model, *SCENES.values(), packed=packed))
        start = 0
        for row, (seed, scene) in enumerate(enumerate(SCENES.values())):
            tokens, shown = show(scene, seed)
            alone = multimodal_input([tokens], [shown], model.config, packed=False, device="cpu")
            own = together[0, start : start + len(tokens)] if packed else together[row, : len(tokens)]
            torch.testing.assert_close(own, logits(model, alone)[0], atol=1e-4, rtol=1e-4)
            start += len(tokens)


def test_a_picture_shows_in_the_logits_behind_it_only():
    model = ready(vision_language())
    inputs = read(model, [4, (1, 4, 4), 4])
    with torch.no_grad():
        before = logits(model, inputs)[0]
        inputs.pictures.patches.mul_(-1)
        changed = (logits(model, inputs)[0] - before).abs().amax(-1)
    assert (changed[:5] == 0).all()
    assert (changed[5:] > 1e-3).all()


@pytest.mark.parametrize("scene", [[12], *SCENES.values()], ids=["nothing", *SCENES])
def test_the_tower_runs_exactly_once_whatever_is_shown(scene):
    model = ready(vision_language())
    seen = calls(model.model.visual)
    vision.embed(model, read(model, scene))
    assert len(seen) == 1


@pytest.mark.parametrize("experts", EXPERTS)
def test_without_pictures_loss_and_gradients_are_those_of_the_text_alone(experts):
    model = vision_language(experts=experts)
    adapted, tokens = ready(model), text()[None]
    expected = loss(model(input_ids=tokens, use_cache=False).logits, tokens)
    expected.backward()
    actual = loss(logits(adapted, ModelInput.of_text([tokens[0]], packed=False, device="cpu")), tokens)
    actual.backward()
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)
    for (name, own), reference in zip(adapted.named_parameters(), model.parameters(), strict=True):
        if "visual" in name:
            assert reference.grad is None
            assert own.grad is not None, f"{name}: a rank without gradient would skip the reduction of the others"
            assert not own.grad.any(), name
        else:
            torch.testing.assert_close(own.grad, reference.grad, atol=1e-5, rtol=1e-3)


def test_the_blank_changes_no_bit_of_the_embeddings():
    model = ready(vision_language())
    tokens = text()[None]
    inputs = ModelInput.of_text([tokens[0]], packed=False, device="cpu")
    assert torch.equal(vision.embed(model, inputs), model.model.language_model.embed_tokens(tokens))


def test_the_blank_is_without_effect_even_where_its_features_overflow():
    model = ready(vision_language())
    model.model.visual.merger.linear_fc2.bias.data.fill_(float("inf"))
    inputs = ModelInput.of_text([text()], packed=False, device="cpu")
    loss(logits(model, inputs), inputs.tokens).backward()
    text_gradients = [p.grad for name, p in model.named_parameters() if "visual" not in name]
    assert all(gradient.isfinite().all() for gradient in text_gradients)


def test_a_frozen_tower_runs_and_gets_no_gradient():
    model = ready(vision_language())
    model.model.visual.requires_grad_(False)
    for scene in ([12], SCENES["images and videos"]):
        inputs = read(model, scene)
        seen = calls(model.model.visual)
        loss(logits(model, inputs), inputs.tokens).backward()
        assert seen
        assert all(p.grad is None for p in model.model.visual.parameters())
        assert model.model.language_model.embed_tokens.weight.grad is not None


def test_a_tower_does_not_run_where_no_process_has_pictures():
    model = ready(vision_language())
    seen, tokens = calls(model.model.visual), text()
    inputs = ModelInput.of_text([tokens], packed=False, device="cpu")
    embedded = [vision.embed(model, replace(inputs, text_only=each)) for each in (True, False)]
    assert len(seen) == 1
    assert torch.equal(*embedded)


class _Parked(nn.Module):
    """An embedding whose parameter says that it is on another device, as under FSDP's offload policy."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty_like(table, device="meta"))
        self._lookup = lambda index: F.embedding(index, table)

    def forward(self, index: Tensor) -> Tensor:
        assert index.device.type == "cpu", "the indices follow the parameter, not the patches"
        return self._lookup(index)


@pytest.mark.parametrize("experts", EXPERTS)
def test_position_embeddings_follow_the_patches_and_not_the_parked_parameter(experts):
    model = ready(vision_language(experts=experts))
    inputs = read(model, SCENES["images and videos"])
    with torch.no_grad():
        expected = vision.embed(model, inputs)
        tower = model.model.visual
        tower.pos_embed = _Parked(tower.pos_embed.weight.detach())
        assert torch.equal(vision.embed(model, inputs), expected)


def test_a_tower_from_the_meta_device_needs_no_buffer():
    model = ready(vision_language())
    inputs = read(model, SCENES["one image"])
    with torch.no_grad():
        expected = vision.embed(model, inputs)
        model.model.visual.rotary_pos_emb.to("meta")
        assert torch.equal(vision.embed(model, inputs), expected)


def test_tokens_that_were_padded_further_stay_padding():
    model = ready(vision_language())
    inputs = read(model, SCENES["one image"])
    wider = ModelInput(F.pad(inputs.tokens, (0, 3)), F.pad(inputs.positions, (0, 0, 0, 3)), None, inputs.pictures)
    with torch.no_grad():
        assert torch.equal(vision.embed(model, wider)[:, :-3], vision.embed(model, inputs))


def test_a_count_that_does_not_fit_is_refused_with_both_counts_and_the_grids():
    model = ready(vision_language())
    inputs = read(model, SCENES["images and videos"])
    inputs.pictures.token_types[inputs.pictures.token_types == 1] = 0
    with pytest.raises(
        ValueError, match=r"0 image placeholders for 7 features of 2 images \(grids \[\[1, 6, 4\], \[1, 2, 2\]\]"
    ):
        vision.embed(model, inputs)


def test_a_text_model_refuses_pictures_and_says_what_reads_them(make_model):
    model = make_model()
    inputs = read(vision_language(), SCENES["one image"])
    with pytest.raises(ValueError, match="qwen3_5_text model reads text only"):
        vision.embed(model, inputs)


def test_a_placeholder_without_pictures_is_a_word_like_any_other():
    model = ready(vision_language())
    tokens = torch.tensor([3, IMAGE, 4])
    embedded = vision.embed(model, ModelInput.of_text([tokens], packed=False, device="cpu"))
    assert torch.equal(embedded[0], model.model.language_model.embed_tokens(tokens))


def test_only_the_instance_is_changed():
    model, other = vision_language(), vision_language()
    forward = type(model.model.visual).forward
    vision.adapt(model)
    vision.adapt(model)
    assert type(other.model.visual).forward is forward
    assert "forward" not in vars(other.model.visual)

"""Positions of tokens and placeholders compared with those of the library."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen35_trainer.models.qwen3_5.multimodal import multimodal_input
from qwen35_trainer.models.qwen3_5.positions import positions, text_positions, token_types
from tests.models.scenes import END, IMAGE, MERGE, START, VIDEO, show, vision_language
from tests.profiles import examples

NO_GRIDS = np.empty((0, 3), dtype=np.int64)
SCENES: dict[str, list[Any]] = {
    "text": [9],
    "one image": [3, (1, 4, 6), 5],
    "an image first and last": [(1, 4, 4), 2, (1, 2, 8)],
    "a video": [2, ("video", (3, 4, 6)), 4],
    "an image, a video, an image": [1, (1, 6, 4), 2, ("video", (2, 4, 4)), 1, (1, 2, 2), 3],
    "two videos, then an image": [("video", (1, 2, 4)), 1, ("video", (2, 2, 2)), (1, 8, 2), 1],
}
SIDES = st.sampled_from([2, 4, 6])
PARTS = st.one_of(
    st.integers(1, 5),
    st.tuples(st.just(1), SIDES, SIDES),
    st.tuples(st.just("video"), st.tuples(st.integers(1, 3), SIDES, SIDES)),
)


@pytest.fixture(scope="module")
def model() -> Any:
    return vision_language()


def of_the_library(model: Any, tokens: torch.Tensor, shown: Any) -> torch.Tensor:
    """(tokens, 3)"""
    types = torch.where(tokens == IMAGE, 1, torch.where(tokens == VIDEO, 2, 0))
    grids = [torch.from_numpy(each) if len(each) else None for each in (shown.grids, shown.video_grids)]
    placed, _ = model.model.get_rope_index(tokens[None], types[None], image_grid_thw=grids[0], video_grid_thw=grids[1])
    return placed[:, 0].T


def ours(tokens: torch.Tensor, shown: Any) -> torch.Tensor:
    types = token_types(tokens.numpy(), image_token=IMAGE, video_token=VIDEO)
    return torch.from_numpy(positions(types, shown.grids, shown.video_grids, MERGE))


@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES.keys())
def test_positions_are_those_of_the_library(model, scene):
    tokens, shown = show(scene)
    placed = ours(tokens, shown)
    assert placed.dtype == torch.int64
    assert torch.equal(placed[:, 0], torch.arange(len(tokens)))
    assert torch.equal(placed[:, 1:], of_the_library(model, tokens, shown))


@settings(max_examples=examples(60))
@given(scene=st.lists(PARTS, min_size=1, max_size=6))
def test_positions_of_any_sequence_are_those_of_the_library(model, scene):
    tokens, shown = show(scene)
    assert torch.equal(ours(tokens, shown)[:, 1:], of_the_library(model, tokens, shown))


def test_the_picture_of_the_documentation_has_the_positions_it_says():
    placed = positions(np.array([0, 0, 1, 1, 1, 1, 0, 0]), np.array([[1, 4, 4]]), NO_GRIDS, merge=2)
    assert placed.T.tolist() == [
        [0, 1, 2, 3, 4, 5, 6, 7],
        [0, 1, 2, 2, 2, 2, 4, 5],
        [0, 1, 2, 2, 3, 3, 4, 5],
        [0, 1, 2, 3, 2, 3, 4, 5],
    ]


def test_pictures_next_to_each_other_need_no_token_between_them():
    placed = positions(np.array([1, 1, 1, 2]), np.array([[1, 2, 4], [1, 2, 2]]), np.array([[1, 2, 2]]), merge=2)
    assert placed[:, 1:].tolist() == [[0, 0, 0], [0, 0, 1], [2, 2, 2], [3, 3, 3]]


def test_text_has_the_same_position_in_every_row():
    assert text_positions(4).tolist() == [[i] * 4 for i in range(4)]
    assert np.array_equal(positions(np.zeros(4, dtype=np.int64), NO_GRIDS, NO_GRIDS, 2), text_positions(4))


def test_token_types_cover_prompt_and_response_alike():
    tokens = np.array([3, START, IMAGE, IMAGE, END, 4, START, VIDEO, END, 5])
    assert token_types(tokens, image_token=IMAGE, video_token=VIDEO).tolist() == [0, 0, 1, 1, 0, 0, 0, 2, 0, 0]


def test_a_placeholder_that_the_model_sampled_is_text():
    tokens = np.array([START, IMAGE, END, 4, IMAGE, 5])
    written = np.array([False, False, False, False, True, True])
    types = token_types(tokens, image_token=IMAGE, video_token=VIDEO, written=written)
    assert types.tolist() == [0, 1, 0, 0, 0, 0]
    assert positions(types, np.array([[1, 2, 2]]), NO_GRIDS, 2)[:, 1].tolist() == [0, 1, 2, 3, 4, 5]


def test_placeholders_that_are_not_those_of_the_pictures_are_refused_with_both_counts():
    with pytest.raises(
        ValueError, match=r"3 image placeholders, the images take 4 .*1 video placeholders, the videos take 0"
    ):
        positions(np.array([1, 1, 1, 2]), np.array([[1, 4, 4]]), NO_GRIDS, 2)


def test_a_picture_with_a_token_inside_is_refused():
    with pytest.raises(ValueError, match="tokens 0 to 3 are one image"):
        positions(np.array([1, 1, 0, 1, 1]), np.array([[1, 4, 4]]), NO_GRIDS, 2)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_a_batch_holds_the_positions_of_each_sequence(model, packed):
    scenes = [show(scene, seed) for seed, scene in enumerate(SCENES.values())]
    batch = multimodal_input(
        [tokens for tokens, _ in scenes], [shown for _, shown in scenes], model.config, packed=packed, device="cpu"
    )
    assert batch.positions.dim() == 3
    start = 0
    for row, (tokens, shown) in enumerate(scenes):
        place = (0, slice(start, start + len(tokens))) if packed else (row, slice(0, len(tokens)))
        assert torch.equal(batch.tokens[place], tokens)
        assert torch.equal(batch.positions[place][:, 1:], of_the_library(model, tokens, shown))
        assert torch.equal(batch.positions[place][:, 0], torch.arange(len(tokens)))
        start += len(tokens)
    assert batch.pictures.grids.tolist() == [grid for _, shown in scenes for grid in shown.grids.tolist()]
    assert batch.pictures.video_grids.tolist() == [grid for _, shown in scenes for grid in shown.video_grids.tolist()]


def test_a_batch_without_pictures_is_text(model):
    batch = multimodal_input([torch.arange(3), torch.arange(5)], [None, None], model.config, packed=True, device="cpu")
    assert batch.pictures is None
    assert batch.positions[0, 3:].tolist() == [[i] * 4 for i in range(5)]


def test_a_placeholder_that_the_model_sampled_is_text_in_a_batch_too(model):
    tokens, shown = show([2, (1, 4, 4), 1])
    tokens = torch.cat((tokens, torch.tensor([IMAGE, 3])))
    written = torch.arange(len(tokens)) >= len(tokens) - 2
    batch = multimodal_input([tokens], [shown], model.config, written=[written], packed=True, device="cpu")
    assert batch.pictures.token_types.tolist() == [[0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0]]


def test_without_patches_the_positions_of_pictures_are_left(model):
    """What later pipeline stages need."""
    tokens, shown = show([3, (1, 4, 6), 2], 0)
    whole, without = (
        multimodal_input([tokens], [shown], model.config, packed=False, with_patches=with_patches, device="cpu")
        for with_patches in (True, False)
    )
    assert whole.pictures is not None
    assert without.pictures is None
    assert torch.equal(without.positions, whole.positions)
    assert not torch.equal(without.positions[..., 1], without.positions[..., 2])


def test_every_sequence_whose_pictures_do_not_fit_is_named(model):
    tokens, shown = show([(1, 4, 4), 2])
    wrong = tokens[:3]
    with pytest.raises(ValueError, match=r"sequence 0: 2 image placeholders.*\n?.*sequence 2: 2 image placeholders"):
        multimodal_input([wrong, tokens, wrong], [shown] * 3, model.config, packed=False, device="cpu")

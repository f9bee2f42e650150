"""Pictures in the engine on vLLM: their places in prompts, and one engine of vLLM itself, on a tiny vision-language model."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qwen35_trainer.data.data_errors import DataError
from qwen35_trainer.data.picture_arrays import PictureArrays
from qwen35_trainer.models.qwen3_5.pictures import IMAGE as IMAGE_KIND
from qwen35_trainer.models.qwen3_5.pictures import VIDEO as VIDEO_KIND
from qwen35_trainer.rollout.rollout_engine import (
    NO_TOKENS,
    Completed,
    EndReason,
    EngineLimits,
    GeneratedTokens,
    SequenceRequest,
)
from qwen35_trainer.rollout.version_runs import VersionRuns
from qwen35_trainer.rollout.vllm_core import CoreSettings, core_arguments
from qwen35_trainer.rollout.vllm_pictures import PlacedPictures, placed, position_settings
from tests.models.scenes import END, IMAGE, START, VIDEO, show
from tests.rollout.loading import load
from tests.rollout.shown import Shown, scored_by_the_library, shown_scenes
from tests.rollout.test_vllm import MAX_LENGTH, SHAPE, SLOTS, Replica, engine_of, library_model
from tests.rollout.test_vllm_adapters import LORA, adapters_of, merged

type Sequences = dict[tuple[int, int], Completed]

CLOSE = 0.02
"""Highest mean difference of log-probs in bfloat16 from those of the library in float32."""
OTHER = 0.1
"""Lowest mean difference from those of other pictures or other weights."""


def pictured(seed: int = 0, shape: Mapping[str, Any] | None = None) -> Any:
    """A vision-language model of the library whose special tokens are those of the scenes."""
    model = library_model(seed, SHAPE | {"vision": {}} | (shape or {}))
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
    for name, token in ids.items():
        setattr(model.config, name, token)
    return model


def pieces(part: PlacedPictures) -> list[np.ndarray]:
    """The patches of each picture."""
    return np.split(part.patches, part.grids.prod(1).cumsum()[:-1])


def test_images_and_pairs_of_frames_stand_where_their_placeholders_are() -> None:
    tokens, arrays = show([3, ("video", (2, 4, 2)), (1, 2, 4), 2, (1, 2, 2), ("video", (1, 2, 2))])
    images, frames = placed(tokens.numpy().astype(np.int32), arrays, pictured().config)
    assert images.grids.tolist() == [[1, 2, 4], [1, 2, 2]]
    assert frames.grids.tolist() == [[1, 4, 2], [1, 4, 2], [1, 2, 2]]
    for part, kind in ((images, IMAGE), (frames, VIDEO)):
        covered = [
            at for start, size in zip(part.starts, part.lengths, strict=True) for at in range(start, start + size)
        ]
        assert covered == np.flatnonzero(tokens.numpy() == kind).tolist()
    np.testing.assert_array_equal(np.concatenate(pieces(images)), arrays.patches)
    np.testing.assert_array_equal(np.concatenate(pieces(frames)), arrays.video_patches)
    assert (images.name, frames.name) == (f"{arrays.digest}-{IMAGE_KIND}", f"{arrays.digest}-{VIDEO_KIND}")


def test_a_name_changes_with_a_patch_and_with_a_grid() -> None:
    _, arrays = show([(1, 2, 4), ("video", (2, 2, 2))])
    other = copy.deepcopy(arrays.patches)
    other[3, 5] += 1
    turned = arrays.grids[:, [0, 2, 1]]
    digests = {
        each.digest
        for each in (
            arrays,
            replace(arrays, patches=other),
            replace(arrays, grids=turned),
            replace(arrays, video_patches=arrays.video_patches * 2),
        )
    }
    assert len(digests) == 4
    assert copy.deepcopy(arrays).digest == arrays.digest


def test_placeholders_that_do_not_match_the_pictures_are_named() -> None:
    tokens, arrays = show([3, (1, 4, 6)])
    with pytest.raises(ValueError, match="5 image placeholders, the images take 6"):
        placed(tokens.numpy()[:-2].astype(np.int32), arrays, pictured().config)


@pytest.mark.parametrize("channels", [32, 64, 96, 256])
@pytest.mark.parametrize("sections", [None, [11, 11, 10], [2, 1, 1], [24, 20, 20]])
def test_positions_get_the_channels_that_the_library_gives_them(channels: int, sections: list[int] | None) -> None:
    """A quarter of the channels turns, so 256 channels have 32 pairs, for 11 + 11 + 10 of published models."""
    config = copy.deepcopy(pictured().config)
    text = config.text_config
    text.head_dim = channels
    rope = {name: value for name, value in text.rope_parameters.items() if not name.startswith("mrope")}
    text.rope_parameters = rope if sections is None else rope | {"mrope_section": sections}
    settings = position_settings(text)
    height, width = settings["mrope_section"][1:]
    pairs = torch.arange(int(channels * rope["partial_rotary_factor"]) // 2)
    of_vllm = torch.zeros_like(pairs)  # as apply_interleaved_rope
    of_vllm[(pairs % 3 == 1) & (pairs < 3 * height)] = 1
    of_vllm[(pairs % 3 == 2) & (pairs < 3 * width)] = 2
    of_library = type(pictured().model.language_model.rotary_emb)(text)
    axes = torch.arange(3.0)[:, None, None].repeat(1, 1, len(pairs))
    assert library_axes(of_library, axes).tolist() == of_vllm.tolist()
    assert sum(settings["mrope_section"]) == len(pairs)
    assert settings["mrope_interleaved"] is True
    assert {name: settings[name] for name in rope} == rope


def library_axes(rotary: Any, axes: torch.Tensor) -> torch.Tensor:
    """The axis of each pair of channels. Its method has another name in the oldest version."""
    if hasattr(rotary, "recomposition_frequencies"):
        return rotary.recomposition_frequencies(axes)[0].long()[: axes.shape[-1]]
    return rotary.apply_interleaved_mrope(axes, rotary.mrope_section)[0].long()


def test_the_size_of_the_largest_picture_is_an_argument_of_vllm_if_it_reads_pictures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("qwen35_trainer.rollout.vllm_core.cpu_cache_bytes", lambda *_: 1)
    config = pictured().config
    settings = CoreSettings(4, 64, seed=0, memory_fraction=0.5, on_cpu=True)
    arguments = core_arguments(Path(), config, settings)
    assert arguments["limit_mm_per_prompt"] == {"image": 0, "video": 0}
    assert "worker_extension_cls" not in arguments
    for tokens in (1, 10, 1000):
        arguments = core_arguments(Path(), config, replace(settings, picture_tokens=tokens))
        image = arguments["limit_mm_per_prompt"]["image"]
        side = config.vision_config.patch_size * config.vision_config.spatial_merge_size
        assert image["height"] % side == image["width"] % side == 0
        assert tokens <= image["height"] * image["width"] / side**2 < tokens + image["height"] / side
        assert image["width"] <= 3 * image["height"], "the tower has positions for a limited number of rows and columns"


def test_an_engine_without_a_tower_refuses_pictures() -> None:
    [problem] = [EngineLimits(64, 23).problem(shown_scenes()[0].request(0))]
    assert "the prompt has pictures, and the engine or its model reads text only" in problem


# vLLM itself.


@pytest.fixture(scope="module")
def built() -> Iterator[Replica]:
    models = {seed: pictured(seed) for seed in (0, 1)}
    with engine_of(models[0].config, picture_tokens=MAX_LENGTH) as (engine, core):
        yield Replica(engine, core, models, set())


@pytest.fixture
def replica(built: Replica) -> Iterator[Replica]:
    """The engine with the weights of seed 0, and afterwards without sequences."""
    built.load(0)
    yield built
    built.engine.take([(number, index) for number in range(2 * SLOTS) for index in range(SLOTS + 2)])


def run(replica: Replica, requests: Sequence[SequenceRequest]) -> Sequences:
    finished = {each.sequence: each for each in replica.engine.submit(requests)}
    while replica.engine.busy:
        finished |= {each.sequence: each for each in replica.engine.step().finished}
    return finished


def differences(model: Any, scenes: Sequence[Shown], finished: Sequences, kept: int = 0) -> np.ndarray:
    """Of the log-probs of all tokens from number `kept`. The number of a group is that of its scene."""
    return np.concatenate(
        [
            np.abs(completed.tokens.log_probs - scored_by_the_library(model, scenes[group], completed.tokens.ids))[
                kept:
            ]
            for (group, _), completed in finished.items()
        ]
    )


def repainted(shown: Shown) -> Shown:
    """The same prompt with other pictures."""
    arrays = shown.pictures
    if arrays is None:
        return shown
    return replace(shown, pictures=replace(arrays, patches=-arrays.patches, video_patches=-arrays.video_patches))


def test_log_probs_of_prompts_with_pictures_are_those_of_the_library(replica: Replica) -> None:
    """Images, text, several images, videos; samples of a prompt together; and placeholders that the model drew itself."""
    scenes = shown_scenes()
    requests = [each.request(group, index) for group, each in enumerate(scenes) for index in range(8)]
    finished = run(replica, requests)
    assert {each.reason for each in finished.values()} == {EndReason.LENGTH, EndReason.STOP}
    assert differences(replica.models[0], scenes, finished).mean() <= CLOSE
    shown = {name: each for name, each in finished.items() if scenes[name[0]].pictures is not None}
    assert differences(replica.models[0], [repainted(each) for each in scenes], shown).mean() >= OTHER
    drawn = [each for each in shown.values() if {IMAGE, VIDEO} & set(each.tokens.ids[:-1].tolist())]
    assert drawn, "no response has a placeholder, and tokens after it"


def test_a_sequence_that_moves_to_another_replica_continues_with_its_pictures(replica: Replica) -> None:
    """Also after a placeholder that the model drew, which stands for no picture."""
    scenes = shown_scenes()
    kept = GeneratedTokens(np.array([IMAGE, 5, VIDEO], np.int32), np.zeros(3, np.float32), VersionRuns.of([0, 0, 0]))
    requests = [
        each.request(group, index, kept=kept[:length])
        for group, each in enumerate(scenes)
        for index, length in enumerate((1, 3))
    ]
    finished = run(replica, requests)
    for index, length in enumerate((1, 3)):
        continued = {name: each for name, each in finished.items() if name[1] == index}
        assert all(each.tokens.ids[:length].tolist() == kept.ids[:length].tolist() for each in continued.values())
        assert differences(replica.models[0], scenes, continued, kept=length).mean() <= CLOSE
    started = [each.request(group, max_tokens=30) for group, each in enumerate(scenes)]
    replica.engine.submit(started)
    for _ in range(3):
        replica.engine.step()
    taken = replica.engine.take([each.sequence for each in started])
    moved = run(replica, [replace(each, kept=taken[each.sequence]) for each in started if each.sequence in taken])
    assert len(moved) > 1
    assert differences(replica.models[0], scenes, moved).mean() <= CLOSE


def test_new_weights_compute_the_features_of_pictures_again(replica: Replica) -> None:
    """For sequences that are submitted after a commit, and for those that wait meanwhile; running ones keep their states."""
    scenes = shown_scenes()
    first = run(replica, [each.request(group, index) for group, each in enumerate(scenes) for index in range(2)])
    assert differences(replica.models[0], scenes, first).mean() <= CLOSE
    waiting = [each.request(group, index) for index in range(SLOTS + 2) for group, each in enumerate(scenes)]
    replica.engine.submit(waiting)
    finished = {each.sequence: each for each in replica.engine.step().finished}
    version = replica.load(1)
    while replica.engine.busy:
        finished |= {each.sequence: each for each in replica.engine.step().finished}
    new = {name: each for name, each in finished.items() if set(each.tokens.versions.tolist()) == {version}}
    assert len(new) > SLOTS
    assert differences(replica.models[1], scenes, new).mean() <= CLOSE
    assert differences(replica.models[0], scenes, new).mean() >= OTHER
    again = run(replica, [each.request(group, index) for group, each in enumerate(scenes) for index in range(2)])
    assert differences(replica.models[1], scenes, again).mean() <= CLOSE


def test_prompts_with_the_same_tokens_and_other_pictures_share_no_blocks(replica: Replica) -> None:
    """The prefix cache has whole blocks of these prompts, whose pictures stand at their beginning."""
    tokens, arrays = show([2, (1, 4, 6), 590])
    shown = Shown(tokens, arrays)
    scenes = [shown, repainted(shown)]
    for group, each in enumerate(scenes):
        for _ in range(2):
            assert differences(replica.models[0], scenes, run(replica, [each.request(group)])).mean() <= 2 * CLOSE
    finished = run(replica, [each.request(group, index) for group, each in enumerate(scenes) for index in range(6)])
    assert differences(replica.models[0], scenes, finished).mean() <= CLOSE


def test_more_pictures_than_vllm_keeps_features_of_are_computed_in_turn(replica: Replica) -> None:
    scenes = [Shown(*show([2, (1, 24, 30), (1, 20, 20), 1], seed)) for seed in range(2 * SLOTS)]
    tokens = sum(len(each.tokens) for each in scenes)
    assert tokens > 2 * replica.core.input_processor.mm_encoder_cache_size
    finished = run(replica, [each.request(group, max_tokens=2) for group, each in enumerate(scenes)])
    assert len(finished) == len(scenes)
    some = {name: each for name, each in finished.items() if name[0] % 6 == 0}
    assert differences(replica.models[0], scenes, some).mean() <= 2 * CLOSE


class Damaged:
    """Pictures of a row that cannot be read."""

    def read(self) -> PictureArrays:
        raise DataError(["prompt s/3 (train.jsonl, line 4): cat.png: the image is damaged"])


def test_a_sequence_whose_pictures_cannot_be_used_ends_alone_with_the_reason(replica: Replica) -> None:
    scenes = shown_scenes()
    damaged = replace(scenes[0].request(0), pictures=Damaged())
    fewer = replace(scenes[0].request(1), prompt=scenes[0].tokens.numpy()[:-3].astype(np.int32))
    finished = run(replica, [damaged, fewer, scenes[2].request(2), scenes[3].request(3)])
    assert finished[0, 0].reason is EndReason.ERROR
    assert "prompt s/3 (train.jsonl, line 4): cat.png: the image is damaged" in finished[0, 0].error
    assert finished[1, 0].reason is EndReason.ERROR
    assert "5 image placeholders, the images take 6" in finished[1, 0].error
    assert {finished[group, 0].reason for group in (2, 3)} <= {EndReason.LENGTH, EndReason.STOP}
    assert len(finished[0, 0].tokens) == len(NO_TOKENS)


@pytest.mark.soak
@pytest.mark.parametrize(
    "shape", [{"experts": 4, "expertsPerToken": 2}, {"tieEmbeddings": True}], ids=["experts", "tied"]
)
def test_other_shapes_read_pictures_as_close_to_float32_as_the_library_in_bfloat16(shape: dict[str, Any]) -> None:
    """Where two experts are almost equally likely, rounding chooses another one, in the library as in vLLM. So all models count together."""
    models, scenes = {seed: pictured(seed, shape) for seed in range(4)}, shown_scenes()
    of_vllm, of_library = [], []
    with engine_of(models[0].config, picture_tokens=MAX_LENGTH) as (engine, core):
        replica = Replica(engine, core, models, set())
        for seed, model in models.items():
            replica.load(seed)
            finished = run(
                replica, [each.request(group, index) for group, each in enumerate(scenes) for index in range(8)]
            )
            of_vllm.append(differences(model, scenes, finished))
            of_library.append(differences_of_rounding(model, scenes, finished))
    assert np.concatenate(of_vllm).mean() <= 2 * np.concatenate(of_library).mean()


@pytest.mark.soak
def test_adapters_are_used_with_pictures() -> None:
    base, scenes = pictured(), shown_scenes()
    with engine_of(base.config, LORA, picture_tokens=MAX_LENGTH) as (engine, core):
        engine.load_base(dict(base.named_parameters()))
        for seed in (0, 1):
            adapters = adapters_of(base, seed)
            load(engine, adapters, seed)
            replica = Replica(engine, core, {}, set())
            finished = run(
                replica, [each.request(group, index) for group, each in enumerate(scenes) for index in range(4)]
            )
            assert differences(merged(base, adapters), scenes, finished).mean() <= CLOSE
            assert differences(base, scenes, finished).mean() >= OTHER


def differences_of_rounding(model: Any, scenes: Sequence[Shown], finished: Sequences) -> np.ndarray:
    """Of the log-probs of the library in bfloat16 from its own in float32."""
    rounded = copy.deepcopy(model).bfloat16()
    return np.concatenate(
        [
            np.abs(
                scored_by_the_library(rounded, scenes[group], completed.tokens.ids)
                - scored_by_the_library(model, scenes[group], completed.tokens.ids)
            )
            for (group, _), completed in finished.items()
        ]
    )

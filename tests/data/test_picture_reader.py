"""Pictures against transformers' own processor for this family."""

import dataclasses
import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image
from transformers import PreTrainedTokenizerFast

from qwen35_trainer.data import (
    DataError,
    PictureReader,
    Prompt,
    SupervisedExample,
    Video,
    character_tokenizer,
    encode_examples,
    encode_prompts,
    load_picture_reader,
)
from qwen35_trainer.data.picture_processor import Patching, PictureProcessor
from qwen35_trainer.data.picture_set import MAX_INLINE_BYTES, MAX_KEPT_BYTES, PictureSet
from qwen35_trainer.manifest.model import ModelSpec

type MakeQwen = Callable[..., PreTrainedTokenizerFast]

PATCHING = Patching(4, 2, 2, (64, 4096))
PROCESSOR = PictureProcessor(None, PATCHING)


def picture(width: int, height: int, seed: int = 0) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, "PNG")
    return written.getvalue()


def pixels(image: bytes) -> Any:
    return Image.open(io.BytesIO(image))


def showing(*parts: str, images: tuple[Any, ...] = (), videos: tuple[Video, ...] = (), answer: str = "是 ✅") -> Prompt:
    content = [{"type": part} if part in ("image", "video") else {"type": "text", "text": part} for part in parts]
    return Prompt("s/0", "s", ({"role": "user", "content": content},), answer, images=images, videos=videos)


def encode(prompt: Prompt, reader: PictureReader, limit: int = 2000, **options: Any) -> SupervisedExample:
    tokenizer: Any = reader.tokenizer
    [example] = encode_examples([prompt], tokenizer, limit, thinking=False, reader=reader, **options)
    return example


@pytest.fixture
def reader(make_qwen: MakeQwen) -> PictureReader:
    return PictureReader(make_qwen(), PROCESSOR)


def test_tokens_and_patches_are_those_of_the_familys_processor(make_qwen: MakeQwen, reader: PictureReader) -> None:
    from transformers import Qwen3VLProcessor

    images = (picture(30, 20), picture(8, 8, 1), picture(50, 17, 2))
    frames = tuple(picture(24, 16, seed) for seed in range(5))
    prompt = showing(
        "image", "和", "image", "？ ", "video", " 🎬", "image", images=images, videos=(Video(frames, 2.0),)
    )
    example = encode(prompt, reader)
    theirs = Qwen3VLProcessor(PROCESSOR.image_processor, make_qwen(), PROCESSOR.video_processor)
    text = theirs.tokenizer.apply_chat_template(
        [*prompt.messages, {"role": "assistant", "content": "是 ✅"}], tokenize=False
    )
    clip = np.stack([np.asarray(pixels(frame)) for frame in frames])
    read_arrays = theirs(
        text=[text],
        images=[pixels(image) for image in images],
        videos=[clip],
        video_metadata=[{"fps": 2.0, "total_num_frames": 5, "frames_indices": [0, 1, 2, 3, 4]}],
        do_sample_frames=False,
        return_tensors="pt",
    )
    assert (*example.token_ids, 198) == tuple(read_arrays["input_ids"][0].tolist())
    assert example.pictures is not None
    arrays = example.pictures.read()
    np.testing.assert_array_equal(arrays.patches, read_arrays["pixel_values"].numpy())
    np.testing.assert_array_equal(arrays.grids, read_arrays["image_grid_thw"].numpy())
    np.testing.assert_array_equal(arrays.video_patches, read_arrays["pixel_values_videos"].numpy())
    np.testing.assert_array_equal(arrays.video_grids, read_arrays["video_grid_thw"].numpy())
    assert sum(arrays.placeholders(2)[0]) == reader.placeholders(example.token_ids)[0]
    assert sum(arrays.placeholders(2)[1]) == reader.placeholders(example.token_ids)[1]


def test_only_the_answer_trains_in_an_example_with_pictures(reader: PictureReader) -> None:
    example = encode(showing("image", "猫？", images=(picture(16, 16),)), reader)
    trained = [token for token, trains in zip(example.token_ids, example.loss_mask, strict=True) if trains]
    assert reader.tokenizer.decode(trained) == "是 ✅<|im_end|>"
    assert len(example.loss_mask) == len(example.token_ids)


def test_an_example_has_the_pictures_of_its_own_stretch(reader: PictureReader) -> None:
    turns = tuple(
        {"role": role, "content": content}
        for role, content in [("user", [{"type": "image"}]), ("assistant", "一"), ("user", [{"type": "image"}])] * 2
    )
    images = tuple(picture(8 * (at + 1), 8, at) for at in range(4))
    prompt = Prompt("s/0", "s", (*turns, {"role": "assistant", "content": "二"}), images=images)
    examples = encode_examples([prompt], reader.tokenizer, 2000, thinking=False, reader=reader)
    shown = [example.pictures.images for example in examples if example.pictures is not None]
    assert shown == [images[:1], images[:3], images]
    assert [reader.placeholders(example.token_ids)[0] for example in examples] == [1, 6, 10]


def test_a_row_without_pictures_is_text(reader: PictureReader) -> None:
    assert encode(showing("你好"), reader).pictures is None


def test_placeholders_written_as_text_are_refused_by_row(reader: PictureReader) -> None:
    with pytest.raises(
        DataError, match=r"s/0: the text has 2 image and 0 video placeholders for 1 images and 0 videos"
    ):
        encode(showing("image", "<|image_pad|>", images=(picture(8, 8),)), reader)


def test_a_cut_through_a_picture_is_refused_by_row(reader: PictureReader) -> None:
    prompt = showing("before " * 20, "image", "behind", images=(picture(32, 32),))
    whole = encode(prompt, reader)
    most = len(whole.token_ids)
    cut = encode(prompt, reader, most - 5, overlong="TruncateLeft")
    assert cut.token_ids.tolist() == whole.token_ids[5:].tolist()
    with pytest.raises(DataError, match=r"prompt s/0, .*: the cut goes through an image or a video"):
        encode(prompt, reader, most - 30, overlong="TruncateLeft")


def test_a_model_without_a_vision_tower_refuses_pictures(make_qwen: MakeQwen) -> None:
    prompt = showing("image", images=(picture(8, 8),))
    for encoded in (encode_examples, encode_prompts):
        with pytest.raises(DataError, match="s/0: the model has no vision tower"):
            encoded([prompt], make_qwen(), 100)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_is_read_as_it_is_shown(reader: PictureReader, kind: str, orientation: int) -> None:
    """A telephone stores how it was held, and not turned pixels. transformers' own function for files is the reference."""
    from transformers.image_utils import load_image

    exif, written = Image.Exif(), io.BytesIO()
    exif[ExifTags.Base.Orientation] = orientation
    pixels(picture(40, 16)).save(written, kind, exif=exif)
    example = encode(showing("image", images=(written.getvalue(),)), reader)
    theirs = PROCESSOR.image_processor(images=[load_image(pixels(written.getvalue()))], return_tensors="np")
    assert example.pictures is not None
    arrays = example.pictures.read()
    np.testing.assert_array_equal(arrays.patches, theirs["pixel_values"])
    tokens = np.prod(theirs["image_grid_thw"]) // PATCHING.merge**2
    assert arrays.placeholders(PATCHING.merge)[0] == (tokens,)
    assert reader.processor.image_tokens(written.getvalue()) == tokens


def test_damaged_exif_data_do_not_cost_the_picture(reader: PictureReader) -> None:
    written = io.BytesIO()
    pixels(picture(40, 16)).save(written, "PNG", exif=b"Exif\0\0MM\0*\0\0\0\xff")
    assert reader.processor.image_tokens(written.getvalue()) == reader.processor.image_tokens(picture(40, 16))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L"])
def test_what_is_transparent_becomes_white(reader: PictureReader, mode: str) -> None:
    """As when vLLM serves the model. Drawings often have black lines and no background."""
    grey = np.full((16, 16), 0, np.uint8)
    grey[4:8], alpha = 90, np.where(np.arange(16) < 8, 255, 0).astype(np.uint8)[None].repeat(16, 0)
    colours = Image.merge("LA", [Image.fromarray(grey), Image.fromarray(alpha)])
    options: dict[str, Any] = {}
    if mode in ("P", "L"):  # one value of the pixels is transparent
        colours = Image.fromarray(np.where(alpha > 0, grey, 200).astype(np.uint8))
        options["transparency"] = 200
    written = io.BytesIO()
    colours.convert(mode).save(written, "PNG", **options)
    shown = Image.fromarray(np.where(alpha > 0, grey, 255).astype(np.uint8)).convert("RGB")
    theirs = PROCESSOR.image_processor(images=[shown], return_tensors="np")
    example = encode(showing("image", images=(written.getvalue(),)), reader)
    assert example.pictures is not None
    np.testing.assert_array_equal(example.pictures.read().patches, theirs["pixel_values"])


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([picture(24, 16)], r"a video of 1 frames of 24 × 16 pixels cannot be resized"),
        ([picture(24, 16), picture(16, 24)], r"a video has frames of 24 × 16 and of 16 × 24 pixels. Give all frames"),
        ([picture(1208, 4)] * 2, r"a video of 2 frames of 1208 × 4 pixels cannot be resized"),
        ([picture(24, 16), b"no picture"], r"image of 10 bytes: not a readable image"),
    ],
    ids=["one frame", "two sizes", "too long", "damaged"],
)
def test_videos_that_cannot_be_read_are_refused_by_row(
    reader: PictureReader, frames: list[bytes], message: str
) -> None:
    with pytest.raises(DataError, match=f"s/0: {message}"):
        encode(showing("video", videos=(Video(tuple(frames), 2.0),)), reader)


def test_files_that_are_not_images_are_named(reader: PictureReader, tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("no image")
    with pytest.raises(DataError, match=r"s/0: .*text.png: not a readable image"):
        encode(showing("image", images=(tmp_path / "text.png",)), reader)
    with pytest.raises(DataError, match=r"s/0: .*absent.png: not a readable image"):
        encode(showing("image", images=(tmp_path / "absent.png",)), reader)
    with pytest.raises(DataError, match=r"s/0: image of \d+ bytes: 1208 × 4 pixels cannot be resized \(.*aspect ratio"):
        encode(showing("image", images=(picture(1208, 4),)), reader)
    damaged = encode(showing("image", images=(picture(64, 64)[:2000],)), reader)
    assert damaged.pictures is not None
    with pytest.raises(DataError, match="prompt s/0: image of 2000 bytes: the image is damaged"):
        damaged.pictures.read()


def test_random_models_read_pictures_as_their_tower_is_shaped(tmp_path: Path) -> None:
    random = {"vision": {"patchSize": 2, "spatialMergeSize": 3}, "characters": "ab"}
    model = ModelSpec.model_validate({"name": "tiny", "source": {"random": random}})
    reader = load_picture_reader(model, tmp_path, character_tokenizer("ab", vision=True))
    assert reader is not None
    arrays = reader.processor.read([picture(12, 6)], [])
    assert arrays.grids.tolist() == [[1, 3, 6]]
    assert arrays.patches.shape == (18, 3 * 2 * 2 * 2)
    assert arrays.video_patches.shape == (0, 0)


def test_checkpoints_read_pictures_as_their_preprocessor_says(make_qwen: MakeQwen, tmp_path: Path) -> None:
    model = ModelSpec.model_validate({"name": "tiny", "source": {"path": "model"}})
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert load_picture_reader(model, tmp_path, make_qwen()) is None
    (folder / "config.json").write_text(json.dumps({"vision_config": {"patch_size": 4}}))
    with pytest.raises(DataError, match="vision_config lacks temporal_patch_size, spatial_merge_size"):
        load_picture_reader(model, tmp_path, make_qwen())
    tower = {"patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2}
    (folder / "config.json").write_text(json.dumps({"vision_config": tower}))
    PROCESSOR.image_processor.save_pretrained(folder)
    reader = load_picture_reader(model, tmp_path, make_qwen())
    assert reader is not None
    assert reader.processor.patching == Patching(4, 2, 2)
    assert reader.processor.read([picture(16, 8)], []).grids.tolist() == [[1, 2, 4]]
    (folder / "config.json").write_text(json.dumps({"vision_config": tower, "architectures": ["Qwen3_5ForCausalLM"]}))
    assert load_picture_reader(model, tmp_path, make_qwen()) is None  # of this folder, only the text model is loaded


def test_videos_are_read_by_the_settings_that_transformers_5_saves(make_qwen: MakeQwen, tmp_path: Path) -> None:
    from transformers import Qwen3VLProcessor

    Qwen3VLProcessor(PROCESSOR.image_processor, make_qwen(), PROCESSOR.video_processor).save_pretrained(tmp_path)
    assert "video_processor" in json.loads((tmp_path / "processor_config.json").read_text())
    assert not (tmp_path / "video_preprocessor_config.json").exists()
    saved = PictureProcessor(tmp_path, Patching(4, 2, 2))
    assert saved.video_processor.size == PROCESSOR.video_processor.size
    assert saved.video_processor.cap_pixels_per_frame is False


def test_a_prompt_has_the_tokens_and_pictures_that_the_familys_processor_gives_it(
    make_qwen: MakeQwen, reader: PictureReader
) -> None:
    """Several images, of which one is larger than the processor allows, and a video."""
    from transformers import Qwen3VLProcessor

    images = (picture(30, 20), picture(200, 120, 1))
    frames = tuple(picture(24, 16, seed) for seed in range(3))
    prompt = showing("image", "larger than", "image", "? ", "video", images=images, videos=(Video(frames, 2.0),))
    [encoded] = encode_prompts([prompt], make_qwen(), 400, thinking=False, reader=reader)
    theirs = Qwen3VLProcessor(PROCESSOR.image_processor, make_qwen(), PROCESSOR.video_processor)
    text = theirs.tokenizer.apply_chat_template(
        [dict(message) for message in prompt.messages],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    inputs = theirs(
        text=[text],
        images=[pixels(image) for image in images],
        videos=[np.stack([np.asarray(pixels(frame)) for frame in frames])],
        video_metadata=[{"fps": 2.0, "total_num_frames": 3, "frames_indices": [0, 1, 2]}],
        do_sample_frames=False,
        return_tensors="np",
    )
    assert encoded.token_ids.tolist() == inputs["input_ids"][0].tolist()
    assert encoded.pictures is not None
    arrays = encoded.pictures.read()
    assert arrays.placeholders(2)[0] == (8, 60)  # a token has 64 pixels, and an image at most 4,096
    np.testing.assert_array_equal(arrays.patches, inputs["pixel_values"])
    np.testing.assert_array_equal(arrays.video_patches, inputs["pixel_values_videos"])


def test_a_prompt_whose_pictures_do_not_fit_is_named_with_its_row(reader: PictureReader) -> None:
    prompt = dataclasses.replace(showing("image", "?", images=(picture(64, 64),)), place="train.jsonl, line 3")

    def encoded(limit: int, **options: Any) -> Any:
        return encode_prompts([prompt], reader.tokenizer, limit, reader=reader, **options)

    with pytest.raises(DataError, match=r"s/0 \(\d+ tokens with its 1 images and 0 videos; train.jsonl, line 3\)"):
        encoded(20)
    with pytest.raises(DataError, match=r"s/0 \(train.jsonl, line 3\), .*: the cut goes through an image"):
        encoded(20, overlong="TruncateLeft")


def test_a_prompt_with_too_many_bytes_of_pictures_is_refused_before_they_are_sent(reader: PictureReader) -> None:
    prompt = showing("image", images=(picture(8, 8) + bytes(MAX_INLINE_BYTES),))
    with pytest.raises(
        DataError, match=r"its pictures take 32.0 MiB in the data themselves, above 32. Save them as files"
    ):
        encode_prompts([prompt], reader.tokenizer, 100, reader=reader)


def test_a_set_of_pictures_is_sent_as_references_and_read_once_per_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(picture(64, 64, number))
    sets = [PictureSet(PROCESSOR, (tmp_path / f"{number}.png",), (), "prompt s/0") for number in range(3)]
    sent = [pickle.loads(pickle.dumps(each)) for each in sets]
    assert len(pickle.dumps(sets[0])) < 1000
    first = sent[0].read()
    np.testing.assert_array_equal(first.patches, sets[0].read().patches)
    assert sets[0].read() is first
    monkeypatch.setattr("qwen35_trainer.data.picture_set.MAX_KEPT_BYTES", 2 * first.nbytes)
    sent[1].read()
    assert sets[0].read() is first
    sent[2].read()  # the second one was used before the first one
    (tmp_path / "1.png").unlink()
    assert sets[0].read() is first
    with pytest.raises(DataError, match=r"prompt s/0: .*1.png: not a readable image"):
        sets[1].read()
    assert 2 * first.nbytes < MAX_KEPT_BYTES

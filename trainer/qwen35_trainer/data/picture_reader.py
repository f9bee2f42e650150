"""Reads images and videos of examples for the vision tower, and expands their placeholder tokens.

    …<|vision_start|><|image_pad|><|vision_end|>…        written by the template: one placeholder for each image
    …<|vision_start|><|image_pad|>×n<|vision_end|>…      read by the model: n placeholders, one for each merge² patches

The number of placeholders follows from the sizes in the headers of the files. Pixels are read when a batch needs them,
so that the images of a data set are never in memory together. Pictures are resized, normalised and cut into patches by
the processors of transformers for this family. Images use the PIL processor. Videos use the video processor, which
needs torchvision and is created for the first video.
"""

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qwen35_trainer.data.data_errors import DataError
from qwen35_trainer.data.picture_arrays import PictureArrays
from qwen35_trainer.data.prompt import Image, Video
from qwen35_trainer.data.template import EncodingError, TemplateEncoder, TokenIds
from qwen35_trainer.data.tokenizer import IMAGE_PAD, VIDEO_PAD, VISION_END, VISION_START
from qwen35_trainer.manifest.model import ModelSpec

if TYPE_CHECKING:
    from PIL.Image import Image as Pixels
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Patching:
    """The settings by which pictures are divided into patches.

    patch: side of a patch in pixels. frames: frames of a video per patch. merge: number of patches per side that become
    one token. pixels: minimum and maximum number of pixels of a resized image; None: those of the image processor.
    """

    patch: int
    frames: int
    merge: int
    pixels: tuple[int, int] | None = None


@dataclass(frozen=True)
class PictureReader:
    """Reads images and videos for one model: decodes, resizes and cuts them into patches.

    folder: a checkpoint whose preprocessor settings are used; None: only `patching` is used.
    """

    tokenizer: "PreTrainedTokenizerBase"
    folder: Path | None
    patching: Patching

    @cached_property
    def image_processor(self) -> Any:  # noqa: ANN401  # transformers' processors are untyped
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        if self.folder is not None:
            return Qwen2VLImageProcessorPil.from_pretrained(self.folder, local_files_only=True)
        return Qwen2VLImageProcessorPil(**self._settings)

    @cached_property
    def video_processor(self) -> Any:  # noqa: ANN401
        from transformers.utils.import_utils import is_torchvision_available

        if not is_torchvision_available():
            raise EncodingError(
                "videos need torchvision, which is not installed. Install it, or show frames as images."
            )
        from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

        if self.folder is not None and (self.folder / "video_preprocessor_config.json").is_file():
            return Qwen3VLVideoProcessor.from_pretrained(self.folder, local_files_only=True, cap_pixels_per_frame=False)
        return Qwen3VLVideoProcessor(cap_pixels_per_frame=False, **self._settings)

    @property
    def _settings(self) -> dict[str, Any]:
        sizes: dict[str, Any] = {}
        if self.patching.pixels is not None:
            min_pixels, max_pixels = self.patching.pixels
            sizes["size"] = {"shortest_edge": min_pixels, "longest_edge": max_pixels}
        return {
            "patch_size": self.patching.patch,
            "temporal_patch_size": self.patching.frames,
            "merge_size": self.patching.merge,
            **sizes,
        }

    @cached_property
    def _pads(self) -> tuple[int, int]:
        vocabulary: dict[str, int] = self.tokenizer.get_vocab()
        if missing := [token for token in (IMAGE_PAD, VIDEO_PAD) if token not in vocabulary]:
            raise EncodingError(
                f"the tokenizer has no {' and no '.join(missing)}, which the model's vision tower needs."
            )
        return vocabulary[IMAGE_PAD], vocabulary[VIDEO_PAD]

    def placeholders(self, token_ids: TokenIds) -> tuple[int, int]:
        """Count the placeholders of images and of videos among the tokens."""
        image, video = self._pads
        return token_ids.count(image), token_ids.count(video)

    def expand(
        self, token_ids: TokenIds, mask: tuple[bool, ...], pictures: "PictureSet"
    ) -> tuple[TokenIds, tuple[bool, ...]]:
        """Replace each placeholder of a picture by as many placeholders as the picture has tokens.

        mask: one flag per token, which is repeated with it. pictures: in the order of their placeholders. Returns the
        expanded tokens and mask. Raises EncodingError if the number of placeholders differs from the number of
        pictures.
        """
        counts, expected = self.placeholders(token_ids), (len(pictures.images), len(pictures.videos))
        if counts != expected:
            raise EncodingError(
                f"the text has {counts[0]} image and {counts[1]} video placeholders for {expected[0]} images and {expected[1]} "
                f"videos. The chat template must write one each, and no text may hold {IMAGE_PAD} or {VIDEO_PAD}."
            )
        runs = {
            self._pads[0]: iter([self._image_run(image) for image in pictures.images]),
            self._pads[1]: iter([self._video_run(video) for video in pictures.videos]),
        }
        pieces = [next(runs[token]) if token in runs else (token,) for token in token_ids]
        expanded = tuple(token for piece in pieces for token in piece)
        return expanded, tuple(flag for piece, flag in zip(pieces, mask, strict=True) for _ in piece)

    def _image_run(self, image: Image) -> TokenIds:
        with _opened(image) as pixels:
            width, height = pixels.size
        patches = int(self.image_processor.get_number_of_image_patches(height, width))
        return (self._pads[0],) * (patches // self.patching.merge**2)

    def _video_run(self, video: Video) -> TokenIds:
        """Return the tokens of a video, as transformers' Qwen3VLProcessor writes them.

        A video is divided along time into patches of, for example, two frames. The tokens of such a patch are its time as
        text, and its placeholders.
        """
        with _opened(video.frames[0]) as pixels:
            width, height = pixels.size
        times = list(self._times(video))
        patches = int(self.video_processor.get_num_of_video_patches(len(video.frames), height, width))
        tokens: list[int] = []
        for time in times:
            text = f"<{time:.1f} seconds>{VISION_START}{VIDEO_PAD * (patches // len(times) // self.patching.merge**2)}"
            tokens += TemplateEncoder(self.tokenizer).rendered(text + VISION_END)
        return tuple(tokens)

    def _times(self, video: Video) -> Iterator[float]:
        """Yield the time of the middle of each patch, in seconds.

        If the last patch has too few frames, the last frame is repeated.
        """
        frames = self.patching.frames
        for first in range(0, len(video.frames), frames):
            last = min(first + frames, len(video.frames)) - 1
            final = last if last - first == frames - 1 else len(video.frames) - 1
            yield (first + final) / 2 / video.fps

    def read(self, images: Sequence[Image], videos: Sequence[Video]) -> PictureArrays:
        """Read the pixels of images and videos as patches. Raises EncodingError for a file that is not an image."""
        return PictureArrays.of(
            images=self._patches(images) if images else None, videos=self._video_patches(videos) if videos else None
        )

    def _patches(self, images: Sequence[Image]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        pixels = [_pixels(image) for image in images]
        arrays = self.image_processor(images=pixels, return_tensors="np")
        return arrays["pixel_values"].astype(np.float32), arrays["image_grid_thw"].astype(np.int64)

    def _video_patches(self, videos: Sequence[Video]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        frames = [np.stack([np.asarray(_pixels(frame)) for frame in video.frames]) for video in videos]
        arrays = self.video_processor(videos=frames, do_sample_frames=False, return_tensors="pt")
        return arrays["pixel_values_videos"].numpy().astype(np.float32), arrays["video_grid_thw"].numpy().astype(
            np.int64
        )


@dataclass(frozen=True)
class PictureSet:
    """The pictures of one example, in the order of their placeholders."""

    reader: PictureReader
    images: tuple[Image, ...]
    videos: tuple[Video, ...]

    def __len__(self) -> int:
        return len(self.images) + len(self.videos)

    def read(self) -> PictureArrays:
        """Read all pictures. Raises EncodingError for a file that is not an image."""
        return self.reader.read(self.images, self.videos)


def _opened(image: Image) -> "Pixels":
    """Open an image and read its header. Raises EncodingError if the file is missing or not an image."""
    try:
        from PIL import Image as pillow  # noqa: N813  # in this module Image is a file
        from PIL import UnidentifiedImageError
    except ImportError as missing:
        raise EncodingError("images need the package pillow. Install it.") from missing
    try:
        return pillow.open(io.BytesIO(image) if isinstance(image, bytes) else image)
    except (OSError, UnidentifiedImageError) as error:
        raise EncodingError(f"{_named(image)}: not a readable image ({error}).") from error


def _pixels(image: Image) -> "Pixels":
    try:
        with _opened(image) as opened:
            return opened.convert("RGB")
    except (OSError, SyntaxError) as error:  # what Pillow raises for damaged data
        raise EncodingError(f"{_named(image)}: the image is damaged ({error}).") from error


def _named(image: Image) -> str:
    return f"image of {len(image)} bytes" if isinstance(image, bytes) else str(image)


def load_picture_reader(model: ModelSpec, base: Path, tokenizer: "PreTrainedTokenizerBase") -> PictureReader | None:
    """Create the picture reader of a model; None for a text model.

    model: `spec.model` of the manifest. base: the folder to which a relative path of the model is relative. Raises
    DataError for a checkpoint whose vision_config lacks fields of this family of models.
    """
    source = model.source
    if source.random is not None:
        vision = source.random.vision
        if vision is None:
            return None
        side = vision.patchSize * vision.spatialMergeSize
        # From 1 to 256 tokens, so that the small pictures of tests with random models are not enlarged.
        patching = Patching(
            vision.patchSize, vision.temporalPatchSize, vision.spatialMergeSize, (side**2, (16 * side) ** 2)
        )
        return PictureReader(tokenizer, None, patching)
    if source.path is None or not (config := base / source.path / "config.json").is_file():
        return None
    described = json.loads(config.read_text(encoding="utf-8")).get("vision_config")
    if described is None:
        return None
    names = ("patch_size", "temporal_patch_size", "spatial_merge_size")
    if missing := [name for name in names if name not in described]:
        raise DataError([f"{config}: vision_config lacks {', '.join(missing)}."])
    patch, frames, merge = (int(described[name]) for name in names)
    return PictureReader(tokenizer, config.parent, Patching(patch, frames, merge))

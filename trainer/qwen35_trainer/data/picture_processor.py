"""Divides images and videos into the patches that the vision tower of a model reads.

    file ─► header ─► size ─► number of tokens             before the run, for every picture
         └► pixels ─► resized, normalised ─► patches       where a forward pass needs them

Pictures are resized, normalised and cut into patches by transformers' processors for Qwen models. A picture above the
processor's maximum number of pixels becomes smaller, and a picture below its minimum becomes larger. Images use the PIL
processor. Videos use the video processor, which needs torchvision and is created for the first video.

A picture is turned as its EXIF data say, and what is transparent becomes white, as when vLLM serves the model
(`normalize_image` and `rgba_to_rgb` in vllm/multimodal/image.py). transformers' `load_image` turns pictures too, but drops
transparency, so that black lines without a background become black on black.
"""

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qwen35_trainer.data.data_errors import DataError
from qwen35_trainer.data.picture_arrays import PictureArrays
from qwen35_trainer.data.prompt import Image, Video
from qwen35_trainer.data.template import EncodingError
from qwen35_trainer.manifest.model import ModelSpec

if TYPE_CHECKING:
    from PIL.Image import Image as Pixels

_TEXT_CLASS = "ForCausalLM"
"""End of the name of a class in `architectures` that has no vision tower."""


@dataclass(frozen=True)
class Patching:
    """The settings by which pictures are divided into patches.

    patch: side of a patch in pixels. frames: number of frames of a video in one patch. merge: merge × merge
    patches become one token. pixels: minimum and maximum number of pixels of a resized image; None: the
    limits of the image processor.
    """

    patch: int
    frames: int
    merge: int
    pixels: tuple[int, int] | None = None


@dataclass(frozen=True)
class PictureProcessor:
    """Divides pictures into patches for one model. It consists of settings alone, so it can be sent between processes.

    folder: a checkpoint whose preprocessor settings are used; None: only the settings in `patching` are used.
    """

    folder: Path | None
    patching: Patching

    @property
    def image_processor(self) -> Any:  # noqa: ANN401  # transformers' processors are untyped
        return _image_processor(self)

    @property
    def video_processor(self) -> Any:  # noqa: ANN401
        return _video_processor(self)

    def image_tokens(self, image: Image) -> int:
        """Return the number of tokens of an image, from the size in its header.

        Raises EncodingError for a file that is not an image, and for a shape that the processor refuses.
        """
        width, height = image_size(image)
        try:
            patches = int(self.image_processor.get_number_of_image_patches(height, width))
        except ValueError as error:  # one side is too long for the other
            raise EncodingError(f"{_named(image)}: {width} × {height} pixels cannot be resized ({error}).") from error
        return patches // self.patching.merge**2

    def frame_tokens(self, video: Video) -> int:
        """Return the number of tokens of one time step of a video. A time step consists of `patching.frames` frames.

        Only the headers of the frames are read. Raises EncodingError if a frame is missing or not an image, if frames
        have different sizes, if the processor refuses their number or shape, and if torchvision is not installed.
        """
        sizes = [image_size(frame) for frame in video.frames]
        width, height = sizes[0]
        if other := next((size for size in sizes if size != sizes[0]), None):
            raise EncodingError(
                f"a video has frames of {width} × {height} and of {other[0]} × {other[1]} pixels. Give all frames one size."
            )
        try:
            patches = int(self.video_processor.get_num_of_video_patches(len(video.frames), height, width))
        except ValueError as error:  # too few frames, or one side is too long for the other
            raise EncodingError(
                f"a video of {len(video.frames)} frames of {width} × {height} pixels cannot be resized ({error})."
            ) from error
        return patches // -(-len(video.frames) // self.patching.frames) // self.patching.merge**2

    def read(self, images: Sequence[Image], videos: Sequence[Video]) -> PictureArrays:
        """Read the pixels of images and videos as patches.

        Raises EncodingError for a file that is missing, damaged or not an image, and for videos if torchvision is
        not installed.
        """
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


def _settings(patching: Patching) -> dict[str, Any]:
    sizes: dict[str, Any] = {}
    if patching.pixels is not None:
        min_pixels, max_pixels = patching.pixels
        sizes["size"] = {"shortest_edge": min_pixels, "longest_edge": max_pixels}
    return {
        "patch_size": patching.patch,
        "temporal_patch_size": patching.frames,
        "merge_size": patching.merge,
        **sizes,
    }


@lru_cache(maxsize=8)
def _image_processor(processor: PictureProcessor) -> Any:  # noqa: ANN401
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    if processor.folder is not None:
        return Qwen2VLImageProcessorPil.from_pretrained(processor.folder, local_files_only=True)
    return Qwen2VLImageProcessorPil(**_settings(processor.patching))


@lru_cache(maxsize=8)
def _video_processor(processor: PictureProcessor) -> Any:  # noqa: ANN401
    from transformers.utils.import_utils import is_torchvision_available

    if not is_torchvision_available():
        raise EncodingError("videos need torchvision, which is not installed. Install it, or show frames as images.")
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    folder = processor.folder
    if folder is not None and _has_video_settings(folder):
        return Qwen3VLVideoProcessor.from_pretrained(folder, local_files_only=True, cap_pixels_per_frame=False)
    return Qwen3VLVideoProcessor(cap_pixels_per_frame=False, **_settings(processor.patching))


def _has_video_settings(folder: Path) -> bool:
    """Return whether a checkpoint has settings of its own for videos.

    transformers 5 saves them in processor_config.json, and earlier versions in a file of their own.
    """
    nested = folder / "processor_config.json"
    if nested.is_file() and "video_processor" in json.loads(nested.read_text(encoding="utf-8")):
        return True
    return (folder / "video_preprocessor_config.json").is_file()


def image_size(image: Image) -> tuple[int, int]:
    """Return the width and the height of an image as it is shown, in pixels, from its header.

    Raises EncodingError if the file is missing or not an image.
    """
    with _opened(image) as opened:
        width, height = opened.size
        return (height, width) if _orientation(opened) in _TURNED else (width, height)


def _opened(image: Image) -> "Pixels":
    """Open an image and read its header. Raises EncodingError if the file is missing or not an image."""
    try:
        from PIL import Image as pillow  # noqa: N813  # in this module Image is a file
        from PIL import UnidentifiedImageError
    except ImportError as missing:
        raise EncodingError("images need the package pillow. Install it.") from missing
    try:
        return pillow.open(io.BytesIO(image) if isinstance(image, bytes) else image)
    except (OSError, UnidentifiedImageError, pillow.DecompressionBombError) as error:
        raise EncodingError(f"{_named(image)}: not a readable image ({error}).") from error


_TURNED = (5, 6, 7, 8)
"""The values of EXIF's orientation for which a picture is shown on its side."""


def _orientation(opened: "Pixels") -> int:
    """Return the value of EXIF's orientation, from 1 (upright) to 8. Reads no pixels.

    In a PNG file, only what stands before the pixels is considered, so that the size is that of the pixels.
    """
    from PIL import ExifTags
    from PIL import Image as pillow  # noqa: N813  # in this module Image is a file

    if opened.format == "TIFF":
        return 1  # Pillow itself turns the pixels and the size of these files
    try:
        exif = pillow.Image.getexif(opened)  # the method of PNG files would read pixels
        return int(exif.get(ExifTags.Base.Orientation, 1))
    except Exception:  # noqa: BLE001  # damaged EXIF data, for which Pillow raises many types, say nothing about the pixels
        return 1


def _shown(opened: "Pixels") -> "Pixels":
    """Return the pixels as they are shown: upright, and on a white background."""
    from PIL import Image as pillow  # noqa: N813

    turn = {
        2: pillow.Transpose.FLIP_LEFT_RIGHT,
        3: pillow.Transpose.ROTATE_180,
        4: pillow.Transpose.FLIP_TOP_BOTTOM,
        5: pillow.Transpose.TRANSPOSE,
        6: pillow.Transpose.ROTATE_270,
        7: pillow.Transpose.TRANSVERSE,
        8: pillow.Transpose.ROTATE_90,
    }.get(_orientation(opened))
    upright = opened if turn is None else opened.transpose(turn)
    if not upright.has_transparency_data:
        return upright.convert("RGB")
    transparent = upright.convert("RGBA")
    white = pillow.new("RGB", transparent.size, "white")
    white.paste(transparent, mask=transparent.getchannel("A"))
    return white


def _pixels(image: Image) -> "Pixels":
    with _opened(image) as opened:
        try:
            return _shown(opened)
        except MemoryError:
            raise
        except Exception as error:  # what Pillow raises for damaged data depends on the format
            raise EncodingError(f"{_named(image)}: the image is damaged ({error}).") from error


def _named(image: Image) -> str:
    return f"image of {len(image)} bytes" if isinstance(image, bytes) else str(image)


def load_picture_processor(model: ModelSpec, base: Path) -> PictureProcessor | None:
    """Return the picture processor of a model.

    Returns None for a model without a vision tower, and for a checkpoint without a local config.json.
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
        pixels = (side**2, (16 * side) ** 2)
        return PictureProcessor(
            None, Patching(vision.patchSize, vision.temporalPatchSize, vision.spatialMergeSize, pixels)
        )
    if source.path is None or not (config := base / source.path / "config.json").is_file():
        return None
    contents = json.loads(config.read_text(encoding="utf-8"))
    described, classes = contents.get("vision_config"), contents.get("architectures") or [""]
    if described is None or classes[0].endswith(_TEXT_CLASS):
        return None
    names = ("patch_size", "temporal_patch_size", "spatial_merge_size")
    if missing := [name for name in names if name not in described]:
        raise DataError([f"{config}: vision_config lacks {', '.join(missing)}."])
    patch, frames, merge = (int(described[name]) for name in names)
    return PictureProcessor(config.parent, Patching(patch, frames, merge))

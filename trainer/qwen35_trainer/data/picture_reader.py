"""Expands the placeholders of pictures in the tokens of a text.

    …<|vision_start|><|image_pad|><|vision_end|>…        written by the template: one placeholder for each image
    …<|vision_start|><|image_pad|>×n<|vision_end|>…      read by the model: n placeholders for each image

The vision tower joins merge × merge patches of an image into one token, so n is the number of patches / merge². The number
of patches follows from the size in the header of the file. Pixels are read when a batch needs them, so that the images of a
data set are never in memory together.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from qwen35_trainer.data.picture_processor import PictureProcessor, load_picture_processor
from qwen35_trainer.data.picture_set import MAX_INLINE_BYTES, PictureSet
from qwen35_trainer.data.prompt import Image, Prompt, Video
from qwen35_trainer.data.template import EncodingError, TemplateEncoder, TokenIds
from qwen35_trainer.data.tokenizer import IMAGE_PAD, VIDEO_PAD, VISION_END, VISION_START
from qwen35_trainer.manifest.model import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NO_TOKEN = -1
"""Token id of a placeholder that the tokenizer does not have."""
NO_TOWER = "the model has no vision tower for its images and videos. Remove them, or use a model with a vision tower."


@dataclass(frozen=True)
class PictureReader:
    """Expands the placeholders of pictures for one model and its tokenizer."""

    tokenizer: "PreTrainedTokenizerBase"
    processor: PictureProcessor

    @cached_property
    def _pads(self) -> tuple[int, int]:
        vocabulary: dict[str, int] = self.tokenizer.get_vocab()
        return vocabulary.get(IMAGE_PAD, _NO_TOKEN), vocabulary.get(VIDEO_PAD, _NO_TOKEN)

    def placeholders(self, token_ids: TokenIds | NDArray[np.int32]) -> tuple[int, int]:
        """Return the number of image placeholders and of video placeholders among the tokens."""
        tokens = np.asarray(token_ids)
        image, video = (int(np.count_nonzero(tokens == pad)) for pad in self._pads)
        return image, video

    def pictures_of(self, prompt: Prompt, images: int | None = None, videos: int | None = None) -> PictureSet:
        """Return the pictures of a prompt.

        Raises EncodingError if the pictures that the data contain as bytes have more than MAX_INLINE_BYTES in total.
        images, videos: how many of the prompt's first images and first videos to return; None: all of them.
        """
        pictures = PictureSet(self.processor, prompt.images[:images], prompt.videos[:videos], prompt.described)
        if (size := pictures.inline_bytes) > MAX_INLINE_BYTES:
            raise EncodingError(
                f"its pictures take {size / 2**20:.1f} MiB in the data themselves, above {MAX_INLINE_BYTES // 2**20}. "
                "Save them as files and write their paths."
            )
        return pictures

    def expand(
        self, token_ids: TokenIds, mask: tuple[bool, ...], pictures: PictureSet
    ) -> tuple[TokenIds, tuple[bool, ...]]:
        """Replace the placeholder of each image and video by the tokens that the model reads in its place.

        An image gets one placeholder for each of its tokens. A video gets, for each time step, the time as text and the
        placeholders of the step. mask: one flag per token. The flag of a placeholder is repeated for all tokens that
        replace it. pictures: in the order of their placeholders. Returns the expanded tokens and mask. Raises
        EncodingError if the number of placeholders differs from the number of pictures, if a picture cannot be read,
        and if the tokenizer lacks the placeholders.
        """
        if pictures and _NO_TOKEN in self._pads:
            raise EncodingError(
                f"the tokenizer lacks {IMAGE_PAD} or {VIDEO_PAD}. Use the tokenizer that was published with the model."
            )
        counts, expected = self.placeholders(token_ids), (len(pictures.images), len(pictures.videos))
        if counts != expected:
            raise EncodingError(
                f"the text has {counts[0]} image and {counts[1]} video placeholders for {expected[0]} images and {expected[1]} "
                f"videos. The chat template must write one each, and no text may hold {IMAGE_PAD} or {VIDEO_PAD}."
            )
        if not pictures:
            return token_ids, mask
        runs = {
            self._pads[0]: iter([self._image_run(image) for image in pictures.images]),
            self._pads[1]: iter([self._video_run(video) for video in pictures.videos]),
        }
        pieces = [next(runs[token]) if token in runs else (token,) for token in token_ids]
        expanded = tuple(token for piece in pieces for token in piece)
        return expanded, tuple(flag for piece, flag in zip(pieces, mask, strict=True) for _ in piece)

    def _image_run(self, image: Image) -> TokenIds:
        return (self._pads[0],) * self.processor.image_tokens(image)

    def _video_run(self, video: Video) -> TokenIds:
        """Return the tokens of a video, as transformers' Qwen3VLProcessor writes them.

        A video is divided along time into patches of, for example, two frames. Each of these patches has its time as
        text, then its placeholders.
        """
        placeholders = VIDEO_PAD * self.processor.frame_tokens(video)
        tokens: list[int] = []
        for time in self._times(video):
            text = f"<{time:.1f} seconds>{VISION_START}{placeholders}"
            tokens += TemplateEncoder(self.tokenizer).rendered(text + VISION_END)
        return tuple(tokens)

    def _times(self, video: Video) -> Iterator[float]:
        """Yield the time of the middle of each patch of a video, in seconds.

        If the last patch has too few frames, the last frame is repeated.
        """
        frames = self.processor.patching.frames
        for first in range(0, len(video.frames), frames):
            last = min(first + frames, len(video.frames)) - 1
            final = last if last - first == frames - 1 else len(video.frames) - 1
            yield (first + final) / 2 / video.fps


def load_picture_reader(model: ModelSpec, base: Path, tokenizer: "PreTrainedTokenizerBase") -> PictureReader | None:
    """Create the picture reader of a model.

    Returns None for a model without a vision tower, and for a checkpoint without a local config.json.
    model: `spec.model` of the manifest. base: the folder to which a relative path of the model is relative. Raises
    DataError for a checkpoint whose vision_config lacks fields of this family of models.
    """
    processor = load_picture_processor(model, base)
    return None if processor is None else PictureReader(tokenizer, processor)

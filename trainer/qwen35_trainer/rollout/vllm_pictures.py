"""Pictures in requests to vLLM.

    patches of the images ─────────────────────────────────┐
    patches of the videos ─► one picture per pair of frames ┴─► MultiModalInput ─► vLLM's vision tower

vLLM's own processor of pictures is left out (`vllm_processor.py`). The patches come from the processor with which the train ranks
read the same files, and the placeholders of a prompt are expanded already, so both pools compute with the same pixels and tokens.

A pair of frames is sent as an image. This does not change the result, because the vision tower computes the pairs of a video
independently, with separate positions.

vLLM finds the features of a picture by a name. The name contains the version, because a prompt that new weights compute must
not use features that older weights have computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qwen35_trainer.data.picture_arrays import PictureArrays
from qwen35_trainer.models.qwen3_5.classes import HFConfig
from qwen35_trainer.models.qwen3_5.multimodal import kinds_and_positions
from qwen35_trainer.models.qwen3_5.pictures import IMAGE, VIDEO

WORKER = "qwen35_trainer.rollout.vllm_processor.PictureWorker"
"""Name of the class by which each of vLLM's processes imports `vllm_processor.py`."""
_LIBRARY_SECTIONS = (11, 11, 10)
"""Rotated pairs of channels for time, height and width in the library, if config.json has no `mrope_section`."""


@dataclass(frozen=True, eq=False)
class PlacedPictures:
    """The n images of a prompt, or the n pairs of frames of its videos, and their places in the prompt."""

    patches: NDArray[np.float32]
    """(P, C) patches of all pictures, one picture after another."""
    grids: NDArray[np.int64]
    """(n, 3) size of each picture in patches: 1, rows, columns."""
    starts: tuple[int, ...]
    """Number of the first token of each picture."""
    lengths: tuple[int, ...]
    """Number of tokens of each picture."""
    name: str
    """Name of the contents, which is the same for the same patches."""


def placed(prompt: NDArray[np.int32], arrays: PictureArrays, config: HFConfig) -> tuple[PlacedPictures, ...]:
    """Return the pictures of a prompt with their places: an entry for its images and an entry for its videos, if any.

    prompt: (P,) token ids. config: the configuration of the model. Raises ValueError if the placeholders of the prompt
    do not match the pictures.
    """
    kinds, _ = kinds_and_positions(prompt.astype(np.int64), arrays, config, None)
    pairs = np.repeat(arrays.video_grids, arrays.video_grids[:, 0], axis=0)
    pairs[:, 0] = 1
    parts = []
    for kind, patches, grids in ((IMAGE, arrays.patches, arrays.grids), (VIDEO, arrays.video_patches, pairs)):
        if len(grids):
            lengths = grids.prod(1) // config.vision_config.spatial_merge_size**2
            starts = np.flatnonzero(kinds == kind)[lengths.cumsum() - lengths]
            name = f"{arrays.digest}-{kind}"
            parts.append(PlacedPictures(patches, grids, tuple(starts.tolist()), tuple(lengths.tolist()), name))
    return tuple(parts)


def prompt_input(ids: list[int], pictures: Sequence[PlacedPictures], salt: str) -> Any:  # noqa: ANN401  # vLLM's
    """Return vLLM's input of a prompt: a MultiModalInput, or a TokensInput if there are no pictures.

    ids: tokens of the prompt, then the response tokens that the sequence already has. salt: only prompts with the same
    salt share cached blocks and features.
    """
    from vllm.inputs.engine import mm_input, tokens_input

    if not pictures:
        return tokens_input(ids, cache_salt=salt)
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

    items: list[Any] = []
    names: list[str] = []
    places: list[Any] = []
    for part in pictures:
        tensors = {"pixel_values": torch.from_numpy(part.patches), "image_grid_thw": torch.from_numpy(part.grids)}
        fields = {
            "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", torch.from_numpy(part.grids.prod(1))),
            "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        }
        items += MultiModalKwargsItems.from_hf_inputs(tensors, fields)["image"]
        names += [f"{salt}-{part.name}-{number}" for number in range(len(part.starts))]
        places += [
            PlaceholderRange(offset=start, length=length)
            for start, length in zip(part.starts, part.lengths, strict=True)
        ]
    return mm_input(ids, MultiModalKwargsItems({"image": items}), {"image": names}, {"image": places}, cache_salt=salt)


def picture_arguments(config: HFConfig, tokens: int, *, on_cpu: bool) -> dict[str, Any]:
    """Return vLLM's arguments of an engine core that reads pictures.

    tokens: maximum number of tokens of all pictures of a prompt together. The arguments allow a single picture to have
    this number of tokens, so that the features of a whole prompt fit into vLLM's cache and are computed in one step.
    """
    rows = math.isqrt(tokens)
    side = config.vision_config.patch_size * config.vision_config.spatial_merge_size
    return {
        "limit_mm_per_prompt": {
            "image": {"count": tokens, "height": rows * side, "width": -(-tokens // rows) * side},
            "video": 0,
        },
        "mm_processor_cache_gb": 0,  # of patches, which `PictureSet` keeps
        "worker_extension_cls": WORKER,
        "skip_mm_profiling": on_cpu,  # the memory that the tower needs is measured on devices only
    }


def position_settings(text: HFConfig) -> dict[str, Any]:
    """Return `rope_parameters` with which vLLM gives pictures the same positions as transformers.

    text: the configuration of the text model. vLLM needs a `mrope_section` whose entries add up to the number of
    rotated pairs of channels. transformers ignores the part of its sections that exceeds this number. Without
    `mrope_section` in config.json, vLLM gives each token one position, while transformers gives it three, with the
    sections 11, 11, 10.
    """
    rope = dict(text.rope_parameters)
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    pairs = int(head * rope.get("partial_rotary_factor", 1.0)) // 2
    sections = rope.get("mrope_section", _LIBRARY_SECTIONS)
    height, width = (len(range(axis, min(3 * sections[axis], pairs), 3)) for axis in (1, 2))
    return rope | {"mrope_section": [pairs - height - width, height, width], "mrope_interleaved": True}

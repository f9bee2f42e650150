"""The images and videos of one forward pass, in the form that the vision tower reads.

    field of Pictures               name in transformers
    patches, grids                  pixel_values, image_grid_thw
    video_patches, video_grids      pixel_values_videos, video_grid_thw

The patches of all images are in one flat tensor, one image after another. Nothing is nested or indexed by sequence, so
that padded and packed sequences have the same form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from qwen35_trainer.data.picture_arrays import PictureArrays

TEXT, IMAGE, VIDEO = 0, 1, 2
"""Kinds of tokens: text, or a placeholder of an image or of a video."""


@dataclass(frozen=True, eq=False)
class Pictures:
    """Pictures of a micro-batch, in the order of their placeholders: P image patches and Q video
    patches of C values each.

    C is colours × frames per patch × patch side², in the order of the checkpoint's image processor.
    """

    patches: Tensor
    """(P, C) float patches of all images, one image after another."""
    grids: Tensor
    """(images, 3) int64: frames, rows and columns of each image, in patches. P is the sum of their products."""
    video_patches: Tensor
    """(Q, C) float patches of all videos, one video after another."""
    video_grids: Tensor
    """(videos, 3) int64: frames, rows and columns of each video, in patches."""
    token_types: Tensor
    """Kind of each token, in the shape of `ModelInput.tokens`, int64: 0 text or padding, 1 image, 2 video."""

    @classmethod
    def of(
        cls, arrays: Sequence[PictureArrays | None], token_types: Tensor, device: torch.device | str
    ) -> Pictures | None:
        """Join the pictures of several sequences, in the order of the sequences. Returns None if there are no pictures.

        Grids stay on the host, because shapes are computed from them: a copy back from the device would make the host
        wait for the device.
        """
        present = [each for each in arrays if each is not None and len(each.grids) + len(each.video_grids)]
        if not present:
            return None
        width = max(max(each.patches.shape[1], each.video_patches.shape[1]) for each in present)

        def joined(name: str, columns: int) -> Tensor:
            # A sequence without images has patches of shape (0, 0), which cannot be concatenated.
            return torch.cat([torch.from_numpy(getattr(each, name)).reshape(-1, columns) for each in present])

        return cls(
            joined("patches", width).to(device),
            joined("grids", 3),
            joined("video_patches", width).to(device),
            joined("video_grids", 3),
            token_types.to(device),
        )

"""The images and videos of one forward pass, as the vision tower reads them.

All patches lie flat, one image after another, and each token carries its kind: nothing here is nested, and nothing is
indexed by sequence, so that padded and packed sequences look alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from qwen35_trainer.data.pictures import PictureArrays

TEXT, IMAGE, VIDEO = 0, 1, 2
"""Kinds of a token: of the vocabulary, or one placeholder of an image or of a video."""


@dataclass(frozen=True, eq=False)
class Pictures:
    """What a micro-batch shows, in the order of its placeholders. P image patches, Q video patches of C values each.

    C is colours × frames per patch × patch side², as the checkpoint's image processor lays them out.
    """

    patches: Tensor
    """(P, C) float: of all images, one after another."""
    grids: Tensor
    """(images, 3) int64: frames, rows and columns of each image, in patches; their products add up to P."""
    video_patches: Tensor
    """(Q, C) float."""
    video_grids: Tensor
    """(videos, 3) int64."""
    token_types: Tensor
    """(n, L) int64, or (1, T) packed, as `ModelInput.tokens`: 0 text, 1 image, 2 video; padding is 0."""

    @classmethod
    def of(
        cls, arrays: Sequence[PictureArrays | None], token_types: Tensor, device: torch.device | str
    ) -> Pictures | None:
        """Those of several sequences, in the order in which the sequences stand; None where none shows anything.

        Grids stay on the host: shapes are made from them, and reading them back would wait for the device.
        """
        shown = [each for each in arrays if each is not None and len(each.grids) + len(each.video_grids)]
        if not shown:
            return None
        width = max(max(each.patches.shape[1], each.video_patches.shape[1]) for each in shown)

        def joined(name: str, columns: int) -> Tensor:
            # One without images has patches of shape (0, 0), which no row can be appended to.
            return torch.cat([torch.from_numpy(getattr(each, name)).reshape(-1, columns) for each in shown])

        return cls(
            joined("patches", width).to(device),
            joined("grids", 3),
            joined("video_patches", width).to(device),
            joined("video_grids", 3),
            token_types.to(device),
        )

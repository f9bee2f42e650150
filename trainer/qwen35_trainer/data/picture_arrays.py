"""The images and videos of one sequence, as arrays for a vision tower.

    image ─► processor ─► patches (P, C)      one row per patch of the grid, all images one after another
                     └──► grids (n, 3)        frames, rows and columns of patches; P is the sum of their products

The arrays are numpy arrays, so that a batch can be sent between processes without torch.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


def _no_patches() -> NDArray[np.float32]:
    return np.empty((0, 0), dtype=np.float32)


def _no_grids() -> NDArray[np.int64]:
    return np.empty((0, 3), dtype=np.int64)


class PictureSource(Protocol):
    """Pictures of one sequence, whose patches can be read."""

    def read(self) -> "PictureArrays":
        """Return the patches. Raises DataError, with the row of the data, for pictures that cannot be read."""
        ...


@dataclass(frozen=True, eq=False)
class PictureArrays:
    """Pictures of one sequence, in the order of its placeholders. Raises ValueError where patches do not match grids."""

    patches: NDArray[np.float32]
    """(P, C) pixels of the images' patches, normalised; (0, 0) without images."""
    grids: NDArray[np.int64]
    """(images, 3) size of each image in patches: frames, rows, columns."""
    video_patches: NDArray[np.float32]
    """(Q, C) pixels of the videos' patches; (0, 0) without videos."""
    video_grids: NDArray[np.int64]
    """(videos, 3) size of each video in patches: frames, rows, columns."""

    def __post_init__(self) -> None:
        for name, patches, grids in (
            ("image", self.patches, self.grids),
            ("video", self.video_patches, self.video_grids),
        ):
            if grids.ndim != 2 or grids.shape[1] != 3:
                raise ValueError(
                    f"{name} grids {grids.shape}: expected (n, 3), frames, rows and columns of each {name}"
                )
            filled = int(grids.prod(axis=1).sum())
            if patches.ndim != 2 or len(patches) != filled:
                raise ValueError(f"{name} patches {patches.shape}: the grids {grids.tolist()} need {filled} rows")

    @classmethod
    def of(
        cls,
        images: tuple[NDArray[np.float32], NDArray[np.int64]] | None = None,
        videos: tuple[NDArray[np.float32], NDArray[np.int64]] | None = None,
    ) -> "PictureArrays":
        """Create arrays from (patches, grids) of images and of videos; None: no pictures of that kind."""
        return cls(*(images or (_no_patches(), _no_grids())), *(videos or (_no_patches(), _no_grids())))

    @property
    def nbytes(self) -> int:
        """Size of all arrays, in bytes."""
        return sum(each.nbytes for each in (self.patches, self.grids, self.video_patches, self.video_grids))

    def read(self) -> "PictureArrays":
        """Return this object: its pictures have been read."""
        return self

    def placeholders(self, merge: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the number of placeholder tokens of each image, and of each video.

        merge: number of patches per side that the vision tower joins into one token.
        """
        per_token = merge**2
        return (
            tuple((self.grids.prod(axis=1) // per_token).tolist()),
            tuple((self.video_grids.prod(axis=1) // per_token).tolist()),
        )

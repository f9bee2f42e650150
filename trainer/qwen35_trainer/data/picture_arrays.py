"""The images and videos of one sequence, as arrays for a vision tower.

    image ─► processor ─► patches (P, C)      one row per patch, all images one after another: transformers' pixel_values
                     └──► grids (n, 3)        frames, rows and columns of patches of each image: transformers' image_grid_thw

n is the number of images, and C the number of values of a patch. P is the number of patches: the sum, over all images, of
frames × rows × columns. Videos have the same two arrays. In `models/qwen3_5`, `vision.py` computes features from the patches and
puts them at the placeholders, and `positions.py` numbers the placeholders by the grids (multimodal RoPE, mRoPE).

The arrays are numpy arrays, because the driver has no torch. A training batch usually has only the paths of files
(`picture_set.PictureSet`): each train rank reads the patches when it computes a micro-batch.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


def _no_patches() -> NDArray[np.float32]:
    return np.empty((0, 0), dtype=np.float32)


def _no_grids() -> NDArray[np.int64]:
    return np.empty((0, 3), dtype=np.int64)


class PictureSource(Protocol):
    """The pictures of one sequence, whose patches can be read now or later."""

    def read(self) -> "PictureArrays":
        """Return the patches of the pictures.

        Raises DataError, naming the row of the data, if a picture cannot be read.
        """
        ...


@dataclass(frozen=True, eq=False)
class PictureArrays:
    """The pictures of one sequence, as arrays, in the order of their placeholders.

    The constructor raises ValueError if an array has a wrong shape, or if the number of patches does not match the
    grids.
    """

    patches: NDArray[np.float32]
    """(patches, values of a patch) normalised pixels of all images; (0, 0) without images."""
    grids: NDArray[np.int64]
    """(images, 3) size of each image in patches: frames, rows, columns."""
    video_patches: NDArray[np.float32]
    """(patches, values of a patch) normalised pixels of all videos; (0, 0) without videos."""
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
        """Create the arrays from (patches, grids) of the images and of the videos; None: no pictures of that kind."""
        return cls(*(images or (_no_patches(), _no_grids())), *(videos or (_no_patches(), _no_grids())))

    @cached_property
    def digest(self) -> str:
        """A checksum of all patches and grids.

        It is computed once, because the samples of a prompt have the same pictures.
        """
        checksum = hashlib.blake2b(digest_size=16)
        for array in (self.grids, self.patches, self.video_grids, self.video_patches):
            checksum.update(array.ravel())
        return checksum.hexdigest()

    @property
    def nbytes(self) -> int:
        """Size of all arrays, in bytes."""
        return sum(each.nbytes for each in (self.patches, self.grids, self.video_patches, self.video_grids))

    def read(self) -> "PictureArrays":
        """Return this object, which already contains the patches, so that it can be used as a PictureSource."""
        return self

    def placeholders(self, merge: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the number of placeholder tokens of each image, and the number of placeholder tokens of each video.

        merge: the vision tower joins merge × merge patches of a frame into one token.
        """
        per_token = merge**2
        return (
            tuple((self.grids.prod(axis=1) // per_token).tolist()),
            tuple((self.video_grids.prod(axis=1) // per_token).tolist()),
        )

import numpy as np
import pytest

from qwen35_trainer.data import PictureArrays


def test_each_image_takes_one_token_for_each_square_of_merged_patches() -> None:
    images = (np.zeros((16 + 24, 5), np.float32), np.array([[1, 4, 4], [1, 4, 6]]))
    videos = (np.zeros((32, 5), np.float32), np.array([[2, 4, 4]]))
    assert PictureArrays.of(images, videos).placeholders(2) == ((4, 6), (8,))
    assert PictureArrays.of().placeholders(2) == ((), ())


def test_patches_that_do_not_fill_their_grids_are_refused() -> None:
    with pytest.raises(ValueError, match=r"video patches \(3, 5\): the grids \[\[1, 2, 2\]\] need 4 rows"):
        PictureArrays.of(videos=(np.zeros((3, 5), np.float32), np.array([[1, 2, 2]])))
    with pytest.raises(ValueError, match=r"image grids \(2,\): expected \(n, 3\)"):
        PictureArrays.of(images=(np.zeros((3, 5), np.float32), np.array([1, 3])))

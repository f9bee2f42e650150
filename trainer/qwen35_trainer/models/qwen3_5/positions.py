"""Positions of the tokens of a sequence: in the text, and in time, height and width (multimodal RoPE, mRoPE).

    token      a  b  ▢  ▢  ▢  ▢  c  d          ▢▢▢▢: one image of 2 × 2 features
    text       0  1  2  3  4  5  6  7
    time       0  1  2  2  2  2  4  5          after a picture, counting continues at its longer side: 2 + max(2, 2)
    height     0  1  2  2  3  3  4  5
    width      0  1  2  3  2  3  4  5

There is one row per token, (tokens, 4), so that packing is concatenation along the first axis.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qwen35_trainer.models.qwen3_5.pictures import IMAGE, TEXT, VIDEO

type Integers = NDArray[np.int64]

PICTURE_KINDS = {IMAGE: "image", VIDEO: "video"}


def text_positions(length: int) -> Integers:
    """Return the positions (length, 4) of a text: all four columns count the tokens from 0."""
    return np.repeat(np.arange(length)[:, None], 4, axis=1)


def token_types(
    tokens: Integers, *, image_token: int, video_token: int, written: NDArray[np.bool_] | None = None
) -> Integers:
    """Return the kind of each token of a prompt and its response, (length,): 0 text, 1 placeholder of an
    image, 2 of a video.

    tokens: (length,) token ids. written: (length,) true for tokens that the model generated; None: no token was
    generated. A generated placeholder counts as text, because no picture belongs to it.
    """
    types = np.where(tokens == image_token, IMAGE, np.where(tokens == video_token, VIDEO, TEXT))
    if written is not None:
        types[written] = TEXT
    return types


def positions(types: Integers, grids: Integers, video_grids: Integers, merge: int) -> Integers:
    """Compute the mRoPE position of each token, (length, 4): text, time, height, width.

    types: (length,) from `token_types`, without padding.
    grids, video_grids: (images, 3) and (videos, 3): frames, rows and columns in patches, in the order of
      the placeholders.
    merge: side, in patches, of the square of patches that becomes one feature.

    The rule is that of transformers' `get_rope_index` for this family: the features of a picture are on a grid that
    starts at the next free position. A video is one picture per frame, because timestamps in the text separate its
    frames. Unlike in transformers, adjacent pictures need no token between them. Raises ValueError if the placeholders
    do not match the pictures.
    """
    frames = np.repeat(video_grids, video_grids[:, 0], axis=0)
    frames[:, 0] = 1
    waiting = {IMAGE: list(_merged(grids, merge)), VIDEO: list(_merged(frames, merge))}
    _check_counts(types, waiting)
    placed = np.empty((len(types), 4), dtype=np.int64)
    placed[:, 0] = np.arange(len(types))
    placeholders = np.flatnonzero(types != TEXT)
    at = start = 0
    while at < len(types):
        kind = int(types[at])
        if kind == TEXT:
            following = np.searchsorted(placeholders, at)
            end = int(placeholders[following]) if following < len(placeholders) else len(types)
            placed[at:end, 1:] = np.arange(start, start + end - at)[:, None]
            start += end - at
        else:
            size = waiting[kind].pop(0)
            end = at + int(np.prod(size))
            if end > len(types) or (types[at:end] != kind).any():
                raise ValueError(
                    f"tokens {at} to {end - 1} are one {PICTURE_KINDS[kind]} of {size} features, with other tokens between "
                    "them: placeholders of one picture must be adjacent."
                )
            placed[at:end, 1:] = np.indices(size).reshape(3, -1).T + start
            start += int(max(size[1:]))
        at = end
    return placed


def _merged(grids: Integers, merge: int) -> list[tuple[int, int, int]]:
    return [(int(t), int(h) // merge, int(w) // merge) for t, h, w in grids]


def _check_counts(types: Integers, waiting: dict[int, list[tuple[int, int, int]]]) -> None:
    problems = []
    for kind, sizes in waiting.items():
        count, features = int((types == kind).sum()), sum(t * h * w for t, h, w in sizes)
        if count != features:
            problems.append(
                f"{count} {PICTURE_KINDS[kind]} placeholders, the {PICTURE_KINDS[kind]}s take {features} ({sizes})"
            )
    if problems:
        raise ValueError(f"{'; '.join(problems)}: expand each placeholder to the features of its picture.")

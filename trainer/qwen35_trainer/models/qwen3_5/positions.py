"""Where each token of a sequence stands: in the text, and in time, height and width (multimodal RoPE).

    token      a  b  ▢  ▢  ▢  ▢  c  d          ▢▢▢▢: one image of 2 × 2 features
    text       0  1  2  3  4  5  6  7
    time       0  1  2  2  2  2  4  5          after a picture, counting goes on at its longer side: 2 + max(2, 2)
    height     0  1  2  2  3  3  4  5
    width      0  1  2  3  2  3  4  5

One row per token, (tokens, 4): packing is concatenation, and no tensor has the axes in front of the tokens.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qwen35_trainer.models.qwen3_5.pictures import IMAGE, TEXT, VIDEO

type Integers = NDArray[np.int64]

NAMES = {IMAGE: "image", VIDEO: "video"}


def text_positions(length: int) -> Integers:
    """(length, 4): all four rows count the tokens."""
    return np.repeat(np.arange(length)[:, None], 4, axis=1)


def token_types(
    tokens: Integers, *, image_token: int, video_token: int, written: NDArray[np.bool_] | None = None
) -> Integers:
    """Kind of each token, (length,): 0 text, 1 placeholder of an image, 2 of a video; over prompt and response alike.

    tokens: (length,).  written: (length,) whether the model wrote the token itself. A placeholder that it sampled is
    a token like any other, since no picture belongs to it; without `written` every placeholder counts.
    """
    types = np.where(tokens == image_token, IMAGE, np.where(tokens == video_token, VIDEO, TEXT))
    if written is not None:
        types[written] = TEXT
    return types


def positions(types: Integers, grids: Integers, video_grids: Integers, merge: int) -> Integers:
    """Position of each token, (length, 4): text, time, height, width.

    types: (length,) as `token_types` gives them.  grids: (images, 3), video_grids: (videos, 3): frames, rows, columns
    in patches, in the order of their placeholders.  merge: patches per side that become one feature.

    The rule of the library's `get_rope_index` for this family: a picture's features lie on a grid that starts at the
    next free position; a video is one picture per frame, since timestamps in the text separate its frames. Unlike
    there, pictures next to each other need no token between them. Padding is the caller's: positions of valid tokens
    only. Raises ValueError where the placeholders are not those of the pictures.
    """
    frames = np.repeat(video_grids, video_grids[:, 0], axis=0)
    frames[:, 0] = 1
    waiting = {IMAGE: list(_merged(grids, merge)), VIDEO: list(_merged(frames, merge))}
    _check_counts(types, waiting)
    placed = np.empty((len(types), 4), dtype=np.int64)
    placed[:, 0] = np.arange(len(types))
    shown = np.flatnonzero(types != TEXT)
    at = start = 0
    while at < len(types):
        kind = int(types[at])
        if kind == TEXT:
            following = np.searchsorted(shown, at)
            end = int(shown[following]) if following < len(shown) else len(types)
            placed[at:end, 1:] = np.arange(start, start + end - at)[:, None]
            start += end - at
        else:
            size = waiting[kind].pop(0)
            end = at + int(np.prod(size))
            if end > len(types) or (types[at:end] != kind).any():
                raise ValueError(
                    f"tokens {at} to {end - 1} are one {NAMES[kind]} of {size} features, and others stand between "
                    "them: placeholders of one picture stay together."
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
        found, wanted = int((types == kind).sum()), sum(t * h * w for t, h, w in sizes)
        if found != wanted:
            problems.append(f"{found} {NAMES[kind]} placeholders, the {NAMES[kind]}s take {wanted} ({sizes})")
    if problems:
        raise ValueError(f"{'; '.join(problems)}: expand each placeholder to the features of its picture.")

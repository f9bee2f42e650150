"""Tiny vision-language models straight from the transformers library, and sequences with pictures for them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qwen35_trainer.data.picture_arrays import PictureArrays
from tests.conftest import SHAPE

START, END, IMAGE, VIDEO = 19, 20, 21, 22
"""Token ids at the end of the vocabulary."""
MERGE, PATCH = 2, 3 * 2 * 4 * 4
Grid = tuple[int, int, int]


def vision_language(*, experts: int = 0, seed: int = 0, tied: bool = False) -> Any:
    """Random float32 weights, large enough that positions and pictures show in the logits."""
    import transformers

    torch.manual_seed(seed)
    # 32 channels per head turn 8: time, height and width each have one at least.
    text = SHAPE | {"head_dim": 32, "tie_word_embeddings": tied}
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "patch_size": 4,
        "temporal_patch_size": 2,
        "spatial_merge_size": MERGE,
        "num_position_embeddings": 25,
        "out_hidden_size": text["hidden_size"],
        "initializer_range": 0.2,
    }
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
    rest: dict[str, Any] = {"vision_config": vision, "initializer_range": 0.2, "tie_word_embeddings": tied, **ids}
    if experts:
        text |= {"num_experts": experts, "num_experts_per_tok": 2}
        text |= {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}
        model = transformers.Qwen3_5MoeForConditionalGeneration(transformers.Qwen3_5MoeConfig(text_config=text, **rest))
    else:
        text |= {"intermediate_size": 48}
        model = transformers.Qwen3_5ForConditionalGeneration(transformers.Qwen3_5Config(text_config=text, **rest))
    for layer in model.model.language_model.layers:
        if hasattr(layer, "linear_attn"):
            layer.linear_attn.A_log.data.fill_(-4.0)
    return model.eval()


def show(parts: Sequence[int | Grid | tuple[str, Grid]], seed: int = 0) -> tuple[Tensor, PictureArrays]:
    """show([3, (1, 4, 6), 2, ("video", (2, 4, 2))]): 3 words, an image of that grid, 2 words, a video.

    Each picture, and each frame of a video, stands between its start and end token.
    """
    random = np.random.default_rng(seed)
    tokens: list[int] = []
    grids: dict[int, list[Grid]] = {IMAGE: [], VIDEO: []}
    for part in parts:
        if isinstance(part, int):
            tokens += random.integers(0, START, part).tolist()
            continue
        kind, grid = (VIDEO, part[1]) if part[0] == "video" else (IMAGE, part)
        grids[kind].append(grid)
        frames, rows, columns = grid
        for _ in range(frames):
            tokens += [START, *[kind] * (rows * columns // MERGE**2), END]
    arrays = []
    for kind in (IMAGE, VIDEO):
        size = sum(int(np.prod(grid)) for grid in grids[kind])
        patches = random.normal(size=(size, PATCH if size else 0)).astype(np.float32)
        arrays += [patches, np.array(grids[kind], dtype=np.int64).reshape(-1, 3)]
    return torch.tensor(tokens), PictureArrays(*arrays)


def as_the_library_wants(tokens: Tensor, pictures: PictureArrays) -> dict[str, Any]:
    """Keyword arguments of the library's forward for one sequence."""
    types = torch.where(tokens == IMAGE, 1, torch.where(tokens == VIDEO, 2, 0))[None]
    arguments: dict[str, Any] = {"input_ids": tokens[None], "mm_token_type_ids": types, "use_cache": False}
    if len(pictures.grids):
        arguments |= {
            "pixel_values": torch.from_numpy(pictures.patches),
            "image_grid_thw": torch.from_numpy(pictures.grids),
        }
    if len(pictures.video_grids):
        arguments |= {
            "pixel_values_videos": torch.from_numpy(pictures.video_patches),
            "video_grid_thw": torch.from_numpy(pictures.video_grids),
        }
    return arguments

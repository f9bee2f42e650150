"""Compute the input of the first layer: token embeddings, and at placeholders the features of images and videos.

    tokens ─► embedding ───────────────────────────────────────────────────────┐
    patches (pixel_values): images, then videos ─► tower ─► features ─► at the placeholders ─► (n, L, D)
    no picture in the micro-batch: one blank picture ─► tower ─► features ─► not used, gradient 0
    no picture on any rank, and the tower does not train (`ModelInput.text_only`): the tower does not run

Otherwise the tower runs exactly once per forward pass, for any number of pictures. Under FSDP, every use of a sharded module is a
collective of all ranks. If a rank without pictures skipped the tower, the other ranks would wait for this rank.
Separate runs for images and for videos would have the same problem if ranks had different kinds of pictures.

The `forward` of the tower is replaced on the instance. Versions of transformers differ in how they compute position
embeddings. Version 5.5, for example, computes them on the device of the *parameter*, which is the host under FSDP's
offload policy, while the patches are on the GPU. Here everything is computed on the device of the patches. The
replacement does not use the tower's buffers, so a tower that was built on the meta device needs none.

This family has no deepstack features: the tower's output enters at the embedding only.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType

import torch
from torch import Tensor
from torch.nn import functional as F

from qwen35_trainer.models.qwen3_5 import Context, HFModule
from qwen35_trainer.models.qwen3_5.classes import HFConfig
from qwen35_trainer.models.qwen3_5.inputs import ModelInput
from qwen35_trainer.models.qwen3_5.pictures import IMAGE, TEXT, VIDEO, Pictures


def adapt(model: HFModule) -> None:
    """Replace the `forward` of the vision tower of `model` on the instance. A text model is unchanged.

    This function may be called again for the same model.

    The tower then takes patches (P, C) and grids (pictures, 3), and returns features (P / merge², D), one picture after
    another: P patches of C values, D channels, and merge² patches per feature.
    """
    if (tower := getattr(model.model, "visual", None)) is not None:
        adapt_tower(tower)


def adapt_tower(tower: HFModule) -> None:
    """Replace the `forward` of a vision tower on the instance, as `adapt` does."""
    tower.forward = MethodType(_tower, tower)


def embed(model: HFModule, inputs: ModelInput) -> Tensor:
    """Compute the input of the first decoder layer of an adapted text or vision-language model.

    Returns (n, L, D), n rows of L tokens with D channels. The features of pictures replace the embeddings of
    placeholders. A vision-language model without pictures runs the tower on a blank picture, so that all ranks of a
    process group run the same collectives. Loss and gradients are then exactly those of the text alone; the gradients
    of the tower are 0, not None. With `inputs.text_only`, the tower does not run. Raises ValueError if a text model gets
    pictures, or if the numbers of placeholders and features differ.
    """
    tower = getattr(model.model, "visual", None)
    if tower is None:
        if inputs.pictures is not None:
            raise ValueError(
                f"a {model.config.model_type} model reads text only, and the input has pictures: use the "
                "vision-language checkpoint, or data without images and videos."
            )
        return model.model.embed_tokens(inputs.tokens)
    embedded = model.model.language_model.embed_tokens(inputs.tokens)
    if inputs.pictures is None and inputs.text_only:
        return embedded
    if inputs.pictures is None:
        return _WithoutEffect.apply(embedded, tower(*_blank(tower.config, embedded)))  # type: ignore[no-untyped-call]
    return with_features(embedded, tower, inputs.pictures)


def with_features(embedded: Tensor, tower: HFModule, pictures: Pictures) -> Tensor:
    """Return the embeddings of tokens, with the features of `pictures` in place of those of placeholders.

    embedded: (n, L, D), n rows of L tokens with D channels; L may be more than that of the tokens' kinds: what was added on the
    right is text. tower: the adapted vision tower. Raises ValueError if the numbers of placeholders and features differ.
    """
    images, videos = _features(pictures, tower.config.spatial_merge_size)
    _check(pictures, images, videos)
    features = tower(
        torch.cat((pictures.patches, pictures.video_patches)), torch.cat((pictures.grids, pictures.video_grids))
    )
    types = F.pad(pictures.token_types, (0, embedded.shape[1] - pictures.token_types.shape[1]), value=TEXT)
    for kind, part in zip((IMAGE, VIDEO), features.to(embedded.dtype).split((images, videos)), strict=True):
        if len(part):  # masked_scatter needs nine bytes for each value of `embedded`
            embedded = embedded.masked_scatter((types == kind).unsqueeze(-1), part)
    return embedded


class _WithoutEffect(torch.autograd.Function):
    """Returns `embedded` unchanged, and gives `features` a gradient of zeros, so that the tower takes part
    in the backward pass.

    Adding 0 · features instead would not be safe: if a feature overflows, 0 · ∞ is NaN.
    """

    @staticmethod
    def forward(ctx: Context, embedded: Tensor, features: Tensor) -> Tensor:
        ctx.features = (features.shape, features.dtype, features.device)
        return embedded.view_as(embedded)

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        shape, dtype, device = ctx.features
        return gradients[0], torch.zeros(shape, dtype=dtype, device=device)


def _blank(config: HFConfig, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest picture: the patches of one feature, all 0, and its grid (1, 3)."""
    side = config.spatial_merge_size
    values = config.in_channels * config.temporal_patch_size * config.patch_size**2
    return like.new_zeros(side * side, values), torch.tensor([[1, side, side]])


def _features(pictures: Pictures, merge: int) -> tuple[int, int]:
    """Return the number of features of all images, and that of all videos."""
    images, videos = (int(grids.prod(1).sum()) // merge**2 for grids in (pictures.grids, pictures.video_grids))
    return images, videos


def _check(pictures: Pictures, images: int, videos: int) -> None:
    problems = []
    # One transfer from the device for both counts.
    counts = torch.stack([(pictures.token_types == kind).sum() for kind in (IMAGE, VIDEO)]).tolist()
    for name, grids, count, features in (
        ("image", pictures.grids, counts[0], images),
        ("video", pictures.video_grids, counts[1], videos),
    ):
        if count != features:
            problems.append(
                f"{count} {name} placeholders for {features} features of {len(grids)} {name}s (grids {grids.tolist()})"
            )
    if problems:
        raise ValueError(
            f"{'; '.join(problems)}: every picture needs rows × columns × frames / merge² placeholders. Expand them "
            "with the checkpoint's image processor, and do not truncate sequences inside a picture."
        )


def _tower(tower: HFModule, patches: Tensor, grids: Tensor) -> Tensor:
    config, sizes = tower.config, grids.tolist()
    places = torch.cat([_places(size, config.spatial_merge_size, patches.device) for size in sizes])
    extents = torch.cat([_extents(size, patches.device) for size in sizes])
    corners, weights = _interpolation(places, extents, int(config.num_position_embeddings**0.5))
    hidden = tower.patch_embed(patches)
    hidden = hidden + (tower.pos_embed(corners) * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)
    frames = [rows * columns for count, rows, columns in sizes for _ in range(count)]
    boundaries = torch.tensor([0, *frames], device=patches.device).cumsum(0, dtype=torch.int32)
    rotary = _rotary(places, config)
    for block in tower.blocks:
        hidden = block(hidden, cu_seqlens=boundaries, position_embeddings=rotary)
    return tower.merger(hidden)


def _places(grid: Sequence[int], merge: int, device: torch.device) -> Tensor:
    """Return the row and column of each patch of a picture, (patches, 2).

    The merge² patches of one feature are adjacent.
    """
    frames, rows, columns = grid
    row = torch.arange(rows, device=device).view(rows // merge, 1, merge, 1)
    column = torch.arange(columns, device=device).view(1, columns // merge, 1, merge)
    return torch.stack(torch.broadcast_tensors(row, column), dim=-1).reshape(-1, 2).repeat(frames, 1)


def _extents(grid: Sequence[int], device: torch.device) -> Tensor:
    """Return, for each patch of a picture, the picture's numbers of rows and columns of patches, (patches, 2)."""
    frames, rows, columns = grid
    return torch.tensor([rows, columns], device=device).expand(frames * rows * columns, 2)


def _interpolation(places: Tensor, extents: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Interpolate the grid of side × side learned position embeddings to the size of each picture
    (bilinear, corners aligned).

    places: (P, 2) row and column of each patch. extents: (P, 2) rows and columns of its picture. Returns,
    for each patch, the indices of its four neighbours in the flat grid (P, 4), and their weights (P, 4)
    float32, which add up to 1.
    """
    exact = places.float() * (side - 1) / (extents - 1).clamp(min=1)
    low = exact.long()
    high = (low + 1).clamp(max=side - 1)
    share = exact - low
    rows, columns = (torch.stack((low[:, i], high[:, i]), dim=1) for i in (0, 1))
    row_share, column_share = (torch.stack((1 - share[:, i], share[:, i]), dim=1) for i in (0, 1))
    corners = rows.unsqueeze(2) * side + columns.unsqueeze(1)
    return corners.flatten(1), (row_share.unsqueeze(2) * column_share.unsqueeze(1)).flatten(1)


def _rotary(places: Tensor, config: HFConfig) -> tuple[Tensor, Tensor]:
    """Compute the cosine and sine of the tower's rotary embedding, (P, head channels) float32 each.

    Of the channels of a head, the first quarter rotates with the patch's row, the second quarter with its column, and
    the other half repeats them (RoFormer, arXiv:2104.09864, eq. 34, once per axis).
    """
    half = config.hidden_size // config.num_heads // 2
    # In versions before rope_parameters the base is a constant of the module.
    base = (getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10000.0)
    frequencies = base ** -(torch.arange(0, half, 2, dtype=torch.float32, device=places.device) / half)
    angles = (places.unsqueeze(-1).float() * frequencies).flatten(1).repeat(1, 2)
    return angles.cos(), angles.sin()

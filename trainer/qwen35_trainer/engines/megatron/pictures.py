"""Pictures in the Megatron engine: the vision tower, and the angles of tokens with positions in time, height and width.

    first stage    tokens ─► embedding ────────────────────┐
                   patches ─► vision tower ─► features ────┴─► at the placeholders ─► layers
    every stage    positions (time, height, width) ─► angles ─► full attention of its layers

The tower is the one of transformers, as in the FSDP engine (`models/qwen3_5/vision.py`). Published towers have less than a billion
parameters. They are not divided: each tensor-parallel rank of the first stage has a copy, and computes the features of all pictures
of its share. All copies get the same gradients up to rounding, which are averaged, so the copies stay equal.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from qwen35_trainer.models.qwen3_5 import HFModule, vision
from qwen35_trainer.models.qwen3_5.classes import HFConfig

LIBRARY_SECTIONS: Final = [11, 11, 10]
"""`mrope_section` of a configuration without this field, as transformers reads it."""


def tower_of(model: HFModule, precision: torch.dtype, *, trains: bool, recompute: bool) -> HFModule | None:
    """Return a new vision tower like that of `model`, on the current device, without its values; None for a text model.

    model: the model in transformers, on any device. precision: type of the parameters. trains: whether the parameters get
    gradients. recompute: whether the backward pass computes the activations of each block again.
    """
    if (built := getattr(model.model, "visual", None)) is None:
        return None
    tower: HFModule = copy.deepcopy(built).to(precision).to_empty(device=torch.cuda.current_device())
    vision.adapt_tower(tower)
    tower.train()
    if recompute:
        tower.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for parameter in tower.parameters():
        parameter.requires_grad_(trains)
    return tower


def average_gradients(towers: Iterable[HFModule], group: ProcessGroup) -> None:
    """Average the gradients of vision towers over tensor-parallel ranks. Collective.

    megatron-core can do this (`average_gradients_across_tp_domain`), but with all gradients in one more tensor, and by an operation
    that HCCL lacks. group: the tensor-parallel ranks.
    """
    if group.size() == 1:
        return
    for tower in towers:
        for parameter in tower.parameters():
            dist.all_reduce(parameter.main_grad, group=group)
            parameter.main_grad.div_(group.size())


def sections(model: HFConfig) -> list[int]:
    """Return the number of angles of each axis: time, height and width. model: the configuration of a text model."""
    of_axes: list[int] = model.rope_parameters.get("mrope_section", LIBRARY_SECTIONS)
    return of_axes


class PictureRotary(nn.Module):
    """The angles by which full attention rotates queries and keys (mRoPE with interleaved axes).

    Angle i of a head belongs to height if i is 1, 4, 7, …, to width if i is 2, 5, 8, …, as far as the sections of these axes
    reach, and otherwise to time (transformers, `Qwen3_5TextRotaryEmbedding.recomposition_frequencies`). megatron-core's
    MultimodalRotaryEmbedding has one axis after another instead.

    model: the configuration of a text model.
    """

    def __init__(self, model: HFConfig) -> None:
        super().__init__()
        rotary = model.rope_parameters
        channels = int(model.head_dim * rotary.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, channels, 2, dtype=torch.float32, device=torch.cuda.current_device()) / channels
        self._frequencies = 1.0 / rotary["rope_theta"] ** exponents

    def forward(self, positions: Tensor, of_axes: list[int], cp_group: None = None) -> Tensor:
        """Return the angles (s, b, 1, channels) float32 of s tokens of b sequences.

        positions: (3, b, s) in time, height and width. of_axes: from `sections`. cp_group: None, which megatron-core passes.
        """
        assert cp_group is None
        angles = positions.unsqueeze(-1).float() * self._frequencies
        mixed = angles[0].clone()
        for axis in (1, 2):
            own = slice(axis, 3 * of_axes[axis], 3)
            mixed[..., own] = angles[axis, ..., own]
        return torch.cat((mixed, mixed), dim=-1).transpose(0, 1).unsqueeze(2)

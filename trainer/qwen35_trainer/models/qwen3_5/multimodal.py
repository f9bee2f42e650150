"""Build the input of a vision-language model from sequences with pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from qwen35_trainer.models.qwen3_5.classes import HFConfig
from qwen35_trainer.models.qwen3_5.inputs import ModelInput
from qwen35_trainer.models.qwen3_5.pictures import Pictures
from qwen35_trainer.models.qwen3_5.positions import positions, text_positions, token_types
from qwen35_trainer.models.qwen3_5.shared_prompts import SharedPrompts

if TYPE_CHECKING:
    from qwen35_trainer.data.picture_arrays import PictureArrays


def multimodal_input(
    sequences: Sequence[Tensor],
    pictures: Sequence[PictureArrays | None],
    config: HFConfig,
    *,
    written: Sequence[Tensor] | None = None,
    shared: SharedPrompts | None = None,
    packed: bool,
    with_patches: bool = True,
    device: torch.device | str,
) -> ModelInput:
    """Return the model input of sequences of token ids and their pictures.

    sequences: (length,) int64 each.
    pictures: the pictures of each sequence; None: the sequence has no picture.
    config: the configuration of a vision-language model.
    written: for each sequence (length,) bool, true for tokens that the model generated. Generated placeholders do not
      stand for pictures.
    shared: the sequences that share a prompt. The pictures of a shared prompt, which each of its sequences has, are read
      once; None: sequences share no prompt. It needs `packed`.
    packed: whether the sequences are packed into one row; otherwise they are padded.
    with_patches: whether the result has the pictures; otherwise it has the positions that follow from them, and no pictures.

    Raises ValueError naming all sequences whose placeholders do not match their pictures.
    """
    text = ModelInput.of_text(sequences, packed=packed, device=device)
    types, places, problems = [], [], []
    for i, (sequence, arrays) in enumerate(zip(sequences, pictures, strict=True)):
        if arrays is None:
            types.append(torch.zeros_like(sequence))
            places.append(torch.from_numpy(text_positions(len(sequence))))
            continue
        generated = None if written is None else written[i].numpy().astype(np.bool_)
        try:
            kinds, rows = kinds_and_positions(sequence.numpy(), arrays, config, generated)
        except ValueError as error:
            problems.append(f"sequence {i}: {error}")
            continue
        types.append(torch.from_numpy(kinds))
        places.append(torch.from_numpy(rows))
    if problems:
        raise ValueError("\n".join(problems))
    read_once = pictures
    if shared is not None:
        read_once = [None if shared.repeats_prompt(i) else arrays for i, arrays in enumerate(pictures)]
    inputs = replace(
        text,
        positions=_joined(places, packed).to(device),
        pictures=Pictures.of(read_once, _joined(types, packed), device) if with_patches else None,
    )
    return inputs if shared is None else inputs.sharing(shared)


def kinds_and_positions(
    sequence: NDArray[np.int64], arrays: PictureArrays, config: HFConfig, written: NDArray[np.bool_] | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the kind (length,) and the positions (length, 4) of each token of a sequence with pictures.

    Kinds are numbered as in `token_types`; positions are text, time, height and width. sequence: (length,) token ids.
    written: true for tokens that the model generated. Raises ValueError if the placeholders do not match the pictures.
    """
    kinds = token_types(sequence, image_token=config.image_token_id, video_token=config.video_token_id, written=written)
    return kinds, positions(kinds, arrays.grids, arrays.video_grids, config.vision_config.spatial_merge_size)


def _joined(rows: Sequence[Tensor], packed: bool) -> Tensor:
    return torch.cat(list(rows)).unsqueeze(0) if packed else pad_sequence(list(rows), batch_first=True)

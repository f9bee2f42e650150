"""Splitting batches of sequences of different lengths that lie in torch's jagged nested tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor

type Nested = Any
"""A tensor of layout `torch.jagged`: torch gives its type none of the methods that say where the sequences are."""


def split(batch: Nested) -> list[Tensor]:
    """The sequences of a nested tensor of layout `torch.jagged`, as views; whichever dimension is the ragged one.

    batch: (sequences, length*, …) or (sequences, rows, length*, …), the starred dimension differing between them.

    `Tensor.unbind` trusts the tensor's note of which dimension is ragged, and for three dimensions that note is often
    wrong (pytorch/pytorch#153238): a tensor rebuilt from its values and offsets says 1 where it was 2, and one made of
    sequences that happen to be equally long says 1 where others say 2. Then it raises. The offsets say it themselves:
    the ragged dimension is the one as long as they are; where two are, the note decides. Raises ValueError where no
    dimension is that long.

    This trainer stores positions as (tokens, 4) and makes no such tensors; batches from other code may hold them.
    """
    values, offsets, lengths = batch.values(), batch.offsets().tolist(), batch.lengths()
    fitting = [dim for dim, size in enumerate(values.shape) if size >= offsets[-1]]
    if lengths is None:
        fitting = [dim for dim in fitting if values.shape[dim] == offsets[-1]]
    noted = batch._ragged_idx - 1
    if noted not in fitting and len(fitting) != 1:
        raise ValueError(
            f"values {tuple(values.shape)} with offsets up to {offsets[-1]}: no dimension, or more than one, could be the "
            "ragged one; build the tensor with nested_tensor_from_jagged(…, jagged_dim=…)."
        )
    dim = noted if noted in fitting else fitting[0]
    ends = offsets[1:] if lengths is None else (batch.offsets()[:-1] + lengths).tolist()
    return [values.narrow(dim, start, end - start) for start, end in zip(offsets, ends, strict=False)]

"""Split torch's jagged nested tensors into sequences of different lengths.

Only tests use this module today. The trainer stores positions as (tokens, 4) and creates no jagged tensors, but batches
from other code may contain them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

type Nested = Any
"""A tensor of layout `torch.jagged`, for which torch's type lacks the methods that return positions of sequences."""


def split(batch: Nested) -> list[Tensor]:
    """Split a nested tensor of layout `torch.jagged` into its sequences, as views. Any dimension may be the ragged one.

    batch: (sequences, length*, …) or (sequences, rows, length*, …). The dimension with the star is the ragged one: its
    size differs between sequences.

    `Tensor.unbind` uses the tensor's record of its ragged dimension. For three dimensions this record is often wrong
    (pytorch/pytorch#153238): it is 1 instead of 2 for a tensor rebuilt from its values and offsets, and for sequences
    of equal length. `unbind` then raises. Here the ragged dimension is the one whose size fits the offsets. If several
    fit, the record decides. Raises ValueError if none fits, or if several fit and the recorded one does not.
    """
    values, offsets, lengths = batch.values(), batch.offsets().tolist(), batch.lengths()
    fitting = [dim for dim, size in enumerate(values.shape) if size >= offsets[-1]]
    if lengths is None:
        fitting = [dim for dim in fitting if values.shape[dim] == offsets[-1]]
    recorded = batch._ragged_idx - 1
    if recorded not in fitting and len(fitting) != 1:
        raise ValueError(
            f"values {tuple(values.shape)} with offsets up to {offsets[-1]}: no dimension, or more than one, could be the "
            "ragged one; build the tensor with nested_tensor_from_jagged(…, jagged_dim=…)."
        )
    dim = recorded if recorded in fitting else fitting[0]
    ends = offsets[1:] if lengths is None else (batch.offsets()[:-1] + lengths).tolist()
    return [values.narrow(dim, start, end - start) for start, end in zip(offsets, ends, strict=False)]

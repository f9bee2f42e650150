"""The tensors of a version as one rank of a replica reads them: slices of the divided tensors, and all other tensors whole."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from qwen35_trainer.weights.division import BlockOrder, HeldSection, staged_runs
from qwen35_trainer.weights.segment import Memory
from qwen35_trainer.weights.sliced_tensor import SlicedTensor, TensorSlices
from qwen35_trainer.weights.weight_manifest import ITEM_BYTES, TensorEntry, WeightLayout


class StagedBytes(Protocol):
    """The bytes of a version that this process can read."""

    def of(self, tensor: int, start: int, stop: int) -> Memory:
        """Return the staged bytes `start` to `stop` (exclusive) of a tensor. This process must have all of them.

        tensor: index of the tensor in the layout.
        """
        ...


class RankWeights(Mapping[str, Tensor]):
    """The tensors of a version by name, for vLLM's loaders in the process of one rank."""

    def __init__(self, layout: WeightLayout, held: Mapping[str, Sequence[HeldSection]], staged: StagedBytes) -> None:
        """Create the tensors.

        held: name of each divided tensor → the rank's part of each of its sections. Tensors without an entry are whole.
        staged: the bytes from which all tensors are created.
        """
        self._held, self._staged = held, staged
        self._entries = {entry.name: (number, entry) for number, entry in enumerate(layout.tensors)}

    def __getitem__(self, name: str) -> Tensor:
        number, entry = self._entries[name]
        held = self._held.get(name)
        if held is None:
            staged = tensor_of(self._staged.of(number, 0, entry.size), entry.dtype)
            return in_order(staged, entry)
        slices = TensorSlices(name, held, lambda section: self._matrix(number, entry, section))
        return SlicedTensor.whole(entry.shape, getattr(torch, entry.dtype), slices)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def _matrix(self, number: int, entry: TensorEntry, held: HeldSection) -> Tensor:
        """Return the rank's part of a section as a matrix, one row for each index of the section's first dimension.

        number: index of the tensor in the layout.
        """
        item, unit = ITEM_BYTES[entry.dtype], held.section.unit
        blocks = 1 if entry.order is None else entry.order.blocks
        inner = held.section.units * unit // blocks
        columns = [
            range(max(held.units.start * unit - block * inner, 0), min(held.units.stop * unit - block * inner, inner))
            for block in range(blocks)
        ]
        widths = [len(each) for each in columns if each]
        matrices = []
        for run, width in zip(staged_runs(held, entry.order), widths, strict=True):
            values = tensor_of(self._staged.of(number, run.start * item, run.stop * item), entry.dtype)
            matrices.append(values.as_strided((len(held.outer), width), (inner, 1)))
        return matrices[0] if len(matrices) == 1 else torch.cat(matrices, dim=1)


def tensor_of(memory: Memory, dtype: str) -> Tensor:
    """Return the values in `memory` as a flat tensor, without a copy.

    The memory may be read-only. dtype: torch's name of the type, such as "bfloat16".
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        data = torch.from_numpy(memory)
    return data.as_strided((memory.size,), (1,)).view(getattr(torch, dtype))  # NumPy gives an empty array any stride


def in_order(staged: Tensor, entry: TensorEntry) -> Tensor:
    """Return a tensor in its own shape from its staged values.

    If the tensor is staged in blocks, the values are copied.
    """
    return (
        staged.view(entry.shape) if entry.order is None else _rows(staged, entry.order).contiguous().view(entry.shape)
    )


def _rows(staged: Tensor, order: BlockOrder) -> Tensor:
    return staged.view(order.blocks, order.outer, -1).transpose(0, 1)

"""The tensors of a version as one rank of a replica reads them: its slices of those that the ranks divide, and all others whole."""

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
        """Return staged bytes of a tensor. The rank must hold them, and all bytes between them."""
        ...


class RankWeights(Mapping[str, Tensor]):
    """The tensors of a version by name, for vLLM's loaders in the process of one rank."""

    def __init__(self, layout: WeightLayout, held: Mapping[str, Sequence[HeldSection]], staged: StagedBytes) -> None:
        """Create the tensors.

        held: name of a tensor → the rank's part of it. It has all other tensors whole. staged: where the bytes of these are.
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
        """Return what the rank holds of a section, as (outer, units · unit)."""
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
    """Return bytes as a tensor of values, without a copy. The memory may be read-only."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        data = torch.from_numpy(memory)
    return data.as_strided((memory.size,), (1,)).view(getattr(torch, dtype))  # NumPy gives an empty array any stride


def in_order(staged: Tensor, entry: TensorEntry) -> Tensor:
    """Return the staged values of a tensor in its own shape. Values that are staged in blocks are copied."""
    return (
        staged.view(entry.shape) if entry.order is None else _rows(staged, entry.order).contiguous().view(entry.shape)
    )


def _rows(staged: Tensor, order: BlockOrder) -> Tensor:
    return staged.view(order.blocks, order.outer, -1).transpose(0, 1)

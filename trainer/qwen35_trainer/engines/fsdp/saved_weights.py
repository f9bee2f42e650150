"""Weights as they lie in a checkpoint that `checkpoint.begin` wrote: any part of any tensor, without a process group.

    .metadata ─► which pieces of a tensor the ranks wrote ─┐
    *.distcp: each piece as torch.save writes it ──────────┴─► where its values begin ─► read those that are asked for

PyTorch's own reader holds three copies of a tensor while it reads one. Files are read, not mapped: when a file is cut off, or
a network file system loses it, reading raises an OSError, and touching a mapped page ends the process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view

_MODEL = "model."
"""Before the names of parameters in a checkpoint, whose names may begin with the same word."""


class WeightsUnreadable(RuntimeError):
    """The files of a checkpoint are damaged."""


@dataclass(frozen=True)
class _Piece:
    """What one rank wrote of a tensor."""

    file: Path
    begin: int
    """Where its first value is in the file, in bytes."""
    strides: tuple[int, ...]
    """Values from one index to the next, for each dimension."""


class SavedWeights:
    """What trained, as it lies in a checkpoint. Threads may read from it together."""

    def __init__(self, folder: Path) -> None:
        """folder: what `checkpoint.begin` wrote into. Raises WeightsUnreadable."""
        self._folder = folder
        try:
            metadata = dcp.FileSystemReader(folder / "state").read_metadata()
        except Exception as error:  # a damaged pickle raises anything
            raise self._unreadable(error) from error
        self._stored = {
            name.removeprefix(_MODEL): entry
            for name, entry in metadata.state_dict_metadata.items()
            if name.startswith(_MODEL) and isinstance(entry, TensorStorageMetadata)
        }
        self._places = metadata.storage_data
        self._pieces: dict[MetadataIndex, _Piece] = {}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """By name."""
        return {name: tuple(entry.size) for name, entry in self._stored.items()}

    def read(self, name: str, *slices: slice) -> Tensor:
        """Values of one tensor, or of a part of it, in the type that it was trained in; only that part is read.

        slices: one for each leading dimension, with a step of 1. Raises WeightsUnreadable.
        """
        entry = self._stored[name]
        dtype = entry.properties.dtype
        wanted = [range(size) for size in entry.size]
        wanted[: len(slices)] = [each[part] for each, part in zip(wanted, slices, strict=False)]
        values = torch.empty([len(each) for each in wanted], dtype=dtype)
        # The pieces cover the tensor and do not overlap: PyTorch checks that when it saves.
        for chunk in entry.chunks:
            within = [
                range(max(each.start, start), min(each.stop, start + size))
                for each, start, size in zip(wanted, chunk.offsets, chunk.sizes, strict=True)
            ]
            if not all(within):
                continue
            starts = [each.start - start for each, start in zip(within, chunk.offsets, strict=True)]
            try:
                piece = self._piece(MetadataIndex(_MODEL + name, chunk.offsets))
                part = _read(piece, dtype, starts, [len(each) for each in within])
            except Exception as error:  # a damaged pickle raises anything
                raise self._unreadable(error) from error
            if within == wanted:
                return part
            target = (
                slice(each.start - whole.start, each.stop - whole.start)
                for each, whole in zip(within, wanted, strict=True)
            )
            values[tuple(target)] = part
        return values

    def _piece(self, index: MetadataIndex) -> _Piece:
        """Where a piece is. Reads what torch.save wrote around its values, once."""
        if (found := self._pieces.get(index)) is not None:
            return found
        place = self._places[index]
        file = self._folder / "state" / place.relative_path
        # With fake tensors torch.load skips the values and notes where they are (PyTorch's notes on serialization).
        with file.open("rb") as opened, FakeTensorMode():
            view = cast(IO[bytes], _create_file_view(opened, place.offset, place.length))
            tensor = torch.load(view, weights_only=True)
        begin = tensor.untyped_storage()._checkpoint_offset + tensor.storage_offset() * tensor.itemsize
        self._pieces[index] = found = _Piece(file, place.offset + begin, tensor.stride())
        return found

    def _unreadable(self, error: BaseException) -> WeightsUnreadable:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return WeightsUnreadable(f"checkpoint {self._folder} cannot be read ({reason}). Name an earlier one")


def _read(piece: _Piece, dtype: torch.dtype, starts: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """The values of a piece from `starts`, of shape `sizes`; reads all that is between the first and the last of them."""
    first = sum(start * stride for start, stride in zip(starts, piece.strides, strict=True))
    last = first + sum((size - 1) * stride for size, stride in zip(sizes, piece.strides, strict=True))
    values = torch.empty(last - first + 1, dtype=dtype)
    with piece.file.open("rb") as file:
        file.seek(piece.begin + first * dtype.itemsize)
        if file.readinto(values.view(torch.uint8).numpy()) < values.nbytes:
            raise EOFError(f"{piece.file.name} is cut off")
    return values.as_strided(sizes, piece.strides)

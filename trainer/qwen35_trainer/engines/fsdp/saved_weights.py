"""Read parts of tensors from a checkpoint that `sharded_checkpoint.begin` wrote, without a process group.

    .metadata ─► which pieces of a tensor the ranks wrote ─┐
    *.distcp: each piece as torch.save writes it ──────────┴─► where its values begin ─► read the requested values

PyTorch's reader is not used for the values, because it holds three copies of a tensor while it reads one. Files are
read, not memory-mapped: if a file is cut off, or a network file system loses it, reading raises an exception, while
access to a mapped page would end the process.
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
"""Prefix of the names of parameters in a checkpoint.

The name after the prefix may begin with "model." again."""


class WeightsUnreadable(RuntimeError):
    """The files of a checkpoint are damaged or missing."""


@dataclass(frozen=True)
class _Piece:
    """The part of a tensor that one rank wrote, and where a file holds its values."""

    file: Path
    begin: int
    """Offset of the piece's first value in the file, in bytes."""
    strides: tuple[int, ...]
    """Strides of the piece, in values: for each dimension, the distance between neighbouring indices."""


class SavedWeights:
    """A part of a checkpoint: the trained weights or the optimizer state, depending on the prefix of the tensors' names.

    Several threads may call `read` at the same time. Create the object in a thread that does not end before the process, such as
    the main thread.
    """

    def __init__(self, folder: Path, prefix: str = _MODEL) -> None:
        """Read the metadata of a checkpoint, but no values.

        folder: the folder that `sharded_checkpoint.begin` wrote. prefix: the beginning of tensors' names in the
        checkpoint. The names that this object uses lack the prefix. Raises WeightsUnreadable if the metadata is
        missing or damaged.
        """
        self._folder, self._prefix = folder, prefix
        # On a machine without a GPU, torch 2.11 keeps memory of the first thread that makes fake tensors, and uses it after that
        # thread has ended, which ends the process. So this thread is the first one.
        with FakeTensorMode():
            pass
        try:
            metadata = dcp.FileSystemReader(folder / "state").read_metadata()
        except Exception as error:  # a damaged pickle raises anything
            raise self._unreadable(error) from error
        self._stored = {
            name.removeprefix(prefix): entry
            for name, entry in metadata.state_dict_metadata.items()
            if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
        }
        self._places = metadata.storage_data
        self._pieces: dict[MetadataIndex, _Piece] = {}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name of a tensor → its shape, for all tensors."""
        return {name: tuple(entry.size) for name, entry in self._stored.items()}

    def read(self, name: str, *slices: slice) -> Tensor:
        """Read one tensor, or the part of it that `slices` selects. The result has the type that was saved.

        slices: one for each leading dimension, with a step of 1. Raises WeightsUnreadable for a damaged or missing
        file, and KeyError for an unknown name.
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
                piece = self._piece(MetadataIndex(self._prefix + name, chunk.offsets))
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
        """Return where a file holds the values of a piece. The header that torch.save wrote is read once per piece."""
        if (known_piece := self._pieces.get(index)) is not None:
            return known_piece
        place = self._places[index]
        file = self._folder / "state" / place.relative_path
        # With fake tensors torch.load skips the values and notes where they are (PyTorch's notes on serialization).
        with file.open("rb") as opened, FakeTensorMode():
            view = cast(IO[bytes], _create_file_view(opened, place.offset, place.length))
            tensor = torch.load(view, weights_only=True)
        begin = tensor.untyped_storage()._checkpoint_offset + tensor.storage_offset() * tensor.itemsize
        self._pieces[index] = piece = _Piece(file, place.offset + begin, tensor.stride())
        return piece

    def _unreadable(self, error: BaseException) -> WeightsUnreadable:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return WeightsUnreadable(f"checkpoint {self._folder} cannot be read ({reason}). Name an earlier one")


def _read(piece: _Piece, dtype: torch.dtype, starts: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Read the block of a piece that begins at the indices `starts` and has the shape `sizes`.

    One read covers all bytes from the first value of the block to the last. The result is a view of them.
    """
    first = sum(start * stride for start, stride in zip(starts, piece.strides, strict=True))
    last = first + sum((size - 1) * stride for size, stride in zip(sizes, piece.strides, strict=True))
    values = torch.empty(last - first + 1, dtype=dtype)
    with piece.file.open("rb") as file:
        file.seek(piece.begin + first * dtype.itemsize)
        if file.readinto(values.view(torch.uint8).numpy()) < values.nbytes:
            raise EOFError(f"{piece.file.name} is cut off")
    return values.as_strided(sizes, piece.strides)

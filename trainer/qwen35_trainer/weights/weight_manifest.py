"""The manifest of a version of the weights: the byte offset of each tensor, and the parts of tensors with their checksums.

    bytes of a version    │ tensor 0                 │ tensor 1 │ tensor 2            │
    parts                 │ rank 0 │ rank 1 │ rank 2 │  rank 1  │ rank 0 │ rank 1 │ … │     written by this train rank

Tensors follow one another, and each starts at a multiple of ALIGNMENT bytes. Offsets depend only on names, shapes and types, so
every rank computes the same layout without a message. This module imports neither torch nor Ray.
"""

from __future__ import annotations

import math
import pickle
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from qwen35_trainer.failure_reasons import FailureReason
from qwen35_trainer.weights.division import WHOLE, BlockOrder, StagingPlan

ALIGNMENT = 64
"""Tensors start at multiples of this number of bytes: a cache line, which vector instructions load best."""
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1, "bool": 1}
"""Type of a tensor that can be published, by torch's name → size of a value in bytes."""
MAX_NAMED = 10
"""Maximum number of tensors that an error message names."""


class WeightsDamaged(RuntimeError):
    """The tensors of a published version are incomplete, or their bytes do not match their manifest."""

    failure = FailureReason.WEIGHTS_DAMAGED


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The name, shape, type and byte offset of one tensor in a version of the weights."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    """Offset of the tensor's first byte in the version."""
    order: BlockOrder | None = None
    """The block order in which the values are staged. None: the order of the tensor's values."""

    @property
    def size(self) -> int:
        """The number of bytes of the tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class TensorPart(NamedTuple):
    """Consecutive staged bytes of one tensor, which one train rank has written.

    A version of the largest models has some 200,000 parts. To pickle and unpickle tuples takes about half the time of
    dataclasses with slots.
    """

    tensor: int
    """Index of the tensor in `WeightLayout.tensors`."""
    start: int
    """Offset of the part's first byte among the staged bytes of the tensor."""
    size: int
    checksum: int
    """XXH3 checksum of the part's bytes, 64 bits."""


@dataclass(frozen=True)
class WeightLayout:
    """The byte offset, shape and type of each tensor in the bytes of a version of the weights."""

    tensors: tuple[TensorEntry, ...]
    size: int
    """Number of bytes of the version, from the start of the first tensor to the end of the last one."""

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, tuple[int, ...], str]], plan: StagingPlan = WHOLE) -> WeightLayout:
        """Return the layout in which the given tensors, (name, shape, type) each, follow one another.

        plan: contains the order in which the values of each tensor are staged. Raises WeightsDamaged, naming the
        tensors, if tensors occur twice, and ValueError for a type that is not in ITEM_BYTES.
        """
        entries: list[TensorEntry] = []
        end = 0
        for name, shape, dtype in tensors:
            if dtype not in ITEM_BYTES:
                raise ValueError(f"{name} is of type {dtype}; types that can be published: {', '.join(ITEM_BYTES)}")
            entry = TensorEntry(name, shape, dtype, -(-end // ALIGNMENT) * ALIGNMENT, plan.orders.get(name))
            entries.append(entry)
            end = entry.offset + entry.size
        if doubled := sorted(name for name, count in Counter(entry.name for entry in entries).items() if count > 1):
            raise WeightsDamaged(f"weights to publish contain {listed(doubled)} more than once")
        return cls(tuple(entries), end)

    @property
    def checksum(self) -> int:
        """Checksum of the layout (CRC32), with which ranks check that they have computed the same layout."""
        return zlib.crc32(repr(self.tensors).encode())


@dataclass(frozen=True)
class WeightManifest:
    """The contents of one published version of the weights. It is pickled once, however many replicas get it."""

    version: int
    layout: WeightLayout
    parts: tuple[TensorPart, ...]

    def __reduce__(self) -> tuple[Callable[[bytes], WeightManifest], tuple[bytes]]:
        return _unpickled, (self._pickled,)

    @cached_property
    def _pickled(self) -> bytes:
        return pickle.dumps((self.version, self.layout, self.parts), pickle.HIGHEST_PROTOCOL)

    def check_complete(self) -> None:
        """Raise WeightsDamaged unless the parts contain every byte of every tensor exactly once.

        The error names the tensors with missing or repeated bytes.
        """
        of_tensor: defaultdict[int, list[TensorPart]] = defaultdict(list)
        for part in self.parts:
            of_tensor[part.tensor].append(part)
        problems: list[str] = []
        unknown = of_tensor.keys() - range(len(self.layout.tensors))
        if unknown:
            problems.append(f"parts of tensors {sorted(unknown)}, which the layout does not have")
        for number, entry in enumerate(self.layout.tensors):
            if problem := _gap(entry, of_tensor[number]):
                problems.append(problem)
        if problems:
            raise WeightsDamaged(f"weights of version {self.version}: {listed(problems, '; ')}")


def _unpickled(pickled: bytes) -> WeightManifest:
    version, layout, parts = pickle.loads(pickled)  # noqa: S301  # as the message that contains it
    return WeightManifest(version, layout, parts)


def packed(sizes: Iterable[int]) -> Iterator[slice]:
    """Yield the range of bytes of each part. Each part starts at the next multiple of ALIGNMENT bytes after the previous one.

    sizes: number of bytes of each part, in order.
    """
    start = 0
    for size in sizes:
        yield slice(start, start + size)
        start = -(-(start + size) // ALIGNMENT) * ALIGNMENT


def _gap(entry: TensorEntry, parts: Sequence[TensorPart]) -> str:
    """Return a text about missing or repeated bytes of a tensor; "" if its parts contain each byte exactly once."""
    end = 0
    for part in sorted(parts, key=lambda part: (part.start, part.size)):
        if part.start < end:
            return f"{entry.name} was written twice from byte {part.start} of {entry.size}"
        if part.start > end:
            return f"{entry.name} lacks bytes {end} to {part.start} of {entry.size}"
        end += part.size
    if end < entry.size:
        return (
            f"{entry.name} lacks bytes {end} to {entry.size} of {entry.size}" if parts else f"{entry.name} is missing"
        )
    if end > entry.size:
        return f"{entry.name} has {end} bytes, expected {entry.size}"
    return ""


def listed(names: Sequence[str], separator: str = ", ") -> str:
    """Return at most MAX_NAMED names as one text, followed by the number of names that are left out."""
    rest = len(names) - MAX_NAMED
    return separator.join(names[:MAX_NAMED]) + (f"{separator}and {rest} more" if rest > 0 else "")

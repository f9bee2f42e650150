"""Memory for large arrays that are made again and again, such as the tokens of each batch.

    empty ─► array ─► nobody refers to the array, or to a view of it ─► its memory is free for a later array

The C library returns the memory of a large array to the system when the array is freed. The system fills the pages of the
next array with zeros before they are written. For batches of responses of 32,000 tokens, this took several times as
long as copying the tokens.
"""

from __future__ import annotations

import weakref

import numpy as np
from numpy.typing import NDArray


class ReusedMemory:
    """Makes arrays in the memory of earlier arrays to which nobody refers any more.

    It keeps the memory of as many arrays as have existed at the same time, each with the size of a recent array. Only one
    thread at a time may call `empty`. Arrays may be freed on any thread.
    """

    def __init__(self) -> None:
        self._free: list[NDArray[np.uint8]] = []

    def empty[T: np.generic](self, count: int, dtype: type[T]) -> NDArray[T]:
        """Return an array (count,) of any values."""
        memory = self._take(max(1, count) * np.dtype(dtype).itemsize)
        # Views of this array refer to it, and not to `memory`, because a memoryview lies between the two.
        array = np.frombuffer(memoryview(memory), dtype, count)
        weakref.finalize(array, self._free.append, memory).atexit = False
        return array

    def _take(self, size: int) -> NDArray[np.uint8]:
        """Return the smallest free memory of at least `size` bytes, or new memory, which replaces the largest free one."""
        sizes = [(len(memory), index) for index, memory in enumerate(self._free)]
        fitting = min((each for each in sizes if each[0] >= size), default=None)
        if fitting is not None:
            return self._free.pop(fitting[1])
        if sizes:
            self._free.pop(max(sizes)[1])
        return np.empty(size, np.uint8)

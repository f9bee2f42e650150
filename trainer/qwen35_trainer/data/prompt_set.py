"""The prompts of several sources as one set, and the order in which they train.

The order of the next epoch is computed before it is needed:

    of(epoch) ─► computed? ─ yes ─► permutation, and epoch + 1 is computed on another thread, if there are many prompts
                    └ no: wait for the thread, or compute it here

waits on              unblocked by                            deadline
of: the other thread  its computation, 0.5 s per 1M prompts   none: that thread computes, and waits for nothing
"""

from __future__ import annotations

import hashlib
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from qwen35_trainer.data.data_errors import DataError
from qwen35_trainer.data.gym_prompts import GymPrompts
from qwen35_trainer.data.prompt import Prompt
from qwen35_trainer.data.prompt_files import FilePrompts, read_prompts
from qwen35_trainer.data.row_sequence import RowSequence
from qwen35_trainer.data.source_rows import SourceRows
from qwen35_trainer.manifest.data import SourceSpec

MIN_PREPARED_PROMPTS: Final = 20_000
"""Minimum number of prompts for which a permutation is computed in advance.

For fewer, the computation takes less than 10 ms.
"""
_MAX_KEPT_PERMUTATIONS: Final = 3
"""Maximum number of permutations in memory: one each for the previous, the present and the next epoch.

The last groups of the previous epoch may be dispatched again.
"""


class PromptSet(RowSequence[Prompt]):
    """The prompts of several data sources, read as one sequence: all prompts of the first source, then those of the next."""

    def __init__(self, parts: Iterable[Sequence[Prompt]]) -> None:
        self._parts = tuple(part for part in parts if part)
        self._ends = tuple(accumulate(len(part) for part in self._parts))

    @classmethod
    def load(cls, sources: Iterable[SourceSpec], base: Path, *, answers_required: bool = False) -> PromptSet:
        """Load the prompts of all sources.

        base: the folder of the manifest, to which paths are relative. answers_required: whether a row of a file
        without an answer is a problem, because a reward or SFT needs the answer. Raises DataError with the problems of
        all sources.
        """
        parts: list[Sequence[Prompt]] = []
        problems: list[str] = []
        for source in sources:
            try:
                if source.files is not None:
                    parts.append(read_prompts(source, base, answers_required=answers_required))
                else:
                    parts.append(GymPrompts(source))
            except DataError as error:
                problems.extend(error.problems)
        if problems:
            raise DataError(problems)
        return cls(parts)

    @property
    def source_rows(self) -> tuple[SourceRows, ...]:
        """The rows of each source that consists of files. The manifest alone determines the prompts of the others."""
        return tuple(part.rows for part in self._parts if isinstance(part, FilePrompts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _row(self, row: int) -> Prompt:
        part = bisect_right(self._ends, row)
        start = self._ends[part - 1] if part else 0
        return self._parts[part][row - start]


class EpochPermutations:
    """The permutations of `length` prompts, one per epoch.

    The same length, seed and epoch give the same permutation.
    """

    def __init__(self, length: int, seed: int) -> None:
        self._length, self._seed = length, seed
        self._computed: OrderedDict[int, Future[NDArray[np.int64]]] = OrderedDict()  # the last one was used last
        self._lock = threading.Lock()

    def of(self, epoch: int) -> NDArray[np.int64]:
        """Return the indices of the prompts in the order of an epoch, (length,) int64.

        Waits if another thread computes them.
        """
        future, is_new = self._future(epoch)
        if is_new:
            self._compute(epoch, future)
        return future.result()

    def prepare(self, epoch: int) -> None:
        """Begin to compute the permutation of an epoch on another thread, if there are many prompts."""
        if self._length < MIN_PREPARED_PROMPTS:
            return
        future, is_new = self._future(epoch)
        if is_new:
            threading.Thread(target=self._compute, args=(epoch, future), name="prompt order", daemon=True).start()

    def _future(self, epoch: int) -> tuple[Future[NDArray[np.int64]], bool]:
        """Return the future permutation of an epoch, and whether the caller must compute it.

        The caller must compute it if this is the first call for the epoch, or if the permutation was dropped
        from memory.
        """
        with self._lock:
            is_new = epoch not in self._computed
            future = self._computed.setdefault(epoch, Future())
            self._computed.move_to_end(epoch)
            if len(self._computed) > _MAX_KEPT_PERMUTATIONS:
                self._computed.popitem(last=False)
        return future, is_new

    def _compute(self, epoch: int, future: Future[NDArray[np.int64]]) -> None:
        try:
            future.set_result(permutation(self._length, self._seed, epoch))
        except BaseException as error:  # noqa: BLE001  # raised where the permutation is needed
            future.set_exception(error)


def permutation(length: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the indices 0 … length - 1 sorted by a hash, (length,) int64.

    The hash of an index is BLAKE2b of `seed/epoch/index`, 16 bytes. Unlike `random.shuffle`, the result is the same in
    every version of Python.
    """
    start = hashlib.blake2b(f"{seed}/{epoch}/".encode(), digest_size=16)

    def key(index: int) -> bytes:
        state = start.copy()
        state.update(b"%d" % index)
        return state.digest()

    keys = np.frombuffer(b"".join(map(key, range(length))), dtype=">u8").reshape(length, 2)
    order: NDArray[np.int64] = np.lexsort((keys[:, 1], keys[:, 0]))
    return order


@dataclass(frozen=True)
class PromptOrder:
    """The order in which prompts train. It depends only on seed and position, so a resumed run needs only its position.

    length: number of prompts in the set. epochs: number of passes over the set; None: no limit. shuffle: whether each
    epoch has a different permutation; otherwise every epoch has the order 0, 1, 2, … Raises DataError if there is
    nothing to train on.
    """

    length: int
    seed: int = 0
    epochs: int | None = 1
    shuffle: bool = True
    _permutations: EpochPermutations = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_permutations", EpochPermutations(self.length, self.seed))
        if self.length < 1 or (self.epochs is not None and self.epochs < 1):
            raise DataError([f"{self.length} prompts × {self.epochs} epochs: nothing to train on. Add prompts."])

    def __len__(self) -> int:
        if self.epochs is None:
            raise TypeError("an order without end has no length")
        return self.length * self.epochs

    def prompt_index(self, position: int) -> int:
        """Return the index, in the set, of the prompt at `position`.

        Positions count prompts over all epochs, from 0. Raises IndexError for a negative position, and for one after
        the last epoch.
        """
        if position < 0 or (self.epochs is not None and position >= self.length * self.epochs):
            passes = "any number of" if self.epochs is None else self.epochs
            raise IndexError(f"position {position} is outside {passes} passes over {self.length} prompts")
        epoch, place = divmod(position, self.length)
        if not self.shuffle:
            return place
        index = int(self._permutations.of(epoch)[place])
        if self.epochs is None or epoch + 1 < self.epochs:
            self._permutations.prepare(epoch + 1)
        return index

    def prepare(self, position: int) -> None:
        """Begin to compute the order of an epoch on another thread, if the prompts are shuffled and there are many.

        position: any position of this epoch.
        """
        if self.shuffle:
            self._permutations.prepare(position // self.length)

"""The order of the prompts within each epoch. The order of the next epoch is computed before it is needed.

    of(epoch) ─► computed? ─ yes ─► permutation, and epoch + 1 is computed on another thread, if there are many prompts
                    └ no: wait for the thread, or compute it here

waits on              unblocked by                            deadline
of: the other thread  its computation, 0.5 s per 1M prompts   none: that thread computes, and waits for nothing
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from concurrent.futures import Future
from typing import Final

import numpy as np
from numpy.typing import NDArray

MIN_PREPARED_PROMPTS: Final = 20_000
"""Minimum number of prompts for which a permutation is computed in advance.

For fewer, the computation takes less than 10 ms.
"""
_MAX_KEPT_PERMUTATIONS: Final = 3
"""Maximum number of permutations in memory: those of the previous epoch, whose last groups may be dispatched again, of the
present one, and of the next."""


class EpochPermutations:
    """The permutations of `length` prompts, one per epoch. Equal length, seed and epoch give the same permutation."""

    def __init__(self, length: int, seed: int) -> None:
        self._length, self._seed = length, seed
        self._computed: OrderedDict[int, Future[NDArray[np.int64]]] = OrderedDict()  # the last one was used last
        self._lock = threading.Lock()

    def of(self, epoch: int) -> NDArray[np.int64]:
        """Return the indices of the prompts in the order of an epoch, (length,) int64."""
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

        The caller must compute it if no earlier call has asked for this epoch, or if the permutation has been dropped.
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

"""Two greedy divisions: items into bins of limited size, and items into shares of nearly equal size."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray


def balance(sizes: NDArray[np.int64], order: NDArray[np.int64], ranks: int) -> list[NDArray[np.int64]]:
    """Give each item, in `order`, to the rank with the smallest sum of sizes so far (greedy, Graham 1969).

    sizes: size of each item. order: indices of the items, largest first. Items of equal sizes mean equal work, if the sizes are
    numbers of packed tokens. Returns the indices of each rank's items, largest first.
    """
    loads = [(0, rank) for rank in range(ranks)]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for item in order.tolist():
        load, rank = heapq.heappop(loads)
        shares[rank].append(item)
        heapq.heappush(loads, (load + int(sizes[item]), rank))
    return [np.array(share, dtype=np.int64) for share in shares]


def first_fit(sizes: NDArray[np.int64], order: NDArray[np.int64], limit: int) -> list[NDArray[np.int64]]:
    """Divide items into bins of at most `limit` in all, by first-fit decreasing.

    sizes: size of each item. order: indices of the items to divide, largest first. Each item goes into the first bin that
    has room. This needs at most 22 % more bins than the optimum. An item above the limit has a bin of its own.
    """
    cuts: list[list[int]] = []
    room = _FirstFit(len(order), limit)
    for item in order.tolist():
        place = room.take(int(sizes[item]))
        if place == len(cuts):
            cuts.append([])
        cuts[place].append(item)
    return [np.array(cut, dtype=np.int64) for cut in cuts]


class _FirstFit:
    """The free room of `count` bins, in a binary tree. A node holds the maximum of its children.

    The first bin with enough room is found in O(log count). Items arrive largest first, so items above the limit come
    before all others; each of them takes the next empty bin.
    """

    def __init__(self, count: int, limit: int) -> None:
        self._leaves = 1 << max(0, count - 1).bit_length()
        self._most = [limit] * (2 * self._leaves)  # node n has the children 2n and 2n + 1; the leaves come last
        self._oversized = 0

    def take(self, size: int) -> int:
        """Reserve room for an item in the first bin that has room, and return the bin's number.

        An item that is larger than the limit takes the next empty bin.
        """
        most, node = self._most, 1
        if size > most[node]:
            node = self._leaves + self._oversized
            self._oversized += 1
        while node < self._leaves:
            node = 2 * node if size <= most[2 * node] else 2 * node + 1
        place = node - self._leaves
        most[node] -= size
        while node > 1:
            node //= 2
            most[node] = max(most[2 * node], most[2 * node + 1])
        return place

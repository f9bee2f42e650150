"""Host memory for the values of tensors that are offloaded from their device repeatedly."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

BLOCK_BYTES = 8 * 2**20
"""Size of a block. PyTorch rounds pinned memory up to a power of two (docs of torch.cuda.host_memory_stats): with blocks, only the last
one of a tensor is larger than needed."""


class HostBlocks:
    """Blocks of host memory.

    pinned: whether the memory is pinned. Pinning needs an accelerator, and makes copies from and to the accelerator
    faster. kept: whether blocks that were given back are used again instead of being freed, because pinning takes
    longer than a copy.
    """

    def __init__(self, *, pinned: bool, kept: bool) -> None:
        self._pinned, self._kept = pinned, kept
        self._free: dict[int, list[Tensor]] = defaultdict(list)

    @classmethod
    def of(cls, device: torch.device) -> HostBlocks:
        """Return an instance, which has no blocks yet, for tensors that are offloaded from `device`.

        If `device` is a CPU, blocks that are given back are freed. Kept blocks would take memory that the tensors need,
        because the tensors are then in host memory too.
        """
        accelerator = device.type != "cpu"
        return cls(pinned=accelerator, kept=accelerator)

    def take(self, size: int) -> list[Tensor]:
        """Return blocks (bytes,) uint8 that have `size` bytes together. All but the last one have BLOCK_BYTES."""
        full, rest = divmod(size, BLOCK_BYTES)
        sizes = [BLOCK_BYTES] * full + [rest] * (rest > 0)
        return [self._free[each].pop() if self._free[each] else self._new(each) for each in sizes]

    def give_back(self, blocks: list[Tensor]) -> None:
        """Give back blocks from `take` whose values are not needed any more."""
        if self._kept:
            for block in blocks:
                self._free[block.numel()].append(block)

    def _new(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)

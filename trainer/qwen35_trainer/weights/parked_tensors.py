"""Frees the device memory of tensors for a while (offload to pinned host memory), without replacing the tensors.

    tensors ─► their storages, each once ─► values to host memory ─► storages of size 0 ─► … ─► size and values as before

A storage is resized in place, as FSDP does with gathered parameters. All views of a storage, such as a shard of a parameter and
the padded buffer behind the shard, can therefore be used again afterwards. On a CPU, the values are copied to other host memory,
which frees no memory of the machine. Tests without an accelerator run the same code, and measure the bytes of the storages.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor

from qwen35_trainer.weights.host_blocks import BLOCK_BYTES, HostBlocks


class ParkedTensors:
    """The tensors on `device` whose memory is freed until `restore`. Tensors on other devices stay as they are.

    keep_values: whether the values are kept in host memory and restored; otherwise the tensors contain zeros after
    `restore`. blocks: the host memory for the values; None: memory that nothing else uses. for_others: whether other
    processes can use the freed memory; otherwise PyTorch keeps it for this process. Nothing may use the tensors before
    `restore`.
    """

    @torch.no_grad()
    def __init__(
        self,
        tensors: Iterable[Tensor],
        device: torch.device,
        *,
        keep_values: bool = True,
        blocks: HostBlocks | None = None,
        for_others: bool = True,
    ) -> None:
        self._blocks = blocks or HostBlocks.of(device)
        self._parked: list[tuple[UntypedStorage, int, list[Tensor] | None]] = []
        for storage in _storages(tensors, device):
            size, values = storage.nbytes(), None
            if keep_values:
                values = self._blocks.take(size)
                for part, block in zip(_bytes_of(storage).split(BLOCK_BYTES), values, strict=True):
                    block.copy_(part)
            storage.resize_(0)
            self._parked.append((storage, size, values))
        if for_others and device.type != "cpu":
            torch.accelerator.empty_cache()

    @torch.no_grad()
    def restore(self) -> None:
        """Allocate the memory of the tensors again, with the kept values, or with zeros if no values were kept."""
        while self._parked:
            storage, size, values = self._parked.pop()
            storage.resize_(size)
            if values is None:
                _bytes_of(storage).zero_()
                continue
            for part, block in zip(_bytes_of(storage).split(BLOCK_BYTES), values, strict=True):
                part.copy_(block)
            self._blocks.give_back(values)


def bytes_on(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Return the number of bytes that the storages of `tensors` take on `device`.

    A storage that several tensors share counts once. Memory that PyTorch has not allocated, such as a mapped file, does
    not count.
    """
    return sum(storage.nbytes() for storage in _storages(tensors, device))


def _storages(tensors: Iterable[Tensor], device: torch.device) -> list[UntypedStorage]:
    """Return the storages of tensors on `device` that have memory, each once.

    Memory that PyTorch has not allocated, such as a mapped file, is left out.
    """
    by_address: dict[int, UntypedStorage] = {}
    for tensor in tensors:
        storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
        if storage.device.type == device.type and storage.nbytes() and storage.resizable():
            by_address.setdefault(storage.data_ptr(), storage)
    return list(by_address.values())


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

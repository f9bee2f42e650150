"""Frees the device memory of tensors for a while (offload to pinned host memory), without replacing the tensors.

    tensors ─► their storages, each once ─► values to host memory ─► storages of size 0 ─► … ─► size and values as before

A storage is resized in place, as FSDP does with gathered parameters. All views of a storage, such as a shard of a parameter and
the padded buffer behind the shard, can therefore be used again afterwards. On a CPU the values are copied to other host memory,
which frees nothing on the machine. The code is the same there, so tests without an accelerator can measure the freed bytes.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor


class ParkedTensors:
    """The tensors on `device` whose memory is freed until `restore`. Tensors on other devices stay as they are.

    keep_values: whether the values are kept in host memory and restored; otherwise the tensors contain zeros after
    `restore`. Nothing may use the tensors before `restore`.
    """

    @torch.no_grad()
    def __init__(self, tensors: Iterable[Tensor], device: torch.device, *, keep_values: bool = True) -> None:
        # Copies from pinned memory are faster, and pinned memory needs an accelerator.
        pinned = keep_values and device.type != "cpu"
        self._parked: list[tuple[UntypedStorage, int, Tensor | None]] = []
        for storage in _storages(tensors, device):
            size, values = storage.nbytes(), None
            if keep_values:
                values = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
                values.copy_(_bytes_of(storage))
            storage.resize_(0)
            self._parked.append((storage, size, values))
        if device.type != "cpu":
            torch.accelerator.empty_cache()  # another process needs what PyTorch would keep for itself

    @torch.no_grad()
    def restore(self) -> None:
        """Allocate the memory of the tensors again, with the kept values, or with zeros if no values were kept."""
        for storage, size, values in self._parked:
            storage.resize_(size)
            if values is None:
                _bytes_of(storage).zero_()
            else:
                _bytes_of(storage).copy_(values)
        self._parked.clear()


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

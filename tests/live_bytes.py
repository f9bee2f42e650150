"""Counts the bytes of all living tensors of this process, and their maximum, by a dispatch mode.

The mode sees every tensor that an operation returns. Its storage counts from then on until it is freed, by the size that it has: FSDP
resizes storages. Memory inside an operation, such as a library's workspace, is not seen.
"""

import weakref
from contextlib import ExitStack
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Context manager. Tensors that exist before it is entered count as soon as an operation returns them or a view of them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.maximum = 0
        self._known: dict[int, int] = {}
        self._patches = ExitStack()

    def __enter__(self) -> Self:
        resize, mode = torch.UntypedStorage.resize_, self

        def counted(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in mode._known:
                mode._count(storage)
            return result

        self._patches.enter_context(patch.object(torch.UntypedStorage, "resize_", counted))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # its operations on local tensors are seen instead
        result = function(*arguments, **(options or {}))
        for each in tree_iter(result):
            if isinstance(each, Tensor) and not isinstance(each, DTensor) and each.device.type == "cpu":
                self._count(each.untyped_storage())
        return result

    def restart(self) -> None:
        """Begin to search for the maximum, from the present number of bytes."""
        self.maximum = self.now

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            weakref.finalize(storage, self._freed, key).atexit = False
        self._change(size - self._known.get(key, 0))
        self._known[key] = size

    def _freed(self, key: int) -> None:
        self._change(-self._known.pop(key))

    def _change(self, size: int) -> None:
        self.now += size
        self.maximum = max(self.maximum, self.now)

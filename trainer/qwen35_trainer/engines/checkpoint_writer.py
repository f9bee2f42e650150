"""Writes a rank's part of a checkpoint to several files, so that host memory holds the tensors of only one of them.

    plan ─► items of at most FILE_BYTES ─► copied to host memory and written ─► next items

PyTorch's writer makes one file per rank, and keeps the copies of all tensors of a file until the file is complete
(`_write_files_from_queue` in torch.distributed.checkpoint, PyTorch 2.13). The copies would be as large as the rank's state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

FILE_BYTES = 2**29
"""Maximum bytes of the tensors of a file; a larger tensor has a file of its own."""


class CheckpointWriter(FileSystemWriter):
    """Writes this rank's tensors in the order of its plan, each file after the one before."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, per_thread_copy_ahead=0)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        for number, items in enumerate(_of_files(plan.items)):
            place = replace(plan.storage_data, prefix=f"{plan.storage_data.prefix}{number}_")
            results += super().write_data(replace(plan, items=items, storage_data=place), planner).wait()
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written


def _of_files(items: Iterable[WriteItem]) -> Iterator[list[WriteItem]]:
    """Divide the items of a plan into those of each file."""
    part: list[WriteItem] = []
    held = 0
    for item in items:
        size = item.tensor_storage_size() or 0
        if part and held + size > FILE_BYTES:
            yield part
            part, held = [], 0
        part.append(item)
        held += size
    if part:
        yield part

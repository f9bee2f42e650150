"""Parts of tensors as they lie in a checkpoint, next to what PyTorch reads from the same files."""

import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from qwen35_trainer.engines.fsdp.saved_weights import SavedWeights, WeightsUnreadable

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
WHOLE, NOTHING = slice(None), slice(2, 2)


def write(folder: Path, tensor: Tensor, *sizes: list[int], transposed: bool = False) -> None:
    """A checkpoint of `tensor` under the name "w", cut into pieces of these sizes along each dimension; each is written by
    a rank of its own, after something else.
    """
    (folder / "state").mkdir()
    pieces = {(0,) * tensor.dim(): tensor}
    for dimension, cuts in enumerate(sizes):
        pieces = {
            (*offsets[:dimension], sum(cuts[:i]), *offsets[dimension + 1 :]): part
            for offsets, piece in pieces.items()
            for i, part in enumerate(piece.split(cuts, dimension))
        }
    chunks, places = [], {}
    for rank, (offsets, piece) in enumerate(pieces.items()):
        chunks.append(ChunkStorageMetadata(torch.Size(offsets), piece.shape))
        stored = piece.T.contiguous().T if transposed else piece.clone(memory_format=torch.contiguous_format)
        with (folder / "state" / f"__{rank}_0.distcp").open("wb") as file:
            file.write(bytes(100 + rank))
            torch.save(stored, file)
            length = file.tell() - 100 - rank
        places[MetadataIndex("model.w", offsets)] = _StorageInfo(f"__{rank}_0.distcp", 100 + rank, length)
    entry = TensorStorageMetadata(TensorProperties(tensor.dtype), tensor.shape, chunks)
    (folder / "state" / ".metadata").write_bytes(pickle.dumps(Metadata({"model.w": entry}, storage_data=places)))


@pytest.mark.parametrize(
    ("shape", "sizes", "transposed"),
    [
        ((7, 6), [], False),
        ((7, 6), [[3, 3, 1]], False),
        ((7, 6), [[4, 3], [2, 4]], False),
        ((7, 6), [[4, 3], [2, 4]], True),
        ((7, 3, 6), [[2, 5]], False),
        ((7, 3, 6), [[7], [1, 2], [5, 1]], False),
        ((5,), [[3, 2]], False),
        ((), [], False),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_part_is_what_the_tensor_has_there_however_ranks_cut_it(tmp_path: Path, shape, sizes, transposed, dtype):
    tensor = torch.randn(shape).to(dtype)
    write(tmp_path, tensor, *sizes, transposed=transposed)
    pytorch = {"model.w": torch.empty_like(tensor)}
    dcp.load(pytorch, checkpoint_id=tmp_path / "state", no_dist=True)
    assert torch.equal(pytorch["model.w"], tensor)
    saved = SavedWeights(tmp_path)
    assert saved.shapes == {"w": tuple(shape)}
    for part in ((), (slice(1, 5),), (slice(4, 5),), (NOTHING,), (slice(3, 4), slice(1, 3)), (WHOLE, slice(0, 1))):
        if len(part) <= len(shape):
            read = saved.read("w", *part)
            assert read.dtype == dtype
            assert torch.equal(read, tensor[part]), part


def test_a_part_is_read_from_its_own_files_alone_and_a_lost_one_is_named(tmp_path: Path):
    tensor = torch.randn(5, 3)
    write(tmp_path, tensor, [3, 2])
    saved = SavedWeights(tmp_path)
    (tmp_path / "state" / "__1_0.distcp").unlink()
    assert torch.equal(saved.read("w", slice(0, 3)), tensor[:3])
    with pytest.raises(
        WeightsUnreadable, match=f"checkpoint {tmp_path} cannot be read .*__1_0.distcp.* Name an earlier one"
    ):
        saved.read("w", slice(2, 4))

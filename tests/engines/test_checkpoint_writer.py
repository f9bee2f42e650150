"""What the writer of checkpoints holds in host memory."""

import gc
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex

from qwen35_trainer.engines import checkpoint_writer
from qwen35_trainer.engines.checkpoint_writer import CheckpointWriter
from tests.live_bytes import LiveBytes

VALUES, TENSORS = 1 << 16, 20


class OnDevice(DefaultSavePlanner):
    """Copies each tensor when it is written, as from a device."""

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return super().lookup_object(index).clone()


@pytest.mark.torch
def test_a_save_holds_the_tensors_of_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 4 * VALUES
    monkeypatch.setattr(checkpoint_writer, "FILE_BYTES", 3 * size)
    state = {str(number): torch.full((VALUES,), float(number)) for number in range(TENSORS)}
    state["large"] = torch.ones(5 * VALUES)
    gc.collect()
    with LiveBytes() as live:
        dcp.save(state, storage_writer=CheckpointWriter(tmp_path), planner=OnDevice(), no_dist=True)
    assert live.maximum <= 6 * size
    assert len(list(tmp_path.glob("*.distcp"))) == 8, "seven of up to three tensors, and one of the large tensor"
    loaded = {name: torch.zeros_like(values) for name, values in state.items()}
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    assert all(torch.equal(loaded[name], values) for name, values in state.items())


@pytest.mark.torch
def test_a_rank_without_tensors_writes_nothing(tmp_path: Path) -> None:
    dcp.save({}, storage_writer=CheckpointWriter(tmp_path), no_dist=True)
    assert not list(tmp_path.glob("*.distcp"))

"""Checkpoints of weights and optimizer state, under the names of the published model and in the FSDP engine's format.

    weight and AdamW's moments of every parameter, in float32 ─► published tensors (`published_model`) ─► PyTorch's format
                                                                  a window at a time

A rank gathers one window of its tensors after another (`PublishedModel.windows`), while the tensors are written. In host
memory it holds the float32 values of one window, and of the file that is being written (`checkpoint_writer.py`): each has at
most `FILE_BYTES`, or is one larger parameter. On the device it gathers one parameter at a time. All of its tensors together
would take 12 bytes for each parameter that the rank publishes.

A checkpoint does not depend on the layout, so this engine can read the checkpoint with any layout (reshard). The FSDP
engine can read the checkpoint, too, if that engine trains all parameters with AdamW. `qwen35 export` can export it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import parallel_state
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.futures import Future

from qwen35_trainer.engines import checkpoint_writer
from qwen35_trainer.engines.checkpoint_writer import CheckpointWriter
from qwen35_trainer.engines.fsdp.saved_weights import SavedWeights
from qwen35_trainer.engines.megatron.optimizer import MOMENTS, WEIGHT, MegatronOptimizer
from qwen35_trainer.engines.megatron.published_model import PublishedModel
from qwen35_trainer.failure_reasons import FailureReason

_MODEL, _OPTIMIZER = "model.", "optimizer.state."
_STEPS = "step"
_NAMED_TENSORS = 5
"""Maximum number of tensors that an error names."""


class CheckpointDiffers(ValueError):
    """The checkpoint lacks a tensor that the engine needs, or has it in another shape.

    tensors: the names of these tensors.
    """

    failure = FailureReason.CHECKPOINT_UNUSABLE

    def __init__(self, folder: Path, tensors: Sequence[str]) -> None:
        self.folder, self.tensors = folder, tuple(tensors)
        super().__init__(folder, self.tensors)

    def __str__(self) -> str:
        rest = len(self.tensors) - _NAMED_TENSORS
        return (
            f"checkpoint {self.folder} lacks {', '.join(self.tensors[:_NAMED_TENSORS])}{f' and {rest} more' if rest > 0 else ''}: "
            "it was written with another optimizer (Muon), with frozen parameters (train.freeze), with LoRA (train.lora), "
            "without the head of train.multiTokenPrediction, or of another model. Continue it with the engine and the fields of the run that wrote it"
        )


def save(
    folder: Path, weights: PublishedModel, optimizer: MegatronOptimizer, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Write weights, AdamW's moments and the number of optimizer steps into `folder`, an existing folder.
    Collective. Returns when all ranks have written.

    shapes: name of a published tensor → its shape.
    """
    steps = torch.tensor(float(optimizer.steps))
    dist.all_reduce(steps, dist.ReduceOp.MAX)
    experts = DeviceMesh.from_group(parallel_state.get_expert_model_parallel_group(), "cpu")
    state: dict[str, Tensor] = {}
    for tensor in (WEIGHT, *MOMENTS):
        for name, shape in weights.published_here.items():
            outline: Tensor = torch.zeros(()).expand(shape)  # a single value: the values come while they are written
            if shape != shapes[name]:  # this rank's experts
                outline = DTensor.from_local(outline, experts, [Shard(0)], run_check=False)
            state[_key(name, tensor)] = outline
            state[_key(name, _STEPS)] = steps.cpu()
    values = _ValuesInWindows(_gathered(weights, optimizer))
    dcp.save(state, storage_writer=_Writer(folder / "state", values), planner=values)


class _ValuesInWindows(DefaultSavePlanner):
    """Plans a checkpoint from tensors of the right shape, and takes their values from windows when they are written.

    windows: the values by name, a window of the tensors after another. To take the next window is collective.
    """

    def __init__(self, windows: Iterator[dict[str, Tensor]]) -> None:
        super().__init__()
        self._windows = windows
        self._window: dict[str, Tensor] = {}

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        if index.fqn.endswith(f".{_STEPS}"):
            steps: Tensor = super().lookup_object(index)
            return steps
        while index.fqn not in self._window:
            self._window |= next(self._windows)
        return self._window.pop(index.fqn)

    def take_the_rest(self) -> None:
        """Take all windows that are left: other ranks may still need this rank to gather theirs."""
        for _ in self._windows:
            pass


class _Writer(CheckpointWriter):
    def __init__(self, folder: Path, values: _ValuesInWindows) -> None:
        super().__init__(folder)
        self._values = values

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        finally:  # also after an error, which `dcp.save` then reports on all ranks
            self._values.take_the_rest()


def _gathered(weights: PublishedModel, optimizer: MegatronOptimizer) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors that this rank saves, by name, a window at a time. Collective."""
    for tensor in (WEIGHT, *MOMENTS):
        for window in weights.windows(checkpoint_writer.FILE_BYTES // torch.float32.itemsize):
            parts = weights.publish(partial(optimizer.whole, name=tensor), window)
            yield {_key(part.name, tensor): part.values.cpu() for part in parts if part.values is not None}


def _key(name: str, tensor: str) -> str:
    """Return the name in the checkpoint of the weight, a moment or the number of steps of a published tensor."""
    return _MODEL + name if tensor == WEIGHT else f"{_OPTIMIZER}{name}.{tensor}"


def restore(
    folder: Path, weights: PublishedModel, optimizer: MegatronOptimizer, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Read a checkpoint that `save` or the FSDP engine wrote with any layout. Collective.

    shapes: name of a published tensor → its shape. Raises WeightsUnreadable if the checkpoint is damaged.
    Raises CheckpointDiffers, on every rank and before anything changes, if the checkpoint lacks the
    weight or a moment (AdamW) of a parameter, or has one of these tensors in another shape.
    """
    saved, state = SavedWeights(folder), SavedWeights(folder, _OPTIMIZER)
    if lacking := _lacking(saved.shapes, state.shapes, shapes):
        raise CheckpointDiffers(folder, lacking)
    steps = [float(state.read(name)) for name in state.shapes if name.endswith(f".{_STEPS}")]
    optimizer.prepare_state(int(max(steps, default=0)))

    def put(parameter: nn.Parameter, values: Tensor, *, name: str) -> None:
        optimizer.put(parameter, name, values)

    weights.load(saved.read, partial(put, name=WEIGHT))
    for moment in MOMENTS:

        def read(name: str, *slices: slice, moment: str = moment) -> Tensor:
            return state.read(f"{name}.{moment}", *slices)

        # With several copies of a model, a rank holds the moments of a part of its parameters. Reading those of all would
        # multiply what the storage has to deliver by the number of copies.
        weights.load(read, partial(put, name=moment), wanted=optimizer.holds_state_of)


def _lacking(
    weights: Mapping[str, tuple[int, ...]],
    state: Mapping[str, tuple[int, ...]],
    shapes: Mapping[str, tuple[int, ...]],
) -> list[str]:
    """Return the names of the weights and moments that a checkpoint lacks, or has in another shape than the model.

    weights, state: shapes of the saved tensors. shapes: shapes of the published tensors.
    """
    lacking = [name for name, shape in shapes.items() if weights.get(name) != shape]
    moments = {f"{name}.{moment}": shape for name, shape in shapes.items() for moment in MOMENTS}
    return lacking + [name for name, shape in moments.items() if state.get(name) != shape]

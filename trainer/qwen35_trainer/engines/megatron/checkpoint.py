"""Checkpoints of weights and optimizer state, under the names of the published model and in the FSDP engine's format.

    weight and AdamW's moments of every parameter, in float32 ─► published tensors (`published_model`) ─► PyTorch's format

A checkpoint does not depend on the layout, so this engine can read the checkpoint with any layout (reshard). The FSDP
engine can read the checkpoint, too, if that engine trains all parameters with AdamW. `qwen35 export` can export it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import parallel_state
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

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
    state: dict[str, Tensor] = {}
    steps = torch.tensor(float(optimizer.steps))
    dist.all_reduce(steps, dist.ReduceOp.MAX)
    experts = DeviceMesh.from_group(parallel_state.get_expert_model_parallel_group(), "cpu")
    for name in (WEIGHT, *MOMENTS):
        for part in weights.publish(partial(optimizer.whole, name=name)):
            if part.values is None:
                continue
            values = part.values.cpu()
            if values.numel() < _size(shapes[part.name]):  # this rank's experts
                values = DTensor.from_local(values, experts, [Shard(0)], run_check=False)
            if name == WEIGHT:
                state[_MODEL + part.name] = values
                state[f"{_OPTIMIZER}{part.name}.{_STEPS}"] = steps.cpu()
            else:
                state[f"{_OPTIMIZER}{part.name}.{name}"] = values
    dcp.save(state, checkpoint_id=folder / "state")


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

        weights.load(read, partial(put, name=moment))


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


def _size(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())

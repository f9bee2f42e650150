"""Sharded, asynchronous checkpoints of trained weights, optimizer state and random state, in PyTorch's distributed format.

    begin ─► copy to host memory (the optimizer may step now) ─► a thread writes ─► done: all ranks have written
        └─► no room for a copy: write immediately, one file after another (`checkpoint_writer.py`), and training waits

Another number of ranks can load a checkpoint: `restore` reshards it. The collectives of the writing thread have a
separate process group, because training runs collectives at the same time. In a shared group, the order of all these
collectives could differ between ranks. Frozen parameters are not saved; a restored run loads them from the source of
the model.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from qwen35_trainer.engines.checkpoint_writer import CheckpointWriter
from qwen35_trainer.free_memory import free_memory
from qwen35_trainer.models.qwen3_5 import HFModule

logger = logging.getLogger(__name__)

_SETTINGS = "param_groups."
"""Prefix of the names under which a flattened optimizer state lists the settings of each parameter."""
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True, ignore_frozen_params=True)


def begin(
    folder: Path,
    model: HFModule,
    optimizers: Sequence[torch.optim.Optimizer],
    rank: int,
    group: ProcessGroup,
) -> Future[Any]:
    """Begin to write this rank's part of model, optimizer state and random state into `folder`, an existing folder.
    Collective.

    group: a gloo process group that is used for nothing else. Returns a future that completes when all ranks have
    written. Its `result` raises an exception if writing failed on any rank; the folder is then unusable. If host memory
    has no room for a copy, the call returns only when all ranks have written.
    """
    weights, state = _state(model, optimizers)
    torch.save(_random_state(), folder / f"random-{rank}.pt")
    whole, place = {"model": weights, "optimizer": state}, folder / "state"
    if _room_for_copies(whole, group):
        saved = dcp.async_save(whole, checkpoint_id=place, process_group=group)
        assert isinstance(saved, Future)
        return saved
    logger.warning("no room for a copy of the checkpoint in memory: training waits until it is written")
    written: Future[Any] = Future()
    try:
        written.set_result(dcp.save(whole, storage_writer=CheckpointWriter(place), process_group=group))
    except (Exception, CheckpointException) as error:  # noqa: BLE001  # raised by `result`, like an error of the writing thread
        written.set_exception(error)
    return written


def restore(folder: Path, model: HFModule, optimizers: Sequence[torch.optim.Optimizer], rank: int) -> None:
    """Read a checkpoint that `begin` wrote on the same or another number of ranks (reshard). Collective.

    A rank that did not exist when the checkpoint was written keeps its current random state. Settings of the optimizers
    (parameter groups) are not restored, because the manifest may have changed them since.
    """
    weights, state = _state(model, optimizers)
    settings = {name: value for name, value in state.items() if name.startswith(_SETTINGS)}
    loaded: dict[str, Any] = {"model": weights, "optimizer": {name: state[name] for name in state.keys() - settings}}
    dcp.load(loaded, checkpoint_id=folder / "state")
    set_state_dict(
        model,
        list(optimizers),
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"] | settings,
        options=StateDictOptions(flatten_optimizer_state_dict=True, ignore_frozen_params=True, strict=False),
    )
    random = folder / f"random-{rank}.pt"
    if random.exists():
        _set_random_state(torch.load(random, weights_only=True))


def _state(model: HFModule, optimizers: Sequence[torch.optim.Optimizer]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return this rank's parts of the weights and of the optimizer state, by name."""
    if any(not optimizer.state for optimizer in optimizers):
        # PyTorch initialises the state by a step with zero gradients. Adam would count it in its bias correction.
        get_state_dict(model, list(optimizers), options=_OPTIONS)
        for state in (state for optimizer in optimizers for state in optimizer.state.values()):
            if "step" in state:
                state["step"].zero_()
    return get_state_dict(model, list(optimizers), options=_OPTIONS)


def _room_for_copies(state: dict[str, Any], group: ProcessGroup) -> bool:
    """Return whether each host can hold copies of `state` for all of its ranks in half of its free memory.

    Collective. All ranks get the same answer.
    """
    parts = (value for part in state.values() for value in part.values() if isinstance(value, Tensor))
    size = sum((part.to_local() if isinstance(part, DTensor) else part).nbytes for part in parts)
    ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(ranks, (socket.gethostname(), size, free_memory()), group=group)
    hosts = {host for host, _, _ in ranks}
    needed = {host: sum(size for where, size, _ in ranks if where == host) for host in hosts}
    return all(needed[host] <= free / 2 for host, _, free in ranks)


def _random_state() -> dict[str, Any]:
    accelerator = torch.accelerator.is_available()
    return {
        "host": torch.get_rng_state(),
        "device": torch.get_device_module().get_rng_state() if accelerator else None,
    }


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["host"])
    if state["device"] is not None and torch.accelerator.is_available():
        torch.get_device_module().set_rng_state(state["device"])

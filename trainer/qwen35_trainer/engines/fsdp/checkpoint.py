"""Weights, optimizer and random state on disk, through PyTorch's distributed checkpoint: it loads on any rank count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from qwen35_trainer.models.qwen3_5 import HFModule

_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


def save(folder: Path, model: HFModule, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """Write into `folder`, which exists. Collective. Raises what the storage raises; the folder is then worthless."""
    weights, state = _state(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / "state")
    torch.save(torch.get_rng_state(), folder / f"random-{rank}.pt")


def restore(folder: Path, model: HFModule, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """Read what `save` wrote. Collective. A rank that did not exist then keeps its own random state."""
    weights, state = _state(model, optimizer)
    loaded: dict[str, Any] = {"model": weights, "optimizer": state}
    dcp.load(loaded, checkpoint_id=folder / "state")
    set_state_dict(
        model,
        optimizer,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
        options=_OPTIONS,
    )
    random = folder / f"random-{rank}.pt"
    if random.exists():
        torch.set_rng_state(torch.load(random, weights_only=True))


def _state(model: HFModule, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """Weights and optimizer state by name, this rank's shares."""
    if not optimizer.state:
        # PyTorch fills an empty optimizer by a step of zero gradients. Adam would count it in its bias correction.
        get_state_dict(model, optimizer, options=_OPTIONS)
        for state in optimizer.state.values():
            state["step"].zero_()
    weights, named = get_state_dict(model, optimizer, options=_OPTIONS)
    return weights, named

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
    weights, state = get_state_dict(model, optimizer, options=_OPTIONS)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / "state")
    torch.save(torch.get_rng_state(), folder / f"random-{rank}.pt")


def restore(folder: Path, model: HFModule, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """Read what `save` wrote. Collective. A rank that did not exist then keeps its own random state."""
    weights, state = get_state_dict(model, optimizer, options=_OPTIONS)
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

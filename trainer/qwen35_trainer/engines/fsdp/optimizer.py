"""The optimizers (AdamW, Muon) of the trained parameters, and the device of the optimizer state between two steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from qwen35_trainer.engines.fsdp.muon import Muon
from qwen35_trainer.manifest import OptimizerSpec as Settings
from qwen35_trainer.models.qwen3_5 import HFModule
from qwen35_trainer.models.qwen3_5.family import text_model


class Optimizers:
    """All optimizers of one model.

    parking_device: the device that holds the optimizer state between two steps (offload); None: the
    devices of the parameters.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer], parking_device: torch.device | None) -> None:
        self.parts, self._parking_device = list(parts), parking_device

    @classmethod
    def of(cls, model: HFModule, settings: Settings, parking_device: torch.device | None = None) -> Optimizers:
        """Create the optimizers of all trained parameters.

        With `settings.type` Muon, the matrices of linear layers and experts get Muon, and all other parameters get
        AdamW (arXiv:1711.05101). Otherwise all parameters get AdamW. parking_device: the device that holds the optimizer
        state between two steps; None: the devices of the parameters. Raises ValueError if no parameter trains.
        """
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        if not trained:
            raise ValueError("spec.train.freeze: nothing is left to train; remove a part, or add lora")
        matrices = _matrices(model) if settings.type == "Muon" else []
        chosen = {id(matrix) for matrix in matrices}
        others = {name: parameter for name, parameter in trained.items() if id(parameter) not in chosen}
        parts: list[torch.optim.Optimizer] = []
        if matrices:
            parts.append(Muon(matrices, settings.learningRate, settings.momentum, settings.weightDecay))
        if others:
            parts.append(
                AdamW(
                    _groups(others, settings),
                    lr=settings.learningRate,
                    betas=(settings.beta1, settings.beta2),
                    eps=settings.epsilon,
                    fused=True,
                )
            )
        return cls(parts, parking_device)

    def step(self, learning_rate: float) -> None:
        """Update the parameters once with `learning_rate`, and drop the gradients. Collective."""
        self._move(None)
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = learning_rate
            part.step()
        self.zero_grad()
        self.park_state()

    @property
    def tensors(self) -> Iterator[Tensor]:
        """All tensors of the optimizer state."""
        states = (state for part in self.parts for state in part.state.values())
        return (value for state in states for value in state.values() if isinstance(value, Tensor))

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for part in self.parts:
            part.zero_grad()

    def park_state(self) -> None:
        """Move the optimizer state to `parking_device`. Without a parking device, do nothing."""
        self._move(self._parking_device)

    def _move(self, device: torch.device | None) -> None:
        """Move the optimizer state to `device`; None: to the devices of the parameters. Without a parking
        device, do nothing.
        """
        if self._parking_device is None:
            return
        for part in self.parts:
            for parameter, state in part.state.items():
                for name, value in state.items():
                    if isinstance(value, Tensor) and value.ndim:  # step counts stay
                        state[name] = value.to(device or parameter.device)


def decays(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies to a parameter if `decayAll` is not set.

    Parameters of one dimension are exempt, as in Megatron (`core/optimizer`, ParamPredicate "param_len_1"): weights of
    norms, biases, and A_log and dt_bias, which Mamba marks `_no_weight_decay`. The filters of short convolutions are
    exempt too: they have only four numbers per channel. Megatron decays them.
    """
    return parameter.ndim > 1 and not name.endswith("conv1d.weight")


def _groups(parameters: Mapping[str, nn.Parameter], settings: Settings) -> list[dict[str, Any]]:
    """Divide parameters into AdamW's groups with and without weight decay.

    All parameters of a group are on one mesh, because a fused step takes tensors of one mesh. Experts may be on a mesh of their own.
    """
    groups: dict[tuple[float, DeviceMesh | None], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        decay = settings.weightDecay if settings.decayAll or decays(name, parameter) else 0.0
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault((decay, mesh), []).append(parameter)
    return [{"params": members, "weight_decay": decay} for (decay, _), members in groups.items()]


def _matrices(model: HFModule) -> list[nn.Parameter]:
    """Return the parameters that Muon trains: the trained weights of linear layers and experts.

    Embeddings and the output layer are left out, because they are tables with one vector per token.
    """
    layers = [text_model(model).layers]
    if hasattr(model.model, "visual"):
        layers.append(model.model.visual.blocks)
    matrices = []
    for module in (module for part in layers for module in part.modules()):
        linear = isinstance(module, nn.Linear)
        for name, parameter in module.named_parameters(recurse=False):
            expert = name in ("gate_up_proj", "down_proj") and parameter.ndim == 3
            if parameter.requires_grad and (expert or (linear and parameter.ndim == 2)):
                matrices.append(parameter)
    return matrices

"""Keeps tensors of a rank in host memory while the rank does not need them (`spec.train.offload`).

                       trained model   reference model   gradients   float32 weights   moments
start                  device          host              host        device            –
score (trained)        device          host              –           host              host
score (reference)      host            device            –           host              host
forward and backward   device          host              device      host              host
optimizer step         device          host              device      device            those of one group of parameters
publication            device          host              –           host              host
save, restore          device          host              –           device            device

Each row is a phase of training, and each column a part of the rank's tensors. At the start, each part leaves the device before
the next one is built there: the reference model before the trained model, and the gradients before the optimizer. To score is to compute the log-probs of
tokens, with the trained model or with the reference model. The moments are AdamW's. When a phase begins, the parts that
it needs move to the device, and all other parts move to host memory. Gradients have values only within an update, so
their memory is given back without a copy. Everything else is copied to pinned memory, which is allocated once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from qwen35_trainer.weights.host_blocks import HostBlocks
from qwen35_trainer.weights.parked_tensors import ParkedTensors

TRAINED, REFERENCE, GRADIENTS, WEIGHTS = "trained model", "reference model", "gradients", "float32 weights"
"""Parts of a rank's tensors. The moments of each group of parameters are a part, too (`moments`)."""


def moments(group: int) -> str:
    """Return the name of the part of an `Offload` that has AdamW's moments of a group of parameters."""
    return f"moments {group}"


class Offload:
    """The parts of a rank's tensors that are in host memory while they are not needed.

    blocks: the host memory. Tensors outside of all parts stay on the device.
    """

    def __init__(self, device: torch.device, blocks: HostBlocks) -> None:
        self._device, self._blocks = device, blocks
        self._parts: dict[str, Callable[[], Iterable[Tensor]]] = {}
        self._parked: dict[str, ParkedTensors] = {}

    def add(self, part: str, tensors: Callable[[], Iterable[Tensor]]) -> None:
        """Add a part, which stays on the device until it is not needed.

        tensors: returns the part's tensors. It is called when the part moves, because the optimizer creates its tensors only in
          its first step.
        """
        self._parts[part] = tensors

    def need(self, *needed: str) -> None:
        """Move the parts whose names are in `needed` to the device, and all other parts to host memory."""
        for part, tensors in self._parts.items():
            if part not in needed and part not in self._parked:
                keep = part != GRADIENTS
                self._parked[part] = ParkedTensors(
                    tensors(), self._device, keep_values=keep, blocks=self._blocks, for_others=False
                )
        for part in needed:
            if part in self._parked:
                self._parked.pop(part).restore()

"""The adapter (LoRA) with which an engine core of vLLM generates all sequences.

    CoreSettings.lora ─► build_core: vLLM's engine with one place for an adapter
    a version         ─► check ─► replace ─► the tensors in that place (vllm_adapter_worker.py)
    each sequence     ─► request: vLLM generates it with the adapter in that place

Without this file, vLLM would load the adapter of each version from files, under a different number, and a sequence
would keep the adapter that it started with. Here all versions have the same number, and their tensors are replaced
between two steps, so that running sequences continue with the new version, as they do with whole weights.

vLLM computes with B in bfloat16 and without a scale, so B is multiplied by the scale in float32 and then rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from qwen35_trainer.manifest import LoRASpec
from qwen35_trainer.models.adapted_linear import target_layers
from qwen35_trainer.models.qwen3_5 import classes
from qwen35_trainer.models.qwen3_5.classes import HFConfig
from qwen35_trainer.models.qwen3_5.hub_tensors import NamedTensor
from qwen35_trainer.rollout.vllm_adapter_worker import ADAPTER_NUMBER, hold_adapters, put_adapters_in_place
from qwen35_trainer.rollout.vllm_core import REPLACEMENT_SECONDS, Core, portions
from qwen35_trainer.weights.adapters import DOWN, SCALE, UP
from qwen35_trainer.weights.fit import check_shapes, check_types


class AdapterSlot:
    """The memory for one adapter in an engine core that was built with `CoreSettings.lora`.

    core: from `build_core`. config: the configuration of the trainer's model. lora: the trainer's settings of
    the adapters.
    """

    def __init__(self, core: Core, config: HFConfig, lora: LoRASpec) -> None:
        self._core = core
        self._shapes: dict[str, tuple[int, ...]] = {SCALE: ()}
        for name, layer in target_layers(classes.without_weights(config), lora.targets).items():
            out, into = layer.weight.shape
            self._shapes |= {f"{name}.{DOWN}": (lora.rank, into), f"{name}.{UP}": (out, lora.rank)}

    @property
    def request(self) -> Any:  # noqa: ANN401  # vLLM's LoRARequest
        """The reference to the adapter (LoRARequest) that each request to vLLM needs.

        vLLM requires a path in the reference, but reads nothing from there.
        """
        from vllm.lora.request import LoRARequest

        return LoRARequest("trained", ADAPTER_NUMBER, "none")

    def check(self, adapters: Mapping[str, Tensor], version: int) -> None:
        """Raise ValueError, naming the tensors, if `adapters` does not fit the model.

        No tensor may be missing, unexpected or of another shape, and all must hold floating-point numbers. version:
        version of the adapters, for the error.
        """
        check_shapes(self._shapes, adapters, version)
        check_types(adapters, version)

    def replace(self, adapters: Mapping[str, Tensor]) -> None:
        """Replace the adapter in place between two steps.

        Running sequences keep their state, and continue with the new adapter. adapters: tensors that `check` has
        accepted. Raises ValueError, naming the layers, if vLLM cannot adapt some layers.
        """
        in_process = self._core.vllm_config.parallel_config.world_size == 1
        scaled = self._scaled(adapters)
        for portion in (list(scaled),) if in_process else portions(scaled):
            self._call(hold_adapters, portion)
        refused = self._call(put_adapters_in_place)
        if names := sorted({name for of_worker in refused for name in of_worker}):
            raise ValueError(f"vLLM has no place for adapters of its layers {names}")

    def _scaled(self, adapters: Mapping[str, Tensor]) -> Iterator[NamedTensor]:
        """Yield the matrices A, and the matrices B multiplied by the scale, of all layers, in bfloat16."""
        scale = adapters[SCALE].item()
        for name, tensor in adapters.items():
            if name != SCALE:
                yield name, (tensor.float() * scale if name.endswith(UP) else tensor).to(torch.bfloat16)

    def _call(self, function: Any, *arguments: Any) -> Sequence[Any]:  # noqa: ANN401  # of any worker function
        answers: Sequence[Any] = self._core.collective_rpc(function, timeout=REPLACEMENT_SECONDS, args=arguments)
        return answers

"""Functions that run in the processes of vLLM's workers, between two steps, and replace the adapter (LoRA) of the model.

    AdapterSlot.replace ─► hold_adapters … ─► put_adapters_in_place

The first argument of each function is the worker, as in vllm_worker.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qwen35_trainer.models.qwen3_5.hub_tensors import NamedTensor
from qwen35_trainer.rollout.vllm_versions import adapter_name_mapper, weight_name
from qwen35_trainer.rollout.vllm_worker import Worker, model_type
from qwen35_trainer.weights.adapters import DOWN

ADAPTER_NUMBER = 1
"""The number by which vLLM identifies the adapter. All versions use the same number."""
HELD = "_qwen35_adapters"
"""Name of a worker's attribute: tensors of the adapter for `put_adapters_in_place`, by the trainer's names."""


def hold_adapters(worker: Worker, adapters: Sequence[NamedTensor]) -> None:
    """Keep tensors of an adapter in the worker for `put_adapters_in_place`. Repeated calls add tensors.

    adapters: whole matrices A, and whole matrices B multiplied by the scale, in bfloat16.
    """
    setattr(worker, HELD, getattr(worker, HELD, {}) | dict(adapters))


def put_adapters_in_place(worker: Worker) -> list[str]:
    """Replace the adapter of the model by the tensors that `hold_adapters` has kept in the worker.

    Returns the layers that vLLM cannot adapt, by vLLM's names.

    vLLM joins the matrices of layers that it computes as one (q_proj, k_proj and v_proj). On each device it keeps only
    the part of the matrices with which that device computes.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    held: dict[str, Any] = getattr(worker, HELD)
    delattr(worker, HELD)
    manager = worker.model_runner.lora_manager._adapter_manager  # vLLM gives no other access to it
    kind = model_type(worker)
    rank = next(tensor.shape[0] for name, tensor in held.items() if name.endswith(DOWN))
    adapter = LoRAModel.from_lora_tensors(
        ADAPTER_NUMBER,
        {f"base_model.model.{weight_name(name, kind)}.weight": tensor for name, tensor in held.items()},
        # alpha / rank is 1, because B has the scale already.
        PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),
        device="cpu",
        weights_mapper=adapter_name_mapper(manager.model),
    )
    manager.remove_adapter(ADAPTER_NUMBER)
    manager.add_adapter(adapter)
    manager.activate_adapter(ADAPTER_NUMBER)
    return sorted(adapter.loras.keys() - manager.modules.keys())

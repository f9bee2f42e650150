"""A model sharded over the data-parallel ranks: every decoder layer on its own, then what is left."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from qwen35_trainer.models.qwen3_5 import HFModule
from qwen35_trainer.spec import Train


def shard(model: HFModule, ranks: int, device: torch.device, precision: torch.dtype, train: Train) -> HFModule:
    """Shard `model` in place: parameters and optimizer in float32, computation in `precision`, reduction in float32."""
    if train.activationCheckpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("data",))
    mixed = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)
    # Pinned memory needs an accelerator: on a CPU the default of this policy fails.
    offload = CPUOffloadPolicy(pin_memory=device.type != "cpu") if train.offload.parameters else OffloadPolicy()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=mixed, offload_policy=offload)
    fully_shard(model, mesh=mesh, mp_policy=mixed, offload_policy=offload)
    return model

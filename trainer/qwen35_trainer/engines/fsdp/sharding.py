"""A model sharded over the ranks: every layer on its own, then what is left.

    world = replicas × shard: each copy of the model is cut over `shard` ranks, and copies add up their gradients (HSDP)
    world = data × sequence:  each of `data` groups of ranks has samples of its own, shared by its `sequence` ranks

Neighbouring ranks share a sequence, so that its exchanges stay within a node. The two views are of the same ranks:
parameters are cut over all of a copy's ranks, whatever samples they have.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from qwen35_trainer.models.qwen3_5 import HFModule
from qwen35_trainer.models.qwen3_5.precision import keeps_float32
from qwen35_trainer.spec import Parallelism, Train


@dataclass(frozen=True)
class Ranks:
    """One rank among all of them."""

    rank: int
    world: int
    mesh: DeviceMesh
    """(shard,) or (replica, shard)."""
    sequence: ProcessGroup | None
    """Ranks that share each sequence; None: this one has its own."""
    data: int
    """Groups of ranks that have samples of their own."""

    @property
    def share(self) -> int:
        """Which of the `data` shares of a batch this rank computes."""
        return self.rank // (self.world // self.data)

    @property
    def counts(self) -> bool:
        """Whether this rank speaks for those that share its sequences: sums over ranks count each sample once."""
        return self.sequence is None or self.sequence.rank() == 0

    @classmethod
    def of(cls, parallelism: Parallelism, device: torch.device, timeout: timedelta) -> Ranks:
        """Of the initialised process group. Raises ValueError where it does not divide. Collective.

        timeout: of each exchange in the groups that are made here. That of the whole group came with it.
        """
        world, copies, context = dist.get_world_size(), parallelism.replicas, parallelism.context
        if world % (copies * context):
            raise ValueError(
                f"spec.train.parallelism: replicas {copies} × context {context} does not divide {world} ranks; "
                "use degrees that do"
            )
        if copies == 1:
            mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
        else:
            mesh = init_device_mesh(device.type, (copies, world // copies), mesh_dim_names=("replica", "shard"))
            _limit(mesh, timeout)
        sequence = None
        if context > 1:
            both = init_device_mesh(device.type, (world // context, context), mesh_dim_names=("data", "sequence"))
            _limit(both, timeout)
            sequence = both["sequence"].get_group()
        return cls(dist.get_rank(), world, mesh, sequence, world // context)


def _limit(mesh: DeviceMesh, timeout: timedelta) -> None:
    """Set the time-out of the mesh's groups, which PyTorch makes with its own default, as TorchTitan does."""
    for group in mesh.get_all_groups():
        dist.distributed_c10d._set_pg_timeout(timeout, group)


def shard(model: HFModule, mesh: DeviceMesh, precision: torch.dtype, train: Train) -> HFModule:
    """Shard `model` in place; it may be on the meta device.

    Parameters keep their type, computation is in `precision`, and in float32 where `keeps_float32` says so; gradients are
    reduced in float32. Raises ValueError where the model names no layer that it has.
    """
    if train.activationCheckpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    mixed = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)
    # What comes into a layer has the type that the layers before gave it; the vision tower's rotary tables stay float32.
    inner = replace(mixed, cast_forward_inputs=False)
    # Pinned memory needs an accelerator: on a CPU the default of this policy fails.
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if train.offload.parameters else OffloadPolicy()
    # FSDP computes with all parameters of a module in one type, so a Gated DeltaNet is in two groups: its float32 vectors
    # are one of their own, and its matrices stay with the rest of the layer. A float32 model needs no such groups.
    apart = precision != torch.float32
    exact = {parameter for name, parameter in model.named_parameters() if apart and keeps_float32(name)}
    for module in layers(model):
        fully_shard(module, mesh=mesh, mp_policy=inner, offload_policy=offload, ignored_params=exact)
    float32 = replace(inner, param_dtype=torch.float32)
    for module in [module for name, module in model.named_modules() if apart and name.endswith(".linear_attn")]:
        rest = set(module.parameters()) - exact
        fully_shard(module, mesh=mesh, mp_policy=float32, offload_policy=offload, ignored_params=rest)
    fully_shard(model, mesh=mesh, mp_policy=mixed, offload_policy=offload)
    return model


def layers(model: HFModule) -> list[nn.Module]:
    """The modules that are gathered as one, innermost first: what the model says must not be split, and its experts.

    A list of names (`_no_split_modules`) outlives the classes that it names; those that the model lacks are skipped.
    Experts are most of a layer: gathered on their own, they come while attention computes.
    """
    names = set(model._no_split_modules or ())
    found = [module for module in model.modules() if type(module).__name__ in names]
    if not found:
        raise ValueError(
            f"{type(model).__name__}: no module is of a class in _no_split_modules {sorted(names)}; name the class of "
            "its layers there"
        )
    experts = [part for module in found for name, part in module.named_modules() if name.endswith(".experts")]
    return [*experts, *found]

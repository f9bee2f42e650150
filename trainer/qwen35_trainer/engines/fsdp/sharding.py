"""Shard a model over the ranks with FSDP2: each layer as a unit, then the remaining parameters together.

    ranks = copies × shard             each copy of the model is sharded over `shard` ranks, and copies sum their gradients (HSDP)
    ranks = data × context             each of `data` groups of ranks has its own samples; its `context` ranks share every sequence
    ranks = copies × shard × expert    of experts only: `expert` ranks divide the experts of a layer, and `shard` ranks shard each
                                       part (`expert_mesh.py`)

All lines divide the same ranks: parameters are sharded over all ranks of a copy, whichever samples these ranks have.
Neighbouring ranks share a sequence or the experts of a layer, so that the exchanges between them stay within a node.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from qwen35_trainer.engines.batch_ranks import BatchRanks
from qwen35_trainer.engines.fsdp.expert_mesh import ExpertMesh, expert_modules
from qwen35_trainer.engines.fsdp.group_timeouts import limit
from qwen35_trainer.manifest import ParallelismSpec, TrainSpec
from qwen35_trainer.models.qwen3_5 import HFModule
from qwen35_trainer.models.qwen3_5.precision import keeps_float32


@dataclass(frozen=True)
class Ranks(BatchRanks):
    """The number of this rank, and the groups of ranks over which parameters and sequences are divided."""

    rank: int
    world: int
    mesh: DeviceMesh
    """Mesh over which parameters are sharded: (shard,), or (copy, shard) if there are several copies of the model."""
    experts: ExpertMesh | None
    """Meshes over which experts are divided and sharded; None: like all other parameters."""
    context_group: ProcessGroup | None
    """Ranks that share each sequence; None: no context parallelism."""
    data_shares: int
    """Number of shares into which a batch is divided. The ranks that share a sequence compute the same share."""

    @property
    def data_share(self) -> int:
        """Index of the share of a batch that this rank computes."""
        return self.rank // (self.world // self.data_shares)

    @property
    def adds_to_sums(self) -> bool:
        """Whether this rank adds its values to sums over ranks.

        The ranks of a context group hold the same samples, so only the first rank of the group adds its values.
        """
        return self.context_group is None or self.context_group.rank() == 0

    @classmethod
    def of(cls, parallelism: ParallelismSpec, device: torch.device, timeout: timedelta) -> Ranks:
        """Create the device meshes from the initialised process group. Collective.

        timeout: the maximum time of a collective in the groups that are created here. The group of all ranks keeps its
        time-out. Raises ValueError if the degrees of parallelism do not divide the number of ranks.
        """
        world, copies, context = dist.get_world_size(), parallelism.copies, parallelism.context
        for name, degree in (("context", context), ("expert", parallelism.expert)):
            if world % (copies * degree):
                raise ValueError(
                    f"spec.train.parallelism: copies {copies} × {name} {degree} does not divide {world} ranks; "
                    "use degrees that do"
                )
        if copies == 1:
            mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
        else:
            mesh = init_device_mesh(device.type, (copies, world // copies), mesh_dim_names=("copy", "shard"))
            limit(mesh, timeout)
        experts, context_group = ExpertMesh.of(parallelism, device, timeout), None
        if context > 1:
            both = init_device_mesh(device.type, (world // context, context), mesh_dim_names=("data", "context"))
            limit(both, timeout)
            context_group = both["context"].get_group()
        return cls(dist.get_rank(), world, mesh, experts, context_group, world // context)


def shard(model: HFModule, ranks: Ranks, precision: torch.dtype, train: TrainSpec) -> HFModule:
    """Shard `model` in place, and return it. The model may be on the meta device.

    With an expert mesh, experts are divided over it first, and the expert modules exchange tokens. Parameters keep their type. The model computes in `precision`, except that parameters which `keeps_float32` selects
    are used in float32. Gradients are reduced in float32. Raises ValueError if the model contains no module of a class
    in its `_no_split_modules`, or if the expert mesh does not divide its experts.
    """
    mesh, experts = ranks.mesh, ranks.experts
    if experts is not None:
        experts.divide(model)
    if train.activationCheckpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if train.offload.activations:
        _offload_inputs(model, mesh.device_type)
    mixed = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)
    # The inputs of a layer keep the type of the previous layer's outputs; the vision tower's rotary tables stay float32.
    inner = replace(mixed, cast_forward_inputs=False)
    # Pinned memory needs an accelerator: on a CPU the default of this policy fails.
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if train.offload.parameters else OffloadPolicy()
    # FSDP computes with all parameters of a module in one type, so a Gated DeltaNet has two groups: one of its float32
    # vectors, and its matrices with the rest of the layer. A float32 model needs one group only.
    mixed_types = precision != torch.float32
    exact = {parameter for name, parameter in model.named_parameters() if mixed_types and keeps_float32(name)}
    frees = train.reshardAfterForward
    of_experts = set(expert_modules(model))
    for module in layers(model):
        fully_shard(
            module,
            mesh=mesh if experts is None or module not in of_experts else experts.shard,
            reshard_after_forward=frees,
            mp_policy=inner,
            offload_policy=offload,
            ignored_params=exact,
        )
    float32 = replace(inner, param_dtype=torch.float32)
    for module in [module for name, module in model.named_modules() if mixed_types and name.endswith(".linear_attn")]:
        rest = set(module.parameters()) - exact
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=frees,
            mp_policy=float32,
            offload_policy=offload,
            ignored_params=rest,
        )
    fully_shard(model, mesh=mesh, mp_policy=mixed, offload_policy=offload)
    if experts is not None:
        experts.count_gradients_once(model)
    return model


def _offload_inputs(model: HFModule, device_type: str) -> None:
    """Keep the saved inputs of layers that are computed again in host memory between their two passes.

    The library calls a function of each such layer that saves its inputs and computes the layer. What the layer itself
    saves is not kept at all, so the function may save everything on the host.
    """
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module._gradient_checkpointing_func = _saving_on_host(module._gradient_checkpointing_func, device_type)


def _saving_on_host[**P, R](checkpoint: Callable[P, R], device_type: str) -> Callable[P, R]:
    def run(*arguments: P.args, **named: P.kwargs) -> R:
        # Pinned memory needs an accelerator. On a CPU the inputs stay where they are.
        with save_on_cpu(pin_memory=device_type != "cpu", device_type=device_type):
            return checkpoint(*arguments, **named)

    return run


def free_gathered(model: HFModule) -> None:
    """Free the gathered parameters of all units, as a backward pass does, after forward passes without one.

    FSDP also records the units of each forward pass, for its prefetches in the backward pass, which empties these lists. The
    lists of a model that is only scored, such as the reference model, would grow without limit, so they are emptied here.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
            state = module._get_fsdp_state()
            # `reset_iter_state`, which does this too, is missing in PyTorch 2.11, and fails before the first forward pass.
            getattr(state._comm_ctx, "post_forward_order", []).clear()
            if state._fsdp_param_group is not None:
                state._fsdp_param_group._post_forward_indices.clear()


def layers(model: HFModule) -> list[nn.Module]:
    """Return the modules whose parameters FSDP gathers as a unit: experts, then the modules of the
    classes in `_no_split_modules`.

    Experts hold most parameters of a layer. They are gathered separately, so that the all-gather overlaps with
    the computation of attention. Classes of which the model has no module are skipped. Raises ValueError if the
    model has no module of any class in `_no_split_modules`.
    """
    names = set(model._no_split_modules or ())
    units = [module for module in model.modules() if type(module).__name__ in names]
    if not units:
        raise ValueError(
            f"{type(model).__name__}: no module is of a class in _no_split_modules {sorted(names)}; name the class of "
            "its layers there"
        )
    experts = [part for module in units for name, part in module.named_modules() if name.endswith(".experts")]
    return [*experts, *units]

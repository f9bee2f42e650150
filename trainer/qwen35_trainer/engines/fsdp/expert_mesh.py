"""The ranks that divide the experts of each layer (expert parallelism), and those that shard the same experts.

Two experts per rank, `parallelism.expert` 2, on 4 ranks of one copy of the model. Each row of experts is stored in the part that
one rank holds; all other parameters are sharded by rows over all 4 ranks:

                              expert mesh ──►
                              rank 0              rank 1
    experts sharded           experts 0 1         experts 4 5
    over these ranks    │     rank 2              rank 3
                        ▼     experts 2 3         experts 6 7

To compute, ranks 0 and 2 gather experts 0 to 3, and ranks 1 and 3 gather experts 4 to 7. No rank gathers all experts of a layer. Tokens
travel along the expert mesh: between ranks 0 and 1, and between ranks 2 and 3 (`models/qwen3_5/expert_parallel.py`). The
ranks of an expert mesh are neighbours, so that tokens stay within a node. With several copies of the model (HSDP) each copy is
divided like this, and copies sum their gradients.

An expert is a DTensor on the mesh (shard, expert) or (copy, shard, expert): FSDP2 shards what a rank has of the expert mesh.
Every rank still holds consecutive rows of the whole tensor, so loading, checkpoints and publications treat it like any other
parameter.

The gradient of an expert contains the tokens of all ranks of the expert mesh. FSDP2 would average it over the ranks that shard it, which
are fewer than all ranks by the factor `expert`; it divides by the number of all ranks instead, as for every other parameter
(TorchTitan, `models/llama4/infra/parallelize.py`, `set_gradient_divide_factor`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from qwen35_trainer.engines.fsdp.group_timeouts import limit
from qwen35_trainer.manifest import ParallelismSpec
from qwen35_trainer.manifest.layout import expert_problem
from qwen35_trainer.models.qwen3_5 import HFModule, expert_parallel
from qwen35_trainer.models.qwen3_5.family import text_config, text_model


@dataclass(frozen=True)
class ExpertMesh:
    """The groups of ranks over which the experts of a layer are divided and sharded."""

    expert: DeviceMesh
    """(expert,): ranks that divide the experts. Tokens travel between them."""
    shard: DeviceMesh
    """Mesh over which FSDP shards the experts of a rank: (shard,), or (copy, shard) if there are several copies."""

    @classmethod
    def of(cls, parallelism: ParallelismSpec, device: torch.device, timeout: timedelta) -> ExpertMesh | None:
        """Create the meshes of this rank; None if `parallelism.expert` is 1. Collective.

        timeout: the maximum time of a collective in the groups of the meshes.
        """
        copies, expert, world = parallelism.copies, parallelism.expert, dist.get_world_size()
        if expert == 1:
            return None
        sizes = {"shard": world // copies // expert, "expert": expert}
        if copies > 1:
            sizes = {"copy": copies, **sizes}
        whole = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        limit(whole, timeout)
        return cls(whole["expert"], whole["shard"] if copies == 1 else whole["copy", "shard"])

    def divide(self, model: HFModule) -> None:
        """Replace the experts of `model` by those of this rank's place in the expert mesh, and let tokens travel to them.

        The model is not sharded yet, and may be on the meta device. Raises ValueError if the model has no experts, or a
        number that the mesh does not divide.
        """
        experts = getattr(text_config(model), "num_experts", 0)
        if problem := expert_problem(self.expert.size(), experts):
            raise ValueError(f"{problem.path}: {problem.message} {problem.fix}")
        count, place = experts // self.expert.size(), self.expert.get_local_rank()
        for module in expert_modules(model):
            for name, parameter in list(module.named_parameters(recurse=False)):
                own = parameter.detach()[place * count : (place + 1) * count]
                if not own.is_meta:
                    own = own.to(self.expert.device_type, copy=True)  # a view would keep all experts in memory
                divided = DTensor.from_local(own, self.expert, [Shard(0)], run_check=False)
                setattr(module, name, nn.Parameter(divided, requires_grad=parameter.requires_grad))
            expert_parallel.divide(module, self.expert.get_group())

    def count_gradients_once(self, model: HFModule) -> None:
        """Let FSDP divide the sum of the experts' gradients by the number of all ranks. The model is already sharded."""
        for module in expert_modules(model):
            assert isinstance(module, FSDPModule)
            module.set_gradient_divide_factor(float(dist.get_world_size()))
            if self.shard.size(self.shard.ndim - 1) > 1:
                # gloo has no operation that multiplies before it sums, so the sum is divided afterwards. Where one rank holds all experts
                # of a part, nothing is summed, and PyTorch 2.13 would divide twice (`_fsdp_collectives.foreach_reduce`).
                module.set_force_sum_reduction_for_comms(True)


def expert_modules(model: HFModule) -> Iterator[HFModule]:
    """Return the modules that hold the experts of a layer. The iterator is empty for a dense model."""
    return (module for name, module in text_model(model).layers.named_modules() if name.endswith(".experts"))

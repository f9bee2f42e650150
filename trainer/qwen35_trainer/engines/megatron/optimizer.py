"""megatron-core's distributed optimizer: AdamW, whose state is sharded.

The float32 weights and the moments of a parameter are divided over the ranks that have the same parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from qwen35_trainer.engines.megatron.grouped_step import groups_of, step_by_groups
from qwen35_trainer.engines.megatron.model import StageModel
from qwen35_trainer.manifest import OptimizerSpec

WEIGHT, MOMENTS = "param", ("exp_avg", "exp_avg_sq")
"""Names of the tensors that the optimizer holds for a parameter: the float32 weight, and Adam's moments."""


def with_gradient_buffers(stage: StageModel) -> DistributedDataParallel:
    """Wrap a pipeline stage so that it has float32 buffers for its gradients and sums the gradients over
    data-parallel ranks. Collective.
    """
    settings = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    return DistributedDataParallel(stage.config, settings, stage)


def gradients_of(stages: Iterable[DistributedDataParallel]) -> Iterator[Tensor]:
    """Yield the buffers of all gradients of pipeline stages."""
    for stage in stages:
        yield from (buffer.grad_data for buffer in (*stage.buffers, *stage.expert_parallel_buffers))


class MegatronOptimizer:
    """The optimizer of all parameters that this rank holds."""

    def __init__(self, stages: Sequence[DistributedDataParallel], settings: OptimizerSpec, *, bfloat16: bool) -> None:
        self._stages = list(stages)
        config = OptimizerConfig(
            optimizer="adam",
            lr=settings.learningRate,
            weight_decay=settings.weightDecay,
            adam_beta1=settings.beta1,
            adam_beta2=settings.beta2,
            adam_eps=settings.epsilon,
            clip_grad=settings.gradientClip,
            bf16=bfloat16,
            params_dtype=torch.bfloat16 if bfloat16 else torch.float32,
            use_distributed_optimizer=True,
        )
        exempt = ParamWithNamePredicate("exempt from decay", lambda parameter, name: not _decays(parameter, name))
        overrides = {} if settings.decayAll else {ParamKey(with_name_predicate=exempt): {"wd_mult": 0.0}}
        self._optimizer = get_megatron_optimizer(
            config, self._stages, config_overrides=overrides, use_gloo_process_groups=False
        )
        for part in self._parts:
            _use_fused_kernel(part)
        self._shards = {parameter: (part, weight) for part in self._parts for parameter, weight in _shards(part)}
        self._groups = [(part, group) for part in self._parts for group in _groups(part)]

    def step_by_groups(self, begin: Callable[[int], None]) -> None:
        """Make every later `step` update one group of parameters after another.

        begin: called with the number of each group, before the group's parameters are updated.
        """
        for part in (each for each in self._parts if not each.is_stub_optimizer):
            groups = {number: group for number, (owner, group) in enumerate(self._groups) if owner is part}
            part.optimizer.step = partial(step_by_groups, part.optimizer, part.optimizer.step, groups, begin)

    def zero_grad(self) -> None:
        """Set the gradients to zero."""
        for stage in self._stages:
            stage.zero_grad_buffer()
        self._optimizer.zero_grad()

    def step(self, learning_rate: float) -> float:
        """Clip the gradient, and update the parameters if the gradient's norm is finite. Collective.

        Returns the norm before clipping, the same on every rank.
        """
        self._optimizer.prepare_grads()
        norm = float(self._optimizer.get_grad_norm())
        if not math.isfinite(norm):
            return norm
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
            group["weight_decay"] = self._optimizer.config.weight_decay * group["wd_mult"]
        self._optimizer.step()
        return norm

    @property
    def steps(self) -> int:
        """Number of steps that the optimizer has made, including those before a checkpoint was restored."""
        return max((int(count.get("step", 0)) for part in self._parts for count in _counts(part)), default=0)

    def whole(self, parameter: nn.Parameter, name: str) -> Tensor:
        """Return a tensor that the optimizer holds for a parameter, in the parameter's shape and
        in float32. Collective.

        name: WEIGHT or one of MOMENTS. Every rank that has the parameter gets the whole tensor. AdamW's
        moments are 0 before the first step.
        """
        values = torch.zeros_like(parameter, dtype=torch.float32)
        if (own := self._own(parameter)) is not None:
            held, tensors = own
            if name in tensors:
                values.view(-1)[held] = tensors[name].float()
        dist.all_reduce(values, group=copies_of(parameter))
        return values

    def holds_state_of(self, parameter: nn.Parameter) -> bool:
        """Return whether this rank holds optimizer state of a parameter, or of a part of it."""
        return self._own(parameter) is not None

    @torch.no_grad()
    def put(self, parameter: nn.Parameter, name: str, values: Tensor) -> None:
        """Set a tensor that the optimizer holds for a parameter. With WEIGHT, set the parameter, too.

        name: WEIGHT or one of MOMENTS. values: in the shape of the parameter.
        """
        if name == WEIGHT:
            parameter.copy_(values)
        if (own := self._own(parameter)) is not None:
            held, tensors = own
            tensors[name].copy_(values.reshape(-1)[held])

    def prepare_state(self, steps: int) -> None:
        """Create AdamW's moments of all parameters, and set the number of steps that the optimizer has made."""
        for part in self._parts:
            if part.is_stub_optimizer:
                continue
            part.init_state_fn(part.optimizer, part.config)
            if not _counts_by_parameter(part):
                for count in _counts(part):
                    count["step"] = steps
                continue
            for weight, state in part.optimizer.state.items():
                state["step"] = torch.tensor(float(steps), device=weight.device)  # where the fused kernel counts

    @property
    def gradients(self) -> Iterator[Tensor]:
        """The buffers of all gradients."""
        return gradients_of(self._stages)

    @property
    def weights(self) -> Iterator[Tensor]:
        """The float32 copies of parameters that are stored in another type. Float32 parameters have no separate copy."""
        for part in self._parts:
            if not part.is_stub_optimizer:
                yield from chain(*part.shard_fp32_from_float16_groups)

    @property
    def groups(self) -> int:
        """Number of groups of parameters that `step_by_groups` updates one after another."""
        return len(self._groups)

    def moments(self, group: int) -> Iterator[Tensor]:
        """Yield AdamW's moments of a group of parameters. Before the group's first step, there are none."""
        part, parameters = self._groups[group]
        for parameter in parameters:
            state = part.optimizer.state.get(parameter, {})
            yield from (each for each in state.values() if isinstance(each, Tensor) and each.ndim)

    @property
    def _parts(self) -> list[DistributedOptimizer]:
        """The optimizers of dense parameters and of experts."""
        return list(getattr(self._optimizer, "chained_optimizers", [self._optimizer]))

    def _own(self, parameter: nn.Parameter) -> tuple[slice, dict[str, Tensor]] | None:
        """Return this rank's range of a flattened parameter, and the optimizer's tensors for this range.

        Returns None if other ranks hold the optimizer state of the parameter.
        """
        if parameter not in self._shards:
            return None
        part, weight = self._shards[parameter]
        held = part._get_model_param_range_map(parameter)["param"]
        return slice(held.start, held.end), {WEIGHT: weight} | part.optimizer.state.get(weight, {})


def _groups(part: DistributedOptimizer) -> list[list[Tensor]]:
    """Divide the parameters of an optimizer, as it holds them in float32, into groups."""
    if part.is_stub_optimizer:
        return []
    return groups_of(parameter for group in part.optimizer.param_groups for parameter in group["params"])


def _shards(part: DistributedOptimizer) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield each parameter for which this rank holds optimizer state, and the float32 weights of the rank's
    part of the parameter.

    megatron-core's own table of them (`model_param_group_index_map`) is wrong in a model with parameters of two types.
    """
    if part.is_stub_optimizer:
        return
    for parameters, weights in (
        (part.model_float16_groups, part.shard_fp32_from_float16_groups),
        (part.model_fp32_groups, part.shard_fp32_groups),
    ):
        yield from zip(chain(*parameters), chain(*weights), strict=True)


def _counts_by_parameter(part: DistributedOptimizer) -> bool:
    """Whether the optimizer counts steps separately for each parameter, in the parameter's state, as
    PyTorch's Adam does.

    The FusedAdam of Transformer Engine and of Apex, which megatron-core prefers, counts in
    `param_groups` as an integer.
    """
    return isinstance(part.optimizer, (torch.optim.Adam, torch.optim.AdamW))


def _use_fused_kernel(part: DistributedOptimizer) -> None:
    """Make PyTorch's AdamW compute a step in one kernel, as the FSDP engine does.

    megatron-core takes it where neither Transformer Engine nor Apex is installed, and cannot set this. On an accelerator
    PyTorch would otherwise hold the square roots of all second moments at the same time (`foreach`).
    """
    if not part.is_stub_optimizer and _counts_by_parameter(part):
        for group in part.optimizer.param_groups:
            group["fused"], group["foreach"] = True, False


def _counts(part: DistributedOptimizer) -> list[dict[str, Any]]:
    """Return the dictionaries in which an optimizer counts its steps, under "step". The key may be missing
    before the first step.
    """
    if part.is_stub_optimizer:
        return []
    if _counts_by_parameter(part):
        return list(part.optimizer.state.values())
    return [group for group in part.optimizer.param_groups if group["params"]]


def copies_of(parameter: nn.Parameter) -> ProcessGroup:
    """Return the group of ranks that have the same part of a parameter. The optimizer state of this part is
    divided among them.
    """
    if getattr(parameter, "allreduce", True):  # false for experts
        return parallel_state.get_data_parallel_group()
    return parallel_state.get_expert_data_parallel_group()


def _decays(parameter: Tensor, name: str) -> bool:
    """Whether weight decay applies to a parameter. As in the FSDP engine (`fsdp/optimizer.py`), it applies to matrices
    but not to the filters of convolutions.
    """
    return parameter.ndim > 1 and not name.endswith("conv1d.weight")

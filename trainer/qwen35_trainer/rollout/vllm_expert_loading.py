"""Loads the experts of a layer into vLLM by three calls of its loader, instead of three for each expert.

    weights ─► PackedExperts.others ─► all other weights ─► the model's own load_weights
                     │
                     ├ gate_up_proj (experts, 2·I, D) ─► own experts, gates      ─► w1 ┐
                     │                                └► own experts, other rows ─► w3 ├─► the layer's weight_loader
                     └ down_proj    (experts, D, I)   ─► own experts             ─► w2 ┘

vLLM's models call this loader for each matrix of each expert, and twice: first it counts values, and then it copies them. That is
61,440 calls for the 40 layers of 256 experts of Qwen3.5-35B-A3B, while the replica generates nothing
(`benchmarks/expert_loading.py`). The loader also takes the matrices of all own experts as one tensor. The copy is then divided
among the experts again (`ExpertMatrices`).

vLLM's own loading stays for experts to which this does not apply (`experts_together`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from qwen35_trainer.models.qwen3_5.hub_tensors import NamedTensor, to_per_expert
from qwen35_trainer.rollout.vllm_versions import expert_class, expert_layout
from qwen35_trainer.weights.sliced_tensor import VIEWS, SlicedTensor

_TENSOR = re.compile(r"model\.(?:language_model\.)?(layers\.\d+\.mlp\.experts)\.(gate_up_proj|down_proj)")
"""Names of packed experts. It does not match those of multi-token prediction (`mtp.layers.…`)."""
_LAYER = re.compile(r"(?:.*\.)?model\.(layers\.\d+\.mlp\.experts)(?:\..*)?")
"""Paths of layers of experts in a model of vLLM. Versions and adapters differ in what is before and after."""


class _Layer(NamedTuple):
    path: str
    layer: Any
    """vLLM's layer of experts."""
    own: slice
    """The experts that this process has."""


class PackedExperts:
    """Loads packed experts into the layers of a model that can load all of their experts together."""

    def __init__(self, model: Any, model_type: str) -> None:  # noqa: ANN401  # vLLM's model
        """Find the layers. model_type: that of the model's configuration."""
        self.loaded: set[str] = set()
        """Names of the parameters that got a tensor."""
        self._is_split = expert_layout(model_type) == "per expert"
        self._layers: dict[str, _Layer] = {}
        kind = expert_class()
        for path, layer in model.named_modules():
            place = _LAYER.fullmatch(path)
            if place is not None and isinstance(layer, kind) and (own := experts_together(layer)) is not None:
                self._layers[place[1]] = _Layer(path, layer, own)

    def others(self, weights: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        """Load the packed experts among the weights, and yield all other tensors, as the model's `load_weights` reads them."""
        for name, tensor in weights:
            packed = _TENSOR.fullmatch(name)
            if packed is not None and (place := self._layers.get(packed[1])) is not None:
                self._load(place, packed[2], tensor)
            elif packed is not None and self._is_split:
                yield from to_per_expert([(name, tensor)])
            else:
                yield name, tensor

    def _load(self, place: _Layer, kind: str, experts: Tensor) -> None:
        for parameter_name, shard, matrices in _shards(kind, experts[place.own]):
            parameter = getattr(place.layer, parameter_name)  # another one as soon as the layer is complete
            is_loaded = parameter.weight_loader(
                param=parameter,
                loaded_weight=ExpertMatrices(matrices),
                weight_name=parameter_name,
                shard_id=shard,
                expert_id=place.own.start,
                return_success=True,
            )
            if is_loaded:
                self.loaded.add(f"{place.path}.{parameter_name}")


def experts_together(layer: Any) -> slice | None:  # noqa: ANN401  # vLLM's layer of experts
    """Return which experts of a layer this process has, if they can be loaded together.

    None: vLLM must load them one by one, because they are quantised or not consecutive, or because the layer also contains copies
    of experts or shared experts.
    """
    experts, manager = layer.moe_config, layer.expert_map_manager
    if (
        layer.quant_config is not None
        or getattr(layer, "is_fused_checkpoint_transposed", False)
        or experts.num_experts != experts.num_logical_experts
        or manager.num_fused_shared_experts
    ):
        return None
    table = manager.expert_map
    return slice(0, experts.num_experts) if table is None else consecutive(table.tolist())


def consecutive(table: Sequence[int]) -> slice | None:
    """Return which experts a process has, if they are consecutive and in order.

    table: number of each expert among those of the process; -1: another process has it. None: there is no such slice.
    """
    own = [expert for expert, number in enumerate(table) if number >= 0]
    if not own or [table[expert] for expert in own] != list(range(len(own))) or own[-1] - own[0] >= len(own):
        return None
    return slice(own[0], own[-1] + 1)


def _shards(kind: str, experts: Tensor) -> list[tuple[str, str, Tensor]]:
    """Return the parameter, vLLM's name of the matrices, and the matrices of a packed tensor's experts."""
    if kind == "down_proj":
        return [("w2_weight", "w2", experts)]
    gates, others = experts.chunk(2, dim=1)
    return [("w13_weight", "w1", gates), ("w13_weight", "w3", others)]


class ExpertMatrices(Tensor):
    """The matrices of several experts, which are copied one by one.

    matrices: (experts, rows, columns). In memory, the gates and the other rows of the experts alternate. torch copies such a
    tensor from the host to a device by way of a new tensor on each side (`copy_requires_temporaries` in its aten/native/cuda/Copy.cu).
    The matrix of one expert is contiguous and needs none.
    """

    _matrices: Tensor

    def __new__(cls, matrices: Tensor) -> Self:
        tensor: Self = Tensor._make_wrapper_subclass(
            cls, matrices.shape, strides=matrices.stride(), dtype=matrices.dtype, device=matrices.device
        )
        tensor._matrices = matrices
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch's documentation says

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's annotation lacks the operator
        cls,
        function: Any,  # noqa: ANN401  # an operator of torch
        _: Sequence[type],
        arguments: tuple[Any, ...] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401  # what the operator returns
        if function is torch.ops.aten.copy_.default and isinstance(arguments[1], cls):
            return _copy_one_by_one(arguments[0], arguments[1]._matrices)
        arguments, options = pytree.tree_map_only(cls, lambda each: each._matrices, (arguments, options or {}))
        result = function(*arguments, **options)
        return pytree.tree_map_only(Tensor, cls, result) if function in VIEWS else result


def _copy_one_by_one(target: Tensor, matrices: Tensor) -> Tensor:
    """Copy each expert's matrix to its place in the target. vLLM also copies to targets without memory, to count the values."""
    if target.is_meta:
        return target
    values = matrices.held_values() if isinstance(matrices, SlicedTensor) else matrices
    for place, matrix in zip(target.unbind(), values.unbind(), strict=True):
        place.copy_(matrix)
    return target

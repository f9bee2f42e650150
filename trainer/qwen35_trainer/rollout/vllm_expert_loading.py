"""Loads the experts of a layer into vLLM by three calls of its loader, instead of three for each expert.

    gate_up_proj (experts, 2·I, D) ─► own experts, gates      ─► w1 ┐
                                   └► own experts, other rows ─► w3 ├─► RoutedExperts.weight_loader: the rank's part of each matrix
    down_proj    (experts, D, I)   ─► own experts             ─► w2 ┘

vLLM 0.32 calls this loader for each matrix of each expert, and twice: first it counts values, and then it copies them. That is
61,440 calls for the 40 layers of 256 experts of Qwen3.5-35B-A3B, while the replica generates nothing
(`benchmarks/expert_loading.py`). The loader also takes the matrices of all own experts as one tensor. vLLM's own loading stays for
every layer to which this does not apply, and for vLLM 0.23, which has no RoutedExperts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from qwen35_trainer.models.qwen3_5.hub_tensors import NamedTensor
from qwen35_trainer.rollout.vllm_versions import layers_of_experts

GATE_UP, DOWN = "gate_up_proj", "down_proj"
"""Names of packed experts, from the layer of experts on."""


@contextlib.contextmanager
def loading_at_once(model: Any) -> Iterator[None]:  # noqa: ANN401  # vLLM's model
    """Let a model's `load_weights` load all experts of a layer at once while the block runs."""
    layers = {layer: own for layer in layers_of_experts(model) if (own := experts_at_once(layer)) is not None}
    for layer, own in layers.items():
        layer.load_weights = partial(_load, layer, own)
    try:
        yield
    finally:
        for layer in layers:
            del layer.load_weights  # the method of its class remains


def consecutive(table: Sequence[int]) -> slice | None:
    """Return which experts a process has, if they are consecutive and in order.

    table: number of each expert among those of the process; -1: another process has it. None: there is no such slice.
    """
    own = [expert for expert, number in enumerate(table) if number >= 0]
    if not own or [table[expert] for expert in own] != list(range(len(own))) or own[-1] - own[0] >= len(own):
        return None
    return slice(own[0], own[-1] + 1)


def experts_at_once(layer: Any) -> slice | None:  # noqa: ANN401  # vLLM's RoutedExperts
    """Return which experts of a layer this process has, if they can be loaded at once.

    None: vLLM must load them one by one, because they are quantised or not consecutive, or because the layer also contains copies
    of experts or shared experts.
    """
    experts, manager = layer.moe_config, layer.expert_map_manager
    if (
        layer.quant_config is not None
        or layer.is_fused_checkpoint_transposed
        or experts.moe_parallel_config.enable_eplb
        or experts.num_experts != experts.num_logical_experts
        or manager.num_fused_shared_experts
    ):
        return None
    table = manager.expert_map
    return slice(0, experts.num_experts) if table is None else consecutive(table.tolist())


def _load(layer: Any, own: slice, weights: Iterable[NamedTensor]) -> Iterator[str]:  # noqa: ANN401  # vLLM's RoutedExperts
    """Load tensors into a layer, as its method `load_weights` does. Yields the names of the parameters that got one.

    own: which experts this process has.
    """
    for name, tensor in weights:
        if name not in {GATE_UP, DOWN}:
            yield from type(layer).load_weights(layer, [(name, tensor)])
            continue
        for parameter_name, shard, matrices in _shards(name, tensor[own]):
            parameter = getattr(layer, parameter_name)
            parameter.weight_loader(
                param=parameter,
                loaded_weight=matrices,
                weight_name=parameter_name,
                shard_id=shard,
                expert_id=own.start,
                return_success=True,
            )
            yield parameter_name


def _shards(name: str, experts: Tensor) -> list[tuple[str, str, Tensor]]:
    """Return the parameter, vLLM's name of the matrices, and the matrices of a packed tensor's experts."""
    if name == DOWN:
        return [("w2_weight", "w2", experts)]
    gates, others = experts.chunk(2, dim=1)
    return [("w13_weight", "w1", gates), ("w13_weight", "w3", others)]

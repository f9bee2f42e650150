"""Adds expert parallelism to vLLM's CPU kernels, in each process of a replica that divides its experts.

    router ─► experts of each token, numbered among all ─► own_experts ─► numbered among those of this process ─► kernel ─┐
                                                                          the sum over all processes of the replica ◄─────┘

vLLM gives each kernel a table (its expert_map) with the experts of the process. From 0.23 to 0.32, the CPU kernels ignore the table: they take
the number of an expert of another process for one of their own, and read and write beyond the end of their buffers.

This module imports vLLM. vLLM imports it by the name of `ExpertWorker`, before it builds a worker.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from vllm.v1.worker.cpu_worker import CPUWorker


class ExpertWorker(CPUWorker):  # type: ignore[misc]  # vLLM's, untyped
    """vLLM's worker on the CPU, whose kernels compute the experts of its process only."""

    def load_model(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401  # those of vLLM's method
        """Build the model. In vLLM 0.23, its first steps follow immediately, so the kernels must have changed before."""
        divide_experts()
        super().load_model(*arguments, **options)


def divide_experts() -> None:
    """Let the CPU kernels of this process compute the experts of this process only. May be called again."""
    try:
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts as Kernel
    except ImportError:
        _divide_in_oldest()
    else:
        if not hasattr(Kernel.apply, "__wrapped__"):
            Kernel.apply = _with_own_experts(Kernel.apply)


def _with_own_experts(apply: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(apply)
    def of_own_experts(
        kernel: Any,  # noqa: ANN401  # vLLM's kernel
        *,
        topk_weights: Tensor,
        topk_ids: Tensor,
        expert_map: Tensor | None,
        **others: Any,  # noqa: ANN401
    ) -> None:
        if expert_map is not None:
            topk_weights, topk_ids = own_experts(topk_weights, topk_ids, expert_map)
        apply(kernel, topk_weights=topk_weights, topk_ids=topk_ids, expert_map=expert_map, **others)

    return of_own_experts


def _divide_in_oldest() -> None:
    """Do the same in vLLM 0.23, whose kernels get the layer instead of its table."""
    from vllm.model_executor.layers.fused_moe.cpu_fused_moe import CPUFusedMOE  # type: ignore[import-not-found]

    for name in ("forward_grouped_gemm", "forward_torch"):
        forward = getattr(CPUFusedMOE, name)
        if not hasattr(forward, "__wrapped__"):
            setattr(CPUFusedMOE, name, _with_own_experts_of_layer(forward))


def _with_own_experts_of_layer(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(forward)
    def of_own_experts(
        kernel: Any,  # noqa: ANN401  # vLLM's kernel
        layer: Any,  # noqa: ANN401  # vLLM's layer of experts
        hidden: Tensor,
        weights: Tensor,
        numbers: Tensor,
        *others: Any,  # noqa: ANN401
    ) -> Tensor:
        if layer.expert_map is not None:
            weights, numbers = own_experts(weights, numbers, layer.expert_map)
        return forward(kernel, layer, hidden, weights, numbers, *others)

    return of_own_experts


def own_experts(weights: Tensor, numbers: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights and the experts of tokens for the kernel of one process, each (tokens, experts per token).

    An expert of another process is replaced by the first one of this process with the weight 0, because the kernel
    needs equally many experts for each token. weights, numbers: (tokens, experts per token), with numbers among all
    experts. table: (experts,) number of each expert among those of this process; -1: another process has it.
    """
    own = table[numbers.long()]
    return weights * (own >= 0), own.clamp(min=0).to(numbers.dtype)

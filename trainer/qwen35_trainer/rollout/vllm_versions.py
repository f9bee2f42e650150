"""The differences between the versions of vLLM with which replicas run, 0.23 to 0.32. No other file knows them.

                             0.23                                       0.32
    a text model is built    inside a vision-language model             alone
    names of its weights     those of the vision-language model         the same names, which vLLM shortens itself
    experts of Qwen3         each in tensors of its own                 the same, or packed
    a layer of experts       a FusedMoE                                 RoutedExperts, as a part of another module
    names with adapters      with `base_layer` in them                  without `base_layer`
    names of adapters        from the mapper of the model, which        from a variant of the mapper that joins no layers
                             models of Qwen3 lack
    states on the CPU        copied by a Triton kernel, which fails     copied by a function
    new blocks on the CPU    keep what they held, which may be NaN      cleared
    adapters on the CPU      indices in pinned memory, which needs CUDA  in other memory
    CPUs with AMX            Gated DeltaNet cannot be computed           like other CPUs
    experts on the CPU       chosen by the kernels of experts           chosen by routers
    copies of blocks         none                                       of blocks of the prefix cache that a request uses in part
    a blank picture          made by two methods of two classes          by one method of a processor, which may need a tokenizer
    scheduling ahead         not tested here, so switched off            decided by vLLM

For each difference, the installed vLLM itself is examined, because a build for other devices may have another version number. For
blank pictures, `vllm_processor.py` has the methods that either version calls.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from qwen35_trainer.models.qwen3_5 import classes, qwen3_moe
from qwen35_trainer.models.qwen3_5.classes import HFConfig
from qwen35_trainer.models.qwen3_5.hub_tensors import ExpertLayout, NamedTensor
from qwen35_trainer.models.qwen3_5.model_types import CLASSES, TEXT_MODEL_TYPES

_TOWER = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 16}
"""Sizes of a vision tower that is never built: vLLM leaves the tower out, because a text model reads no pictures."""
_TEXT, _IN_VISION_LANGUAGE = "model.", "model.language_model."
_VISION = "model.visual."
_ADAPTED = ".base_layer.weight"
"""End of a weight's name in a layer with adapters."""


def builds_text_models() -> bool:
    """Return whether the installed vLLM builds a text model of this family without a vision-language model around it.

    Importing vLLM takes seconds.
    """
    from vllm import ModelRegistry

    return CLASSES["qwen3_5_text"] in ModelRegistry.get_supported_archs()


def may_schedule_ahead() -> bool:
    """Return whether the installed vLLM may schedule ahead. This was tested with 0.32, and not with versions like 0.23, which
    build text models inside vision-language models.
    """
    return builds_text_models()


def vision_language(text: HFConfig) -> HFConfig:
    """Return the configuration of a vision-language model that contains the text model of configuration `text`."""
    from transformers import AutoConfig

    [kind] = [outer for outer, inner in TEXT_MODEL_TYPES.items() if inner == text.model_type]
    return AutoConfig.for_model(
        kind,
        text_config=text.to_dict(),
        vision_config=_TOWER | {"out_hidden_size": text.hidden_size},
        tie_word_embeddings=text.tie_word_embeddings,
        architectures=[CLASSES[kind]],
    )


def weight_name(name: str, model_type: str) -> str:
    """Return the name by which vLLM loads a tensor.

    In Qwen3.5 it is the name in a vision-language model, even for a text model: only these names have the same meaning in
    all versions. In Qwen3, which has text models only, it is the name in the checkpoint. model_type: that of the model.
    """
    if (
        model_type == qwen3_moe.MODEL_TYPE
        or not name.startswith(_TEXT)
        or name.startswith((_IN_VISION_LANGUAGE, _VISION))
    ):
        return name
    return _IN_VISION_LANGUAGE + name.removeprefix(_TEXT)


def expert_layout(model_type: str) -> ExpertLayout:
    """Return the layout of experts that all versions of vLLM load into a model of this type."""
    return "per expert" if model_type == qwen3_moe.MODEL_TYPE else "packed"


def expert_class() -> type:
    """Return vLLM's class of layers that contain experts."""
    try:
        from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts as Experts
    except ImportError:
        from vllm.model_executor.layers.fused_moe.layer import FusedMoE as Experts
    kind: type = Experts
    return kind


def adapter_name_mapper(model: Any) -> Any:  # noqa: ANN401  # vLLM's model and WeightsMapper
    """Return vLLM's mapper from the names of a publication's adapters to the names of vLLM's layers.

    In 0.32 the model's own mapper also joins layers, such as q_proj, k_proj and v_proj. This mapper is not used,
    because LoRAModel already joins the adapters. None: the names are the same.
    """
    mapper: Any = getattr(model, "hf_to_vllm_mapper", None)
    return mapper.get_rename_mapper() if hasattr(mapper, "get_rename_mapper") else mapper


def in_adapted_layers(model: Any, weights: Iterable[NamedTensor]) -> Iterable[NamedTensor]:  # noqa: ANN401  # vLLM's model
    """Return tensors by the names under which vLLM finds them in a model whose layers may have adapters.

    In vLLM, a layer with adapters contains the original layer as `base_layer`. vLLM 0.23 expects `base_layer` in the
    names of such a layer's weights. In vLLM 0.32, these names must not contain `base_layer`.
    """
    adapted = {name.split(".")[-3] for name, _ in model.named_parameters() if name.endswith(_ADAPTED)}
    return _with_base_layers(model, adapted, weights) if adapted and not _passes_weights_on() else weights


def _passes_weights_on() -> bool:
    from vllm.lora.layers import BaseLayerWithLoRA

    return hasattr(BaseLayerWithLoRA, "load_weights")


def _with_base_layers(model: Any, adapted: set[str], weights: Iterable[NamedTensor]) -> Iterator[NamedTensor]:  # noqa: ANN401
    """Yield all tensors, with `.base_layer` in the names of the weights of adapted layers.

    adapted: names of layers, without their path, that have adapters.
    """
    joined = {part: whole for whole, parts in model.packed_modules_mapping.items() for part in parts}
    for name, tensor in weights:
        layer = name.rpartition(".")[0].rpartition(".")[2]
        is_adapted = name.endswith(".weight") and joined.get(layer, layer) in adapted
        yield (name.removesuffix(".weight") + _ADAPTED if is_adapted else name), tensor


def check_processor(config: HFConfig) -> None:
    """Raise RuntimeError if the installed vLLM cannot compute a model on this CPU. config: the model's configuration.

    vLLM 0.23 computes Gated DeltaNet by kernels with AMX where the CPU has AMX. They know no prefix cache, so vLLM switches it off,
    and then refuses its own configuration because of the size of the cache's blocks.
    """
    is_hybrid = "linear_attention" in classes.layer_types(config.get_text_config())
    if is_hybrid and _is_oldest() and torch.cpu._is_amx_tile_supported():
        raise RuntimeError(
            "vLLM 0.23 cannot generate with Gated DeltaNet on a CPU with AMX; install vLLM 0.32 (requirements/cpu.txt), or set "
            "rollout.engine to Torch"
        )


def _is_oldest() -> bool:
    """Return whether the installed vLLM lacks what vLLM 0.32 has for CPUs."""
    from vllm.utils import cpu_triton_utils

    return not hasattr(cpu_triton_utils, "_batch_memcpy_impl")


def add_cpu_functions() -> None:
    """Add functions to this process that vLLM 0.23 has for GPUs only, and that vLLM 0.32 also has for CPUs.

    Without these functions, vLLM 0.23 on a CPU fails or returns NaN with the prefix cache, and fails with adapters.
    """
    from vllm.lora.punica_wrapper import utils as adapter_indices
    from vllm.v1.worker import cpu_model_runner, mamba_utils

    if _is_oldest():
        mamba_utils.batch_memcpy = _copy_memory
        cpu_model_runner.CPUModelRunner._zero_block_ids = _clear_blocks
        adapter_indices.async_tensor_h2d.__defaults__ = (False,)  # of its last argument, pin_memory


def _copy_memory(sources: Tensor, targets: Tensor, sizes: Tensor) -> None:
    """Copy ranges of memory: states, from and to blocks of the prefix cache.

    sources, targets: (ranges,) addresses. sizes: (ranges,) bytes.
    """
    for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, source, size)


def _clear_blocks(runner: Any, block_ids: list[int]) -> None:  # noqa: ANN401  # vLLM's CPUModelRunner
    """Set new blocks of keys and values to 0.

    A block may have held states before, whose bytes may be NaN when they are read as bfloat16. The kernel
    multiplies values at unused positions by 0, which leaves NaN. runner: the model runner, of which this function
    becomes a method.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    layers, caches = runner.compilation_config.static_forward_context, runner.kv_cache_config
    for group in caches.kv_cache_groups:
        if isinstance(group.kv_cache_spec, FullAttentionSpec):
            for name in group.layer_names:
                cache = layers[name].kv_cache
                rows = cache.shape[0] // caches.num_blocks  # the kernel may divide a block
                for block in block_ids:
                    cache[block * rows : (block + 1) * rows].zero_()


def pass_chosen_experts(model: Any, record: Callable[[int, Tensor], None]) -> None:  # noqa: ANN401  # vLLM's model
    """Let each router of a model pass the experts that it chooses to `record`, in each step.

    record: gets the number of the router's layer, and (inputs, k) numbers among all experts. Raises ValueError if the
    model has no router, or kernels choose the experts without one.
    """
    try:
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer
    except ImportError:
        _pass_chosen_experts_in_oldest(model, record)
    else:
        bind_routed_experts_capturer(model, SimpleNamespace(capture=record))


def _pass_chosen_experts_in_oldest(model: Any, record: Callable[[int, Tensor], None]) -> None:  # noqa: ANN401
    """Do the same in vLLM 0.23, whose CPU kernels get the logits of a router instead of its choice."""
    from vllm.model_executor.layers.fused_moe.layer import FusedMoE
    from vllm.platforms import current_platform

    layers = [module for module in model.modules() if isinstance(module, FusedMoE)]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no router whose choices could be recorded")
    for layer in layers:
        kernel, of_layer = layer.quant_method, partial(record, layer.layer_id)
        if not kernel.is_monolithic:
            layer.router.set_capture_fn(of_layer)
        elif current_platform.is_cpu():
            kernel.apply_monolithic = _recording_kernel(kernel.apply_monolithic, of_layer)
        else:
            raise ValueError(
                f"the kernel {type(kernel).__name__} chooses experts without a router, which cannot be recorded"
            )


def _recording_kernel(apply: Callable[..., Tensor], record: Callable[[Tensor], None]) -> Callable[..., Tensor]:
    """Return a function that computes the experts of a layer with `apply`, and passes the chosen experts to `record`.

    apply: method of the kernel. It chooses experts by the function that is called here, with the same arguments.
    """
    from vllm.model_executor.layers.fused_moe.cpu_fused_moe import select_experts  # type: ignore[import-not-found]

    def recorded(layer: Any, x: Tensor, router_logits: Tensor, **others: Any) -> Tensor:  # noqa: ANN401  # vLLM's layer
        _, chosen = select_experts(
            hidden_states=x,
            router_logits=router_logits,
            top_k=layer.top_k,
            use_grouped_topk=layer.use_grouped_topk,
            renormalize=layer.renormalize,
        )
        record(chosen)
        return apply(layer=layer, x=x, router_logits=router_logits, **others)

    return recorded


def copied_blocks(scheduled: Any) -> Sequence[tuple[int, int]]:  # noqa: ANN401  # vLLM's SchedulerOutput
    """Return the blocks of caches that a step copies before it computes: the numbers of source and target."""
    copies = getattr(scheduled, "kv_cache_block_copies", None) or ()
    return [(copy.src_block_id, copy.dst_block_id) for copy in copies]

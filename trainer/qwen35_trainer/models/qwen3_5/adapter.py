"""Adapt one instance of a supported model to this trainer. Classes of the transformers library are never changed."""

from __future__ import annotations

from functools import partial
from types import MethodType

from packaging.version import Version
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from qwen35_trainer.light_transformers import transformers
from qwen35_trainer.models.qwen3_5 import HFModule, context_parallel, forward, linear_attention, npu, router, vision
from qwen35_trainer.models.qwen3_5.family import TRANSFORMERS, text_config, text_model
from qwen35_trainer.models.qwen3_5.model_types import CLASSES

NORMS = ("Qwen3_5RMSNorm", "Qwen3_5MoeRMSNorm")
"""Class names in transformers of the norms with a zero-centred weight: they multiply by 1 + weight."""
PLAIN_NORMS = ("Qwen3MoeRMSNorm",)
"""Class names in transformers of the norms that multiply by their weight."""
GATED_NORMS = ("Qwen3_5RMSNormGated", "Qwen3_5MoeRMSNormGated")
"""Class names in transformers of the norm of a Gated DeltaNet, which multiplies by its weight (not zero-centred)."""

ROUTERS = ("Qwen3_5MoeTopKRouter", "Qwen3MoeTopKRouter")
"""Class names in transformers of the router of a mixture of experts."""


def adapt(model: HFModule, context_group: ProcessGroup | None = None, *, float32_logits: bool = False) -> HFModule:
    """Replace the `forward` of a model and of its layers, on these instances, and return the model.

    The model then takes a `ModelInput` and returns `TokenScores` (`forward.score`). Modules, parameters and their names
    stay the same. Adapting a model again replaces `context_group` and `float32_logits`.

    context_group: processes that share each sequence (`context_parallel.py`). With None or a group of one, each process
      has its own sequences.
    float32_logits: whether logits stay in float32 instead of being rounded to the model's precision.

    Raises ValueError naming every problem: another model family, an unsupported version of transformers, attention
    dropout, or heads that the group cannot share evenly.
    """
    if context_group is not None and context_group.size() == 1:
        context_group = None
    if problems := _problems(model, context_group):
        raise ValueError("; ".join(problems))
    text = text_model(model)
    for layer in text.layers:
        layer.forward = MethodType(forward.decode_layer, layer)
        if hasattr(layer, "linear_attn"):
            layer.linear_attn.forward = MethodType(linear_attention.mix, layer.linear_attn)
    for module in text.modules():
        if type(module).__name__ in NORMS:
            module.forward = MethodType(_rms_norm, module)
        if type(module).__name__ in PLAIN_NORMS:
            module.forward = MethodType(_plain_rms_norm, module)
        if type(module).__name__ in GATED_NORMS:
            module.forward = MethodType(_gated_rms_norm, module)
        if type(module).__name__ in ROUTERS:
            module.forward = MethodType(router.route, module)
    vision.adapt(model)
    npu.adapt(model)
    model.forward = MethodType(
        partial(forward.score, context_group=context_group, float32_logits=float32_logits), model
    )
    return model


def _rms_norm(norm: HFModule, x: Tensor) -> Tensor:
    """Compute the RMS norm of transformers (zero-centred weight, float32), in one kernel if the device has one."""
    return F.rms_norm(x.float(), x.shape[-1:], 1.0 + norm.weight.float(), norm.eps).type_as(x)


def _plain_rms_norm(norm: HFModule, x: Tensor) -> Tensor:
    """Compute the RMS norm of `x` in float32, rounded once at the end, as vLLM does. transformers also rounds before it
    multiplies by the weight.
    """
    return F.rms_norm(x.float(), x.shape[-1:], norm.weight.float(), norm.variance_epsilon).type_as(x)


def _gated_rms_norm(norm: HFModule, x: Tensor, gate: Tensor) -> Tensor:
    """Compute the RMS norm of `x` (…, V), times the weight, times silu(gate), in float32, rounded once at the end.

    V: channels of a value. transformers also rounds to the type of `x` before it multiplies by the weight; vLLM and
    flash-linear-attention do not.
    """
    normed = F.rms_norm(x.float(), x.shape[-1:], norm.weight.float(), norm.variance_epsilon)
    return (normed * F.silu(gate.float())).type_as(x)


def _problems(model: HFModule, context_group: ProcessGroup | None) -> list[str]:
    kind, (first, bound) = model.config.model_type, TRANSFORMERS
    if kind not in CLASSES:
        return [f"model type {kind!r} is not supported; supported: {', '.join(CLASSES)}"]
    problems = []
    if not Version(first) <= Version(transformers.__version__) < Version(bound):
        problems.append(f"transformers {transformers.__version__} is not supported; install >={first},<{bound}")
    config = text_config(model)
    if config.attention_dropout:
        problems.append(f"attention_dropout {config.attention_dropout} is not supported; set it to 0 in config.json")
    return problems + ([] if context_group is None else context_parallel.head_problems(config, context_group.size()))

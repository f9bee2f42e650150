"""The gated delta rule of whole sequences: by the kernels of `fla_npu` on NPUs that have them, by torch elsewhere.

    fla_npu      (flash-linear-attention-npu) kernels for each step, forward and backward, without gradients for torch
    MindSpeed    joins these kernels into one function with a gradient, which takes the place of megatron-core's:
                 mindspeed.core.ssm.npu_chunk_gated_delta_rule.chunk_gated_delta_rule

Both have to be installed. The kernels take bfloat16 or float16, keys of 128 channels and values of 128 or 256. Other inputs, and other
devices, use `delta_rule.chunked`. Before the first use, one small sequence is computed both ways: the kernels are not used
if outputs or gradients differ by more than rounding, and the log has the reason.

Hardware: nothing in this file has run on an NPU. A stand-in has the signature with which megatron-core calls MindSpeed's function.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from qwen35_trainer.models.qwen3_5 import delta_rule, kernels

logger = logging.getLogger(__name__)

type OutputsOf = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""Computes the outputs from query, key, value, log_decay and beta."""

DEVICE = "npu"
FUNCTION = "mindspeed.core.ssm.npu_chunk_gated_delta_rule"
KEY_CHANNELS = (128,)
VALUE_CHANNELS = (128, 256)
MAX_RELATIVE_DIFFERENCE = 0.05
"""Maximum of |difference| / |torch's result|, as Euclidean norms, of the outputs and of each gradient of the small sequence.

bfloat16 rounds each number by up to 0.4 %. VeOmni's tests of the same kernels allow 2 % for outputs and 4 % for gradients."""
CHECKED_POSITIONS = 130
"""Two chunks and a part of a third, so that states pass from one to the next."""


def outputs(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """Compute the outputs of the gated delta rule for B right-padded sequences of T positions from empty states.

    The shapes are those of `delta_rule.chunked`. Returns (B, T, H, V), H value heads of V channels.
    """
    fits = (
        query.shape[-1] in KEY_CHANNELS and value.shape[-1] in VALUE_CHANNELS and value.dtype in kernels.HALF_PRECISIONS
    )
    if value.device.type == DEVICE and fits and (rule := _checked_rule(value.device, value.dtype)) is not None:
        return rule(query, key, value, log_decay, beta)
    return _by_torch(query, key, value, log_decay, beta)


def _by_torch(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    return delta_rule.chunked(query, key, value, log_decay, beta)[0]


def _by_kernels(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """Call MindSpeed's function as megatron-core does: with keys of length 1, and as many key heads as value heads."""
    repeats = value.shape[2] // key.shape[2]
    query, key = (delta_rule.normalise(x.float()).to(value.dtype) for x in (query, key))
    query, key = (x.repeat_interleave(repeats, dim=2).contiguous() for x in (query, key))
    output: Tensor = import_module(FUNCTION).chunk_gated_delta_rule(
        query,
        key,
        value.contiguous(),
        g=log_decay.contiguous(),
        beta=beta.to(value.dtype).contiguous(),
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
        cu_seqlens=None,
    )[0]
    return output


@cache
def _checked_rule(device: torch.device, dtype: torch.dtype) -> OutputsOf | None:
    """Return the rule that uses the kernels; None if a package is missing or the kernels compute something else."""
    if find_spec("fla_npu") is None or find_spec("mindspeed") is None:
        return None
    differences = _differences(device, dtype)
    wrong = {name: each for name, each in differences.items() if not each <= MAX_RELATIVE_DIFFERENCE}  # NaN is wrong
    if wrong:
        reasons = ", ".join(f"{name} by {each:.0%}" for name, each in wrong.items())
        logger.warning("the kernels of fla_npu are not used: they differ from torch's results: %s", reasons)
        return None
    logger.info("Gated DeltaNet layers use the kernels of fla_npu")
    return _by_kernels


def _differences(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Return the relative differences of outputs and gradients between kernels and torch, for one small sequence."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, CHECKED_POSITIONS, 2)
    query, key = (torch.randn(1, CHECKED_POSITIONS, 1, KEY_CHANNELS[0], generator=generator) for _ in range(2))
    value, of_output = (torch.randn(*shape, VALUE_CHANNELS[0], generator=generator) for _ in range(2))
    beta = torch.rand(shape, generator=generator)
    # One head forgets slowly, so that the first positions reach the last, and one fast, so that outputs depend on each decay.
    log_decay = -torch.tensor([0.03, 0.5]) * torch.rand(shape, generator=generator)
    inputs = [x.to(device, dtype) for x in (query, key, value)] + [log_decay.to(device), beta.to(device)]

    def results(rule: OutputsOf) -> dict[str, Tensor]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        with torch.inference_mode(mode=False), torch.enable_grad():
            output = rule(*leaves)
        gradients = torch.autograd.grad(output, leaves, of_output.to(output))
        names = ("query", "key", "value", "log_decay", "beta")
        named = {f"gradients of {name}": each.float() for name, each in zip(names, gradients, strict=True)}
        return {"outputs": output.detach().float()} | named

    expected, actual = results(_by_torch), results(_by_kernels)
    return {name: float((actual[name] - each).norm() / each.norm()) for name, each in expected.items()}

"""Errors of bfloat16: each kind of layer is compared with the same layer in float32. Prints one JSON object.

    python -m benchmarks.numerics            # a minute on one core

`earlier` is the computation of these layers before A_log, the gated norm, the short convolution, the router and the logits
were kept in float32; the code is below. Both get the same weights, rounded to the types of published files (A_log and the gated
norm's weight float32, all others bfloat16), and the same inputs, so that only the arithmetic differs. Sizes are those of
Qwen3.5-0.8B, and for the router those of 35B-A3B, with a vocabulary of 32,768. Errors are root mean squares, averaged over
`SEEDS` draws: relative to the output for layers, in nats for log-probs, and the share of tokens with other experts for the
router.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import fmean
from types import MethodType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen3_5ForCausalLM, Qwen3_5MoeTextConfig, Qwen3_5TextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTopKRouter

from qwen35_trainer.models.qwen3_5 import HFModule, convolution, full_attention, linear_attention, router
from qwen35_trainer.models.qwen3_5.adapter import adapt
from qwen35_trainer.models.qwen3_5.head import token_scores
from qwen35_trainer.models.qwen3_5.precision import keeps_float32
from qwen35_trainer.models.qwen3_5.sequence_layout import SequenceLayout

SEEDS, TOKENS, VOCABULARY, CHUNK = 3, 512, 32_768, 32
LOGIT_DEVIATION = 3.0
"""Standard deviation of the head's logits, in nats."""
SIZES: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "vocab_size": 8,
}

type Errors = dict[str, float]


def main() -> None:
    errors_by_kind: dict[str, list[Errors]] = {}
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        for kind, errors in (_layers() | {"router": _router()} | _head()).items():
            errors_by_kind.setdefault(kind, []).append(errors)
    means = {
        kind: {name: fmean(each[name] for each in draws) for name in draws[0]} for kind, draws in errors_by_kind.items()
    }
    print(json.dumps(means, indent=2))


def _layers() -> dict[str, Errors]:
    """Measure the relative errors of mixers and MLP on normalised hidden states, by kind of layer."""
    exact = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SIZES)).eval()
    for layer in exact.model.layers:
        if hasattr(layer, "linear_attn"):
            # Memories decay over 1 to 1,000 positions; with initial weights they would decay within a few.
            layer.linear_attn.A_log.data.uniform_(-7, 0)
            layer.linear_attn.norm.weight.data.uniform_(0.5, 1.5)
    for name, parameter in exact.named_parameters():
        if not keeps_float32(name):
            parameter.data = parameter.data.bfloat16().float()
    now = Qwen3_5ForCausalLM(exact.config).eval()
    now.load_state_dict(exact.state_dict())
    for name, parameter in now.named_parameters():
        parameter.data = parameter.data if keeps_float32(name) else parameter.data.bfloat16()
    hidden = torch.randn(1, TOKENS, exact.config.hidden_size).bfloat16()
    for model in (exact, now):
        adapt(model)

    def outputs(model: HFModule, x: Tensor) -> dict[str, Tensor]:
        cos, sin = model.model.rotary_emb(x, torch.arange(TOKENS).expand(3, 1, TOKENS))
        linear, full = model.model.layers
        mixed = linear.linear_attn(x, SequenceLayout(cos, sin))
        attended = full_attention.mix(full.self_attn, x, SequenceLayout(cos, sin))
        return {"Gated DeltaNet": mixed, "full attention": attended, "MLP": full.mlp(x)}

    with torch.no_grad():
        reference, after = outputs(exact, hidden.float()), outputs(now, hidden)
        with _earlier(now):
            before = outputs(now, hidden)
    return {
        kind: {"earlier": _relative(before[kind], whole), "now": _relative(after[kind], whole)}
        for kind, whole in reference.items()
    }


@contextmanager
def _earlier(model: HFModule) -> Iterator[None]:
    """Compute the Gated DeltaNet of `model` entirely in bfloat16, as it was before."""
    net = model.model.layers[0].linear_attn
    kept = net.A_log.data, net.norm.weight.data
    net.A_log.data, net.norm.weight.data = (tensor.bfloat16() for tensor in kept)

    def convolve(x: Tensor, filters: Tensor) -> Tensor:
        width, length = filters.shape[1], x.shape[1]
        padded = F.pad(x, (0, 0, width - 1, 0))
        output = padded[:, :length] * filters[:, 0]
        for i in range(1, width):
            output = torch.addcmul(output, padded[:, i : i + length], filters[:, i])
        return F.silu(output)

    def project(layer: HFModule, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mixed, gate, log_decay, _ = current_project(layer, hidden)
        return mixed, gate, log_decay, layer.in_proj_b(hidden).sigmoid()

    current_project = linear_attention._project
    norm = MethodType(type(net.norm).forward, net.norm)
    with (
        patch.object(convolution, "convolve", convolve),
        patch.object(linear_attention, "_project", project),
        patch.object(net.norm, "forward", norm),
    ):
        yield
    net.A_log.data, net.norm.weight.data = kept


def _router() -> Errors:
    """Measure the share of tokens whose eight of 256 experts differ from those of the exact logits."""
    gate = Qwen3_5MoeTopKRouter(Qwen3_5MoeTextConfig(hidden_size=2048, num_experts=256, num_experts_per_tok=8))
    gate.weight.data = (torch.randn_like(gate.weight) * 0.02).bfloat16()
    hidden = torch.randn(TOKENS, 2048).bfloat16()
    exact = (hidden.double() @ gate.weight.double().T).topk(8).indices

    def others(route: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]) -> float:
        with torch.no_grad():
            chosen = route(hidden)[2]
        return float((chosen.sort().values != exact.sort().values).any(-1).float().mean())

    return {"earlier": others(gate), "now": others(MethodType(router.route, gate))}


def _head() -> dict[str, Errors]:
    """Measure the error of log-probs in nats, and of the weight's gradient over `TOKENS / CHUNK` chunks, relative."""
    width = 1024
    hidden = torch.randn(TOKENS, width).bfloat16()
    weight = (torch.randn(VOCABULARY, width) * LOGIT_DEVIATION * width**-0.5).bfloat16()
    targets = torch.randint(VOCABULARY, (TOKENS,))

    def scores(hidden: Tensor, weight: Tensor, rows: slice, *, float32_logits: bool = False) -> tuple[Tensor, Tensor]:
        weight = weight.detach().requires_grad_()
        log_probs = token_scores(
            hidden[rows], weight, targets[rows], chunk=CHUNK, float32_logits=float32_logits
        ).log_probs
        log_probs.sum().backward()
        assert weight.grad is not None
        return log_probs.detach(), weight.grad

    every = slice(None)
    exact, exact_gradient = scores(hidden.double(), weight.double(), every)
    rounded, _ = scores(hidden, weight, every)
    whole, gradient = scores(hidden, weight, every, float32_logits=True)
    summed = torch.zeros_like(weight)
    for start in range(0, TOKENS, CHUNK):
        summed += scores(hidden, weight, slice(start, start + CHUNK))[1]
    return {
        "output layer, log-probs (nats)": {"earlier": _rms(rounded - exact), "now": _rms(whole - exact)},
        "output layer, gradient": {
            "earlier": _relative(summed, exact_gradient),
            "now": _relative(gradient, exact_gradient),
        },
    }


def _relative(values: Tensor, exact: Tensor) -> float:
    return _rms(values.float() - exact) / _rms(exact)


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


if __name__ == "__main__":
    main()

"""Weights under the names and shapes of a Hugging Face checkpoint of this family, for a rollout engine to load.

    module ─► whole tensors, one after another ─► exported ─► vLLM

`qwen35 export` does not use this file: it writes with `hub_folder.py`. Only experts have different names in the PyTorch
module and in checkpoints. For E experts with I inner channels and D hidden channels:

    layout       name                                       shape                        used by
    packed       layers.0.mlp.experts.gate_up_proj          (E, 2·I, D), gate above up   the module, vLLM
                 layers.0.mlp.experts.down_proj             (E, D, I)                    the module, vLLM
    per expert   layers.0.mlp.experts.7.gate_proj.weight    (I, D)                       checkpoints, vLLM
                 layers.0.mlp.experts.7.up_proj.weight      (I, D)                       checkpoints, vLLM
                 layers.0.mlp.experts.7.down_proj.weight    (D, I)                       checkpoints, vLLM

vLLM's layers of experts get the packed tensors. Where vLLM must load experts one by one, models of Qwen3 get the other layout, because
vLLM 0.23 skips their packed tensors (`rollout/vllm_expert_loading.py`). All other tensors, including
those of the vision tower (`model.visual.*`), have the names of the module. All functions stream: if the tensors of a
layer are adjacent, at most the experts of one layer are in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import torch
from torch import Tensor

from qwen35_trainer.models.qwen3_5.checkpoint_files import EXPERT, CheckpointFiles

type NamedTensor = tuple[str, Tensor]
type ExpertLayout = Literal["packed", "per expert"]

GATE_UP, DOWN = ".experts.gate_up_proj", ".experts.down_proj"
HEAD = "lm_head.weight"


def exported(
    weights: Iterable[NamedTensor], *, tied: bool, layout: ExpertLayout = "packed", heads: Iterable[NamedTensor] = ()
) -> Iterator[NamedTensor]:
    """Yield the weights of a model under the names by which a rollout engine loads them.

    weights: unsharded tensors by their names in the module.
    tied: `config.tie_word_embeddings`. If true, the output layer is left out, because loaders use the
      input embedding for it.
    layout: whether all experts of a layer are packed into one tensor, or each expert has its own tensors.
    heads: the tensors for multi-token prediction (`mtp_heads`). They are passed through unchanged: the module in
      transformers lacks them, so they do not train.
    """
    exported_weights = ((name, tensor) for name, tensor in weights if not (tied and name == HEAD))
    yield from to_packed(exported_weights) if layout == "packed" else to_per_expert(exported_weights)
    yield from heads


def mtp_heads(files: CheckpointFiles) -> dict[str, Tensor]:
    """Read a checkpoint's heads for multi-token prediction (`mtp.*`). Returns {} if the checkpoint has none.

    vLLM drafts tokens with these heads. They do not change while the model learns, so drafts are accepted more rarely;
    this costs speed but never changes the sampled distribution.
    """
    return {name: files.read(name) for name in files.passed}


def to_per_expert(weights: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
    """Yield the weights, with each packed expert tensor split into views of single experts. The
    inverse of `to_packed`.
    """
    for name, tensor in weights:
        if name.endswith(GATE_UP):
            prefix = name.removesuffix(GATE_UP)
            for i, expert in enumerate(tensor):
                gate, up = expert.chunk(2)
                yield f"{prefix}.experts.{i}.gate_proj.weight", gate
                yield f"{prefix}.experts.{i}.up_proj.weight", up
        elif name.endswith(DOWN):
            prefix = name.removesuffix(DOWN)
            for i, expert in enumerate(tensor):
                yield f"{prefix}.experts.{i}.down_proj.weight", expert
        else:
            yield name, tensor


def to_packed(weights: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
    """Yield the weights, with the tensors of single experts joined into packed tensors, layer by layer.

    All experts of a layer must come before the first expert of the next layer. Raises ValueError naming the experts that
    a layer lacks.
    """
    prefix, experts = "", dict[tuple[str, int], Tensor]()
    for name, tensor in weights:
        match = EXPERT.fullmatch(name)
        if match is None:
            yield name, tensor
            continue
        if match[1] != prefix:
            yield from _packed(prefix, experts)
            prefix, experts = match[1], {}
        experts[match[3], int(match[2])] = tensor
    yield from _packed(prefix, experts)


def _packed(prefix: str, experts: dict[tuple[str, int], Tensor]) -> Iterator[NamedTensor]:
    if not experts:
        return
    count = 1 + max(i for _, i in experts)
    kinds = ("gate_proj", "up_proj", "down_proj")
    if missing := [f"{i}.{kind}" for kind in kinds for i in range(count) if (kind, i) not in experts]:
        raise ValueError(
            f"{prefix}: {', '.join(missing[:5])}{' …' if len(missing) > 5 else ''} missing of {count} experts; the "
            "experts of a layer must follow one another."
        )
    gate_up = (torch.cat((experts["gate_proj", i], experts["up_proj", i])) for i in range(count))
    yield f"{prefix}.gate_up_proj", torch.stack(list(gate_up))
    yield f"{prefix}.down_proj", torch.stack([experts["down_proj", i] for i in range(count)])

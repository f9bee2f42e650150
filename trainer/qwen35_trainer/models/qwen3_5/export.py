"""Weights as another program loads them: names and shapes of a Hugging Face checkpoint of this family.

    module ─► whole tensors, one after another ─► exported ─► rollout engine, or *.safetensors

What the module and a checkpoint call differently is the experts of a mixture:

    packed       layers.0.mlp.experts.gate_up_proj  (E, 2·I, D), gate above up       the module; vLLM
                 layers.0.mlp.experts.down_proj     (E, D, I)
    per expert   layers.0.mlp.experts.7.gate_proj.weight (I, D), up_proj (I, D), down_proj (D, I)    the library; vLLM

vLLM 0.32 reads both; some of its older versions refuse packed tensors in weight updates. Everything else, the vision
tower included (`model.visual.*`), is named as in the module. All functions stream: at most one layer's experts are
held at a time when a layer's tensors come together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import torch
from torch import Tensor

from qwen35_trainer.models.qwen3_5.checkpoint_files import EXPERT, CheckpointFiles

type Named = tuple[str, Tensor]
type Layout = Literal["packed", "per expert"]

GATE_UP, DOWN = ".experts.gate_up_proj", ".experts.down_proj"
HEAD = "lm_head.weight"


def exported(
    weights: Iterable[Named], *, tied: bool, layout: Layout = "packed", heads: Iterable[Named] = ()
) -> Iterator[Named]:
    """The weights of a model as its rollout engine loads them.

    weights: by name in the module, each a whole tensor.  tied: `config.tie_word_embeddings`; then the output layer is
    left out, since loaders take it from the input embedding and would read it twice.  heads: of multi-token prediction
    (`mtp_heads`), passed through as they are: the library's module has no place for them, so they are not trained.
    """
    kept = ((name, tensor) for name, tensor in weights if not (tied and name == HEAD))
    yield from to_packed(kept) if layout == "packed" else to_per_expert(kept)
    yield from heads


def mtp_heads(files: CheckpointFiles) -> dict[str, Tensor]:
    """Heads for multi-token prediction (`mtp.*`) of a checkpoint, read once; empty where it has none.

    vLLM drafts with them. As the model learns they do not, and drafts are accepted more rarely, which costs speed and
    never changes what is sampled.
    """
    return {name: files.read(name) for name in files.passed}


def to_per_expert(weights: Iterable[Named]) -> Iterator[Named]:
    """Packed expert tensors taken apart, as views; all others as they are. The inverse of `to_packed`."""
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


def to_packed(weights: Iterable[Named]) -> Iterator[Named]:
    """Tensors of single experts put together, once a layer has all of them; all others as they are.

    A layer is complete when another layer's expert or the end follows. Raises ValueError naming what is missing then.
    """
    prefix, found = "", dict[tuple[str, int], Tensor]()
    for name, tensor in weights:
        match = EXPERT.fullmatch(name)
        if match is None:
            yield name, tensor
            continue
        if match[1] != prefix:
            yield from _packed(prefix, found)
            prefix, found = match[1], {}
        found[match[3], int(match[2])] = tensor
    yield from _packed(prefix, found)


def _packed(prefix: str, found: dict[tuple[str, int], Tensor]) -> Iterator[Named]:
    if not found:
        return
    count = 1 + max(i for _, i in found)
    kinds = ("gate_proj", "up_proj", "down_proj")
    if missing := [f"{i}.{kind}" for kind in kinds for i in range(count) if (kind, i) not in found]:
        raise ValueError(
            f"{prefix}: {', '.join(missing[:5])}{' …' if len(missing) > 5 else ''} missing of {count} experts; the "
            "experts of a layer must follow one another."
        )
    gate_up = (torch.cat((found["gate_proj", i], found["up_proj", i])) for i in range(count))
    yield f"{prefix}.gate_up_proj", torch.stack(list(gate_up))
    yield f"{prefix}.down_proj", torch.stack([found["down_proj", i] for i in range(count)])

"""The forward pass of an adapted model: scores of chosen tokens.

    tokens, pictures ─► embed ─► layer 0 ─► … ─► layer N-1 ─► scored rows only: norm ─► head ─► log-probs, entropy
                                 └── mixer (linear or full attention), then MLP or experts; each layer's `__call__`

Layers, and Gated DeltaNets in them, are called as modules and not as functions: FSDP2 and activation checkpointing act around
a module's call.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor
from torch.distributed import ProcessGroup

from qwen35_trainer.models.qwen3_5 import HFModule, full_attention, kernels, router, sequence_parallel, vision
from qwen35_trainer.models.qwen3_5.family import text_model
from qwen35_trainer.models.qwen3_5.head import TokenScores, token_scores
from qwen35_trainer.models.qwen3_5.inputs import ModelInput
from qwen35_trainer.models.qwen3_5.layout import Layout, Split
from qwen35_trainer.models.qwen3_5.router import Membership


def score(
    model: HFModule,
    inputs: ModelInput,
    rows: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    with_entropy: bool = False,
    lengths: Tensor | None = None,
    *,
    group: ProcessGroup | None = None,
    float32_logits: bool = False,
) -> TokenScores:
    """Scores of the tokens that follow `rows`. What an adapted model's call does.

    rows: (R,) int64 flat positions, row-major over `inputs.tokens`, whose next token is scored.  targets: (R,) int64.
    lengths: (n,) int64 tokens of each sequence that the losses of routers count; None: without these losses.
    group: processes that share each sequence; all get the same arguments and all scores (`sequence_parallel.py`).
    float32_logits: do not round logits to the model's precision.
    """
    length = inputs.tokens.shape[1]
    hidden, router_losses = hidden_states(model, inputs, group, lengths)
    flat = hidden.flatten(0, 1)
    norm = text_model(model).norm

    def scores(hidden: Tensor, targets: Tensor) -> TokenScores:
        weight = model.lm_head.weight
        return token_scores(norm(hidden), weight, targets, temperature, with_entropy, float32_logits=float32_logits)

    if group is None:
        return scores(flat.index_select(0, rows), targets)._replace(router_losses=router_losses)
    mine, own = sequence_parallel.own_rows(rows, group, whole=length, share=len(flat) // len(inputs.tokens))
    log_probs, entropy, _ = scores(flat[own], targets[mine])

    def everywhere(values: Tensor) -> Tensor:
        return sequence_parallel.gather_rows(values, mine, len(rows), group)

    return TokenScores(
        everywhere(log_probs),
        None if entropy is None else everywhere(entropy),
        None if router_losses is None else sequence_parallel.total(router_losses, group),
    )


def logits(model: HFModule, inputs: ModelInput) -> Tensor:
    """(n, L, V) logits of every position, in the model's precision: of a model that is neither sharded nor shared."""
    return model.lm_head(text_model(model).norm(hidden_states(model, inputs, None)[0]))


def hidden_states(
    model: HFModule, inputs: ModelInput, group: ProcessGroup | None, lengths: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """(n, l, D) before the final norm, of the tokens that this process holds, and its share of the losses of all routers."""
    if group is not None:
        inputs = sequence_parallel.padded(inputs, group)
    hidden = _embed(model, inputs, group)
    membership = None if lengths is None else Membership.of(inputs, lengths, group)
    layout, losses = replace(_layout(model, inputs, hidden, group), membership=membership), None
    for layer in text_model(model).layers:
        hidden, of_layer = layer(hidden, layout)
        if of_layer is not None:
            losses = of_layer if losses is None else losses + of_layer
    return hidden, losses


def decode_layer(layer: HFModule, hidden: Tensor, layout: Layout) -> tuple[Tensor, Tensor | None]:
    """One layer: mixer, then MLP or experts, each behind a norm and added to its input.

    (n, l, D) → (n, l, D), and the losses of the layer's router, if it has one and `layout.membership` asks for them.
    """
    normed = layer.input_layernorm(hidden)
    if hasattr(layer, "linear_attn"):
        hidden = hidden + layer.linear_attn(normed, layout)
    else:
        hidden = hidden + full_attention.mix(layer.self_attn, normed, layout)
    normed = layer.post_attention_layernorm(hidden)
    if not hasattr(layer.mlp, "gate"):
        return hidden + layer.mlp(normed), None
    mixed, losses = router.mix(layer.mlp, normed, layout.membership)
    return hidden + mixed, losses


def _embed(model: HFModule, inputs: ModelInput, group: ProcessGroup | None) -> Tensor:
    if group is None:
        return vision.embed(model, inputs)
    if inputs.pictures is None:
        return vision.embed(model, replace(inputs, tokens=sequence_parallel.own(inputs.tokens, group)))
    # Features are counted against the placeholders of whole sequences, so every process runs the tower on all pictures;
    # it differentiates those of its own tokens.
    return sequence_parallel.own(vision.embed(model, inputs), group)


def _layout(model: HFModule, inputs: ModelInput, hidden: Tensor, group: ProcessGroup | None) -> Layout:
    positions = inputs.positions if group is None else sequence_parallel.own(inputs.positions, group)
    cos, sin = text_model(model).rotary_emb(hidden, positions[..., 1:].movedim(-1, 0))
    if inputs.boundaries is None:
        return Layout(cos, sin, group=group)
    lengths = inputs.boundaries.diff().tolist()
    everywhere = kernels.has_delta_rule(hidden) and kernels.has_varlen_attention(hidden)
    split = None if everywhere else Split.of(lengths, hidden.device)
    return Layout(cos, sin, inputs.boundaries, max(lengths), split, group)

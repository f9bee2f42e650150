"""The forward pass of an adapted model: scores of chosen tokens.

    tokens, pictures ─► embed ─► layer 0 ─► … ─► layer N-1 ─► scored rows only: norm ─► head ─► log-probs, entropy
                                 └── mixer (linear or full attention), then MLP or experts; each layer's `__call__`

Layers, and the Gated DeltaNets in them, are called as modules and not as functions, because FSDP2 and activation
checkpointing hook into the call of a module.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor
from torch.distributed import ProcessGroup

from qwen35_trainer.models.qwen3_5 import HFModule, context_parallel, full_attention, kernels, router, vision
from qwen35_trainer.models.qwen3_5.buckets import Split
from qwen35_trainer.models.qwen3_5.family import rotary, text_config, text_model
from qwen35_trainer.models.qwen3_5.head import TokenScores, token_scores
from qwen35_trainer.models.qwen3_5.inputs import ModelInput
from qwen35_trainer.models.qwen3_5.kept_logits import KeptLogits
from qwen35_trainer.models.qwen3_5.router import Membership
from qwen35_trainer.models.qwen3_5.sequence_layout import SequenceLayout
from qwen35_trainer.models.qwen3_5.shared_prompts import PromptLayout


def score(
    model: HFModule,
    inputs: ModelInput,
    rows: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    with_entropy: bool = False,
    lengths: Tensor | None = None,
    kept: KeptLogits | None = None,
    *,
    context_group: ProcessGroup | None = None,
    float32_logits: bool = False,
) -> TokenScores:
    """Compute the scores of R tokens, `targets`. This is the `forward` of an adapted model.

    rows: (R,) int64 indices into the flattened `inputs.tokens`. Target i is scored as the token that follows `rows[i]`.
    targets: (R,) int64 token ids.
    temperature: divisor of the logits.
    with_entropy: whether to compute entropies.
    lengths: (n,) int64 number of tokens of each of the n sequences, for the losses of routers; None: the
      losses are not computed.
    kept: the tokens over which each row's softmax is taken; None: the whole vocabulary.
    context_group: processes that share each sequence (`context_parallel.py`). All of them must get the same arguments;
      all of them return all scores.
    float32_logits: whether logits stay in float32 instead of being rounded to the model's precision.
    """
    length = inputs.tokens.shape[1]
    hidden, router_losses = hidden_states(model, inputs, context_group, lengths)
    flat = hidden.flatten(0, 1)
    norm = text_model(model).norm

    def scores(hidden: Tensor, targets: Tensor, kept: KeptLogits | None) -> TokenScores:
        weight = model.lm_head.weight
        return token_scores(
            norm(hidden), weight, targets, temperature, with_entropy, float32_logits=float32_logits, kept=kept
        )

    if context_group is None:
        return scores(flat.index_select(0, rows), targets, kept)._replace(router_losses=router_losses)
    indices, local = context_parallel.local_rows(
        rows, context_group, whole=length, share=len(flat) // len(inputs.tokens)
    )
    log_probs, entropy, _ = scores(flat[local], targets[indices], None if kept is None else kept.take(indices))

    def everywhere(values: Tensor) -> Tensor:
        return context_parallel.gather_rows(values, indices, len(rows), context_group)

    return TokenScores(
        everywhere(log_probs),
        None if entropy is None else everywhere(entropy),
        None if router_losses is None else context_parallel.group_sum(router_losses, context_group),
    )


def logits(model: HFModule, inputs: ModelInput) -> Tensor:
    """Compute the logits (n, L, vocabulary) of all positions in the model's precision, for n rows of L tokens.

    This works only without sharding and without context parallelism.
    """
    return model.lm_head(text_model(model).norm(hidden_states(model, inputs, None)[0]))


def hidden_states(
    model: HFModule, inputs: ModelInput, context_group: ProcessGroup | None, lengths: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Compute the hidden states before the final norm for the tokens of this process, and this process's part
    of routers' losses.

    context_group: processes that share each sequence; None: this process holds all tokens.
    lengths: (sequences,) number of tokens of each sequence, for the routers' losses; None: the losses are not computed.

    Returns hidden states (n, l, D) of n rows, l tokens of this process and D channels, and the losses (2,) or None.
    """
    if context_group is not None:
        inputs = context_parallel.padded(inputs, context_group)
    hidden = _embed(model, inputs, context_group)
    membership = None if lengths is None else Membership.of(inputs, lengths, context_group)
    layout, losses = replace(_layout(model, inputs, hidden, context_group), membership=membership), None
    choices = inputs.choices
    if choices is not None and context_group is not None:
        choices = context_parallel.local_tokens(choices, context_group)
    for number, layer in enumerate(text_model(model).layers):
        if choices is not None:
            layout = replace(layout, replayed=choices[:, :, number])
        hidden, of_layer = layer(hidden, layout)
        if of_layer is not None:
            losses = of_layer if losses is None else losses + of_layer
    return hidden, losses


def decode_layer(layer: HFModule, hidden: Tensor, layout: SequenceLayout) -> tuple[Tensor, Tensor | None]:
    """Compute one layer: norm, mixer and residual connection, then norm, MLP (or experts) and residual connection.

    hidden: (n, l, D), n rows, l tokens of this process, D channels. Returns (n, l, D), and the losses of the layer's
    router. The losses are None if the layer has no router or `layout.membership` is None.
    """
    normed = layer.input_layernorm(hidden)
    if hasattr(layer, "linear_attn"):
        hidden = hidden + layer.linear_attn(normed, layout)
    else:
        hidden = hidden + full_attention.mix(layer.self_attn, normed, layout)
    normed = layer.post_attention_layernorm(hidden)
    if not hasattr(layer.mlp, "gate"):
        return hidden + layer.mlp(normed), None
    mixed, losses = router.mix(layer.mlp, normed, layout.membership, layout.replayed)
    return hidden + mixed, losses


def _embed(model: HFModule, inputs: ModelInput, context_group: ProcessGroup | None) -> Tensor:
    if context_group is None:
        return vision.embed(model, inputs)
    if inputs.pictures is None:
        return vision.embed(model, replace(inputs, tokens=context_parallel.local_tokens(inputs.tokens, context_group)))
    # Features are matched with the placeholders of whole sequences, so every process runs the tower on all pictures; it
    # differentiates the features of its own tokens.
    return context_parallel.local_tokens(vision.embed(model, inputs), context_group)


def _filter_width(model: HFModule) -> int:
    """Return the number of positions that the filters of the short convolutions cover; 1 for a model without convolutions."""
    return getattr(text_config(model), "linear_conv_kernel_dim", 1)


def _layout(model: HFModule, inputs: ModelInput, hidden: Tensor, context_group: ProcessGroup | None) -> SequenceLayout:
    positions = (
        inputs.positions if context_group is None else context_parallel.local_tokens(inputs.positions, context_group)
    )
    cos, sin = rotary(text_model(model), hidden, positions[..., 1:])
    if inputs.boundaries is None:
        return SequenceLayout(cos, sin, context_group=context_group)
    if inputs.shared is not None and inputs.shared.continues:
        prompts = PromptLayout.of(inputs.shared, _filter_width(model), hidden.device)
        longest = max(inputs.shared.lengths)
        return SequenceLayout(cos, sin, inputs.boundaries, longest, context_group=context_group, prompts=prompts)
    lengths = inputs.boundaries.diff().tolist()
    everywhere = kernels.has_delta_rule(hidden) and kernels.has_varlen_attention(hidden)
    split = None if everywhere else Split.of(lengths, hidden.device)
    return SequenceLayout(
        cos,
        sin,
        inputs.boundaries,
        max(lengths),
        split,
        context_group,
        int64_boundaries=inputs.boundaries.long(),
    )

"""Token-by-token decoding of many sequences of different lengths, with explicit state.

The state is the KV cache of full attention, and the memory and last inputs of each Gated DeltaNet.

A decoder owns a table of *slots*. A sequence occupies one slot from its prompt to its end; occupied slots are always
the first `n`, so that every step works on views and gathers nothing.

        slot   0    1    2   …   n-1 │ n  …
              seq  seq  seq      seq │ free          prefill: fills slots n…   step: advances 0…n-1   move: closes a hole

Weights are read from the live model at every call. When they are replaced between two steps, the KV cache and the recurrent
states that the old weights computed stay in each slot and are not recomputed: the next token is computed from them with the
new weights, as with vLLM's `pause(mode="keep")`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from qwen35_trainer.models.qwen3_5 import HFModule, full_attention, linear_attention, products
from qwen35_trainer.models.qwen3_5.family import text_model
from qwen35_trainer.models.qwen3_5.linear_attention import LinearState


class Decoder:
    """Decodes up to `slots` sequences of at most `max_length` tokens each with the text part of a Qwen3.5 model.

    float32_logits: whether logits stay in float32 instead of being rounded to the model's precision.
    """

    def __init__(self, model: HFModule, slots: int, max_length: int, *, float32_logits: bool = False) -> None:
        self._model, self._float32_logits = model, float32_logits
        self._text = text_model(model)
        config, weight = self._text.config, self._text.embed_tokens.weight
        positions = torch.arange(max_length, device=weight.device).unsqueeze(0)
        cos, sin = self._text.rotary_emb(weight.new_zeros(1), positions)
        self._cos, self._sin = cos[0], sin[0]  # (max_length, rotary dims)
        self.lengths = torch.zeros(slots, dtype=torch.int64, device=weight.device)
        self._layers: list[LinearState | tuple[Tensor, Tensor]] = []
        for layer in self._text.layers:
            if hasattr(layer, "linear_attn"):
                net = layer.linear_attn
                inputs = weight.new_zeros(slots, net.conv1d.weight.shape[-1] - 1, net.conv1d.weight.shape[0])
                memory = inputs.new_zeros(slots, net.num_v_heads, net.head_k_dim, net.head_v_dim, dtype=torch.float32)
                self._layers.append(LinearState(inputs, memory))
            else:
                shape = (slots, config.num_key_value_heads, max_length, layer.self_attn.head_dim)
                self._layers.append((weight.new_zeros(shape), weight.new_zeros(shape)))

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of all slots, whose values have no meaning while no slot is occupied."""
        states = [
            table
            for each in self._layers
            for table in ((each.inputs, each.memory) if isinstance(each, LinearState) else each)
        ]
        return [self.lengths, *states]

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]], slots: Sequence[Sequence[int]]) -> Tensor:
        """Process prompts, and store the decoding state of prompt i in each of `slots[i]`.

        Returns next-token logits (prompts, V).
        """
        device = self.lengths.device
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        tokens = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64, device=device)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = torch.tensor(prompt, device=device)
        rows = [row for row, group in enumerate(slots) for _ in group]
        source = torch.tensor(rows, dtype=torch.int64, device=device)
        target = torch.tensor([slot for group in slots for slot in group], dtype=torch.int64, device=device)
        hidden = self._prompt_states(tokens, lengths, source, target)
        self.lengths[target] = lengths[source]
        last = hidden[torch.arange(len(prompts), device=device), lengths - 1]
        return self._logits(last)

    @torch.inference_mode()
    def log_probs(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Compute the log-probs (T - 1,) float32 of all tokens but the first one of each sequence. No slot changes."""
        device = self.lengths.device
        lengths = torch.tensor([len(sequence) for sequence in sequences], device=device)
        tokens = pad_sequence([torch.tensor(sequence, device=device) for sequence in sequences], batch_first=True)
        none = torch.empty(0, dtype=torch.int64, device=device)
        hidden = self._prompt_states(tokens, lengths, none, none)
        log_probs = []
        for row, length in enumerate(lengths.tolist()):
            predicted = self._logits(hidden[row, : length - 1]).log_softmax(-1)
            log_probs.append(predicted.gather(1, tokens[row, 1:length, None]).squeeze(1))
        return log_probs

    def _prompt_states(self, tokens: Tensor, lengths: Tensor, source: Tensor, target: Tensor) -> Tensor:
        """Return the last layer's output (rows, T, D) for `tokens` (rows, T), padded on the right to rows of `lengths`.

        The decoding state of row `source[i]` is stored in slot `target[i]`.
        """
        hidden = self._text.embed_tokens(tokens)
        for layer, state in zip(self._text.layers, self._layers, strict=True):
            mixer_input = layer.input_layernorm(hidden)
            if isinstance(state, LinearState):
                mixed, final = linear_attention.sequence(layer.linear_attn, mixer_input, lengths)
                state.inputs[target], state.memory[target] = final.inputs[source], final.memory[source]
            else:
                mixed = self._attend_prompt(layer.self_attn, mixer_input, state, source, target)
            hidden = _feed_forward(layer, hidden + mixed)
        return hidden

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        """Append one token to each of the first n slots.  tokens: (n,) int64.  Returns next-token logits (n, V)."""
        n = tokens.shape[0]
        positions = self.lengths[:n]
        longest = int(positions.max()) + 1
        hidden = self._text.embed_tokens(tokens)
        for layer, state in zip(self._text.layers, self._layers, strict=True):
            mixer_input = layer.input_layernorm(hidden)
            if isinstance(state, LinearState):
                view = LinearState(state.inputs[:n], state.memory[:n])
                mixed = linear_attention.step(layer.linear_attn, mixer_input, view)
            else:
                mixed = self._attend_token(layer.self_attn, mixer_input, state, positions, longest)
            hidden = _feed_forward(layer, hidden + mixed)
        self.lengths[:n] += 1
        return self._logits(hidden)

    @torch.inference_mode()
    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy the decoding state of slot `source[i]` to slot `target[i]`.

        source, target: (moves,) int64. No slot may be in both.
        """
        self.lengths[target] = self.lengths[source]
        for state in self._layers:
            for table in (state.inputs, state.memory) if isinstance(state, LinearState) else state:
                table[target] = table[source]

    def _attend_prompt(
        self, layer: HFModule, hidden: Tensor, cache: tuple[Tensor, Tensor], source: Tensor, target: Tensor
    ) -> Tensor:
        length = hidden.shape[1]
        query, key, value, gate = full_attention.project(
            layer, hidden, self._cos[:length, None], self._sin[:length, None]
        )
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        cache[0][target, :, :length], cache[1][target, :, :length] = key[source], value[source]
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return layer.o_proj(output.transpose(1, 2).flatten(2) * gate)

    def _attend_token(
        self, layer: HFModule, hidden: Tensor, cache: tuple[Tensor, Tensor], positions: Tensor, longest: int
    ) -> Tensor:
        n = hidden.shape[0]
        query, key, value, gate = full_attention.project(
            layer, hidden, self._cos[positions, None], self._sin[positions, None]
        )
        rows = torch.arange(n, device=hidden.device)
        cache[0][rows, :, positions], cache[1][rows, :, positions] = key, value
        keys, values = cache[0][:n, :, :longest], cache[1][:n, :, :longest]
        visible = torch.arange(longest, device=hidden.device) <= positions.unsqueeze(1)
        output = F.scaled_dot_product_attention(
            query.unsqueeze(2), keys, values, attn_mask=visible[:, None, None], enable_gqa=True
        )
        return layer.o_proj(output.flatten(1) * gate)

    def _logits(self, hidden: Tensor) -> Tensor:
        normed = self._text.norm(hidden)
        if self._float32_logits:
            return products.rows_times(normed, self._model.lm_head.weight)
        return self._model.lm_head(normed).float()


def _feed_forward(layer: HFModule, hidden: Tensor) -> Tensor:
    normed = layer.post_attention_layernorm(hidden)
    if normed.dim() == 2:  # expert layers take (sequences, positions, D)
        return hidden + layer.mlp(normed.unsqueeze(1)).squeeze(1)
    return hidden + layer.mlp(normed)

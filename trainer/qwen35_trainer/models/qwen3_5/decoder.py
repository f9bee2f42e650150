"""Token-by-token decoding of many sequences of different lengths, with explicit state.

The state of a sequence is the KV cache of each full-attention layer, and the memory and last inputs of
each Gated DeltaNet.

A decoder owns a table of *slots*. A sequence occupies one slot from its prompt to its end. Occupied slots are always
the first `n`, so that a step works on views of the table and copies no state.

        slot   0    1    2   …   n-1 │ n  …
              seq  seq  seq      seq │ free          prefill: fills slots n…   step: advances 0…n-1   move: closes a hole

A prompt may contain pictures. After a picture, rotary positions continue at the longer side of the picture
(`positions.py`), so there are fewer positions than tokens. Each slot therefore has an *offset*: the rotary position of
its next token minus its number of tokens. The offset of a text is 0.

The decoder of a mixture of experts can record which experts the routers choose for the tokens of a call.

Weights are read from the live model at every call. When they are replaced between two steps, the KV cache and the recurrent
states that the old weights computed stay in each slot and are not recomputed: the next token is computed from them with the
new weights, as with vLLM's `pause(mode="keep")`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from qwen35_trainer.models.qwen3_5 import HFModule, full_attention, linear_attention, products, vision
from qwen35_trainer.models.qwen3_5.family import text_model
from qwen35_trainer.models.qwen3_5.linear_attention import LinearState
from qwen35_trainer.models.qwen3_5.multimodal import multimodal_input

if TYPE_CHECKING:
    from qwen35_trainer.data.picture_arrays import PictureArrays

type Rotary = tuple[Tensor, Tensor]
"""Cosine and sine of the rotary embedding: (rows or 1, T, channels) for prompts of T tokens, (n,
channels) for single tokens."""


class Decoder:
    """Decodes up to `slots` sequences of at most `max_length` tokens each with a model.

    model: must be adapted (`adapter.adapt`) if prompts have pictures, because `prefill` then runs the adapted vision tower.
    float32_logits: whether logits stay in float32 instead of being rounded to the model's precision.
    records_choices: whether `chosen` has the experts of the last call; only for a mixture of experts.
    """

    def __init__(
        self,
        model: HFModule,
        slots: int,
        max_length: int,
        *,
        float32_logits: bool = False,
        records_choices: bool = False,
    ) -> None:
        self._model, self._float32_logits = model, float32_logits
        self._text = text_model(model)
        config, weight = self._text.config, self._text.embed_tokens.weight
        positions = torch.arange(max_length, device=weight.device).unsqueeze(0)
        cos, sin = self._text.rotary_emb(weight.new_zeros(1), positions)
        self._cos, self._sin = cos[0], sin[0]  # (max_length, rotary dims)
        self._chosen: list[Tensor] = []  # in the last call, by layer: (tokens, k)
        self._tokens: tuple[int, ...] = (0,)  # in the last call: the dimensions of its tokens
        if records_choices:
            for layer in self._text.layers:
                layer.mlp.gate.register_forward_hook(self._record)
        self.lengths = torch.zeros(slots, dtype=torch.int64, device=weight.device)
        self._offsets = torch.zeros_like(self.lengths)
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
    def chosen(self) -> Tensor:
        """The experts that the routers chose in the last `prefill` or `step`, (…, layers, k) int64.

        The first dimensions are those of the tokens: (prompts, T) after a prefill of prompts of up to T tokens, (n,) after a
        step of n sequences. Only with `records_choices`.
        """
        chosen = torch.stack(self._chosen, dim=1)
        return chosen.unflatten(0, self._tokens)

    def _begin(self, *tokens: int) -> None:
        """Begin a call that computes tokens with these dimensions."""
        self._tokens = tokens
        self._chosen.clear()

    def _record(self, _gate: HFModule, _inputs: object, routed: tuple[Tensor, ...]) -> None:
        self._chosen.append(routed[-1])  # logits, weights, chosen experts

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the decoding state. Their values have no meaning while no slot is occupied."""
        states = [
            table
            for each in self._layers
            for table in ((each.inputs, each.memory) if isinstance(each, LinearState) else each)
        ]
        return [self.lengths, self._offsets, *states]

    @torch.inference_mode()
    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        slots: Sequence[Sequence[int]],
        pictures: Sequence[PictureArrays | None] = (),
        generated: Sequence[int] = (),
    ) -> Tensor:
        """Process prompts, store the decoding state of prompt i in every slot of `slots[i]`, and
        return next-token logits.

        pictures: the pictures of each prompt; empty: all prompts are text.
        generated: for each prompt, the number of tokens at its end that the model generated. Generated tokens are never
          placeholders of pictures. Required if a prompt has pictures, and not used otherwise.

        Returns (prompts, vocabulary). Raises ValueError if the placeholders of a prompt do not match its pictures.
        """
        device = self.lengths.device
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        sequences = [torch.tensor(prompt) for prompt in prompts]
        if any(each is not None for each in pictures):
            hidden, rotary, following = self._scene(sequences, pictures, generated)
        else:
            hidden = self._text.embed_tokens(pad_sequence(sequences, batch_first=True).to(device))
            rotary, following = self._text_rotary(hidden.shape[1]), lengths
        self._begin(*hidden.shape[:2])
        rows = [row for row, group in enumerate(slots) for _ in group]
        source = torch.tensor(rows, dtype=torch.int64, device=device)
        target = torch.tensor([slot for group in slots for slot in group], dtype=torch.int64, device=device)
        hidden = self._prompt_states(hidden, rotary, lengths, source, target)
        self.lengths[target], self._offsets[target] = lengths[source], (following - lengths)[source]
        last = hidden[torch.arange(len(prompts), device=device), lengths - 1]
        return self._logits(last)

    @torch.inference_mode()
    def log_probs(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Compute the log-probs of all tokens but the first of each sequence. No slot changes.

        Returns a (T - 1,) float32 tensor for each sequence of T tokens.
        """
        device = self.lengths.device
        lengths = torch.tensor([len(sequence) for sequence in sequences], device=device)
        tokens = pad_sequence([torch.tensor(sequence, device=device) for sequence in sequences], batch_first=True)
        none = torch.empty(0, dtype=torch.int64, device=device)
        embedded = self._text.embed_tokens(tokens)
        self._begin(*tokens.shape)
        hidden = self._prompt_states(embedded, self._text_rotary(tokens.shape[1]), lengths, none, none)
        log_probs = []
        for row, length in enumerate(lengths.tolist()):
            predicted = self._logits(hidden[row, : length - 1]).log_softmax(-1)
            log_probs.append(predicted.gather(1, tokens[row, 1:length, None]).squeeze(1))
        return log_probs

    def _text_rotary(self, length: int) -> Rotary:
        return self._cos[None, :length], self._sin[None, :length]

    def _scene(
        self, sequences: Sequence[Tensor], pictures: Sequence[PictureArrays | None], generated: Sequence[int]
    ) -> tuple[Tensor, Rotary, Tensor]:
        """Embed prompts some of which have pictures. The arguments are those of `prefill`.

        Returns the first layer's input (rows, T, D), its rotary embedding, and the rotary position (rows,) of the token
        that follows each prompt. T: tokens, D: hidden channels.
        """
        device = self.lengths.device
        written = [torch.arange(len(ids)) >= len(ids) - count for ids, count in zip(sequences, generated, strict=True)]
        inputs = multimodal_input(sequences, pictures, self._model.config, written=written, packed=False, device=device)
        hidden = vision.embed(self._model, inputs)
        places = inputs.positions[..., 1:]  # time, height, width
        last = torch.tensor([len(ids) - 1 for ids in sequences], device=device)
        following = places[torch.arange(len(sequences), device=device), last].amax(-1) + 1
        return hidden, self._text.rotary_emb(hidden, places.movedim(-1, 0)), following

    def _prompt_states(self, hidden: Tensor, rotary: Rotary, lengths: Tensor, source: Tensor, target: Tensor) -> Tensor:
        """Run all layers on prompts: the first layer's input `hidden` (rows, T, D) → the last layer's
        output (rows, T, D).

        Rows of T tokens with D channels are padded on the right; `lengths` has the number of tokens of each row. The
        decoding state of row `source[i]` is stored in slot `target[i]`.
        """
        for layer, state in zip(self._text.layers, self._layers, strict=True):
            mixer_input = layer.input_layernorm(hidden)
            if isinstance(state, LinearState):
                mixed, final = linear_attention.sequence(layer.linear_attn, mixer_input, lengths)
                state.inputs[target], state.memory[target] = final.inputs[source], final.memory[source]
            else:
                mixed = self._attend_prompt(layer.self_attn, mixer_input, rotary, state, source, target)
            hidden = _feed_forward(layer, hidden + mixed)
        return hidden

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        """Append one token to the sequence in each of the first n slots, and return next-token logits (n, vocabulary).

        tokens: (n,) int64.
        """
        n = tokens.shape[0]
        positions = self.lengths[:n]
        longest = int(positions.max()) + 1
        places = positions + self._offsets[:n]
        rotary = self._cos[places], self._sin[places]
        hidden = self._text.embed_tokens(tokens)
        self._begin(n)
        for layer, state in zip(self._text.layers, self._layers, strict=True):
            mixer_input = layer.input_layernorm(hidden)
            if isinstance(state, LinearState):
                view = LinearState(state.inputs[:n], state.memory[:n])
                mixed = linear_attention.step(layer.linear_attn, mixer_input, view)
            else:
                mixed = self._attend_token(layer.self_attn, mixer_input, rotary, state, positions, longest)
            hidden = _feed_forward(layer, hidden + mixed)
        self.lengths[:n] += 1
        return self._logits(hidden)

    @torch.inference_mode()
    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy the decoding state of slot `source[i]` to slot `target[i]`, for every i.

        source, target: (moves,) int64. A slot must not be in both.
        """
        self.lengths[target], self._offsets[target] = self.lengths[source], self._offsets[source]
        for state in self._layers:
            for table in (state.inputs, state.memory) if isinstance(state, LinearState) else state:
                table[target] = table[source]

    def _attend_prompt(
        self,
        layer: HFModule,
        hidden: Tensor,
        rotary: Rotary,
        cache: tuple[Tensor, Tensor],
        source: Tensor,
        target: Tensor,
    ) -> Tensor:
        length = hidden.shape[1]
        query, key, value, gate = full_attention.project(layer, hidden, *(each.unsqueeze(-2) for each in rotary))
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        cache[0][target, :, :length], cache[1][target, :, :length] = key[source], value[source]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return full_attention.output(layer, mixed.transpose(1, 2).flatten(2), gate)

    def _attend_token(
        self,
        layer: HFModule,
        hidden: Tensor,
        rotary: Rotary,
        cache: tuple[Tensor, Tensor],
        positions: Tensor,
        longest: int,
    ) -> Tensor:
        n = hidden.shape[0]
        query, key, value, gate = full_attention.project(layer, hidden, *(each.unsqueeze(-2) for each in rotary))
        rows = torch.arange(n, device=hidden.device)
        cache[0][rows, :, positions], cache[1][rows, :, positions] = key, value
        keys, values = cache[0][:n, :, :longest], cache[1][:n, :, :longest]
        visible = torch.arange(longest, device=hidden.device) <= positions.unsqueeze(1)
        mixed = F.scaled_dot_product_attention(
            query.unsqueeze(2), keys, values, attn_mask=visible[:, None, None], enable_gqa=True
        )
        return full_attention.output(layer, mixed.flatten(1), gate)

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

"""The input of one forward pass: sequences padded to equal length, or packed into a single row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from qwen35_trainer.data.expert_choices import NO_CHOICE
from qwen35_trainer.models.qwen3_5.shared_prompts import SharedPrompts

if TYPE_CHECKING:
    from qwen35_trainer.models.qwen3_5.pictures import Pictures


@dataclass(frozen=True, eq=False)
class ModelInput:
    """The tokens of n sequences, on the device of the model: padded on the right (n rows of L tokens) or
    packed into one row.

    Padding needs no mask. Attention and Gated DeltaNet are causal, so padding to the right of a sequence does not affect
    the sequence. Tokens that are not scored have no gradient.
    """

    tokens: Tensor
    """(n, L) int64 token ids if padded, or (1, T) if packed."""
    positions: Tensor
    """(n, L, 4) or (1, T, 4) int64: the text position, then the three positions of mRoPE (time, height, width). For
    text, all four are equal."""
    boundaries: Tensor | None
    """(n + 1,) int32 cumulative lengths of the sequences in a packed row, from 0 to T; None: the rows are padded."""
    pictures: Pictures | None = None
    """Images and videos of the sequences; None: text only."""
    shared: SharedPrompts | None = None
    """The segments of a packed row in which sequences share prompts. `boundaries` are then those of the segments, and `n`
    is their number. None: each sequence has its own tokens."""
    choices: Tensor | None = None
    """(n, L, layers, k) or (1, T, layers, k) int16: experts that each layer computes for each token, NO_CHOICE (-1) where its
    router chooses; None: routers choose for all tokens."""
    text_only: bool = False
    """Whether no process of the group has pictures in this pass, and the vision tower does not train. The tower then does not
    run. Otherwise it runs even without `pictures`, because other processes may have some."""

    @classmethod
    def of_text(cls, sequences: Sequence[Tensor], *, packed: bool, device: torch.device | str) -> ModelInput:
        """Return the input for sequences of token ids, each (length,) int64.

        packed: whether the sequences are packed into one row; otherwise they are padded. Raises ValueError without
        sequences, or if one is empty.
        """
        if not sequences or any(len(sequence) == 0 for sequence in sequences):
            raise ValueError(
                f"lengths {[len(s) for s in sequences]}: a model reads at least one sequence of at least one token"
            )
        positions = [torch.arange(len(sequence)).unsqueeze(1).expand(-1, 4) for sequence in sequences]
        if not packed:
            tokens, places = pad_sequence(list(sequences), batch_first=True), pad_sequence(positions, batch_first=True)
            return cls(tokens.to(device), places.to(device), None)
        lengths = torch.tensor([0, *map(len, sequences)])
        return cls(
            tokens=torch.cat(list(sequences)).unsqueeze(0).to(device),
            positions=torch.cat(positions).unsqueeze(0).to(device),
            boundaries=lengths.cumsum(0, dtype=torch.int32).to(device),
        )

    def sharing(self, shared: SharedPrompts) -> ModelInput:
        """Return the packed row with the segments of `shared`, made from this packed row of separate sequences.

        A token that several sequences share gets the positions that it has in the first of them. `pictures` must contain the
        pictures of a shared prompt once.
        """
        kept = shared.tokens.to(self.tokens.device)
        lengths = torch.tensor([0, *shared.lengths])
        pictures = self.pictures
        if pictures is not None:
            pictures = replace(pictures, token_types=pictures.token_types.index_select(1, kept))
        return ModelInput(
            self.tokens.index_select(1, kept),
            self.positions.index_select(1, kept),
            lengths.cumsum(0, dtype=torch.int32).to(self.tokens.device),
            pictures,
            shared,
        )

    def replaying(self, choices: Sequence[Tensor]) -> ModelInput:
        """Return this input with the experts that layers compute for the tokens of each sequence, (length, layers, k) int16.

        For a token that several sequences share, they are those of the first of them. Routers choose for a token for which a
        layer has the same expert twice: no router has chosen it, and expert parallelism needs k experts for each token.
        """
        if self.boundaries is None:
            rows = pad_sequence(list(choices), batch_first=True, padding_value=NO_CHOICE)
        else:
            rows = torch.cat(list(choices)).unsqueeze(0)
        if self.shared is not None:
            rows = rows.index_select(1, self.shared.tokens)
        chosen = rows.to(self.tokens.device)
        in_order = chosen.sort(dim=-1).values
        repeats = (in_order[..., 1:] == in_order[..., :-1]).flatten(2).any(-1)
        return replace(self, choices=chosen.masked_fill(repeats[..., None, None], NO_CHOICE))

"""The positions and boundaries of the sequences of one forward pass, in the forms that mixers need.

A mixer is the attention or the Gated DeltaNet of a layer. All layers of a forward pass share one `SequenceLayout`.
Mixers without a kernel that takes boundaries get the sequences of a packed row in buckets (`buckets.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.distributed import ProcessGroup

from qwen35_trainer.models.qwen3_5.buckets import Split
from qwen35_trainer.models.qwen3_5.router import Membership
from qwen35_trainer.models.qwen3_5.shared_prompts import PromptLayout


@dataclass(frozen=True, eq=False)
class SequenceLayout:
    """The positions and boundaries of the sequences of one forward pass: n rows, l tokens per row that
    this process holds.
    """

    cos: Tensor
    """(n, l, rotary channels): cosines of the rotary embedding of this process's tokens."""
    sin: Tensor
    """(n, l, rotary channels): sines of the rotary embedding of this process's tokens."""
    boundaries: Tensor | None = None
    """(sequences + 1,) int32: cumulative lengths of the sequences in a packed row; None: each row is
    one right-padded sequence."""
    longest: int = 0
    """Number of tokens of the longest sequence in a packed row."""
    split: Split | None = None
    """Buckets of the sequences of a packed row. None if rows are padded, or if every mixer has a kernel
    that takes boundaries."""
    context_group: ProcessGroup | None = None
    """Processes that each hold a slice of the tokens; None: this process holds all tokens."""
    membership: Membership | None = None
    """The sequence of each token, for the losses of routers; None: these losses are not computed."""
    replayed: Tensor | None = None
    """(n, l, k) int16: experts that the layer computes for each token, NO_CHOICE (-1) where its router chooses; None: its
    router chooses for all tokens."""
    prompts: PromptLayout | None = None
    """The segments of a packed row in which segments continue a prompt. `boundaries` are then those of the segments, and mixers
    do not use `split`. None: every segment begins a sequence."""
    int64_boundaries: Tensor | None = None
    """`boundaries` in int64, for the kernels of linear attention (`kernels.py`)."""

    def apart(self, mix: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Apply `mix` so that no sequence affects the result of another one.

        mix: a function of right-padded sequences, (sequences, tokens, …). tensors: (rows, tokens, …), where the rows
        are padded sequences or a single packed row. The result has the same first two dimensions as `tensors`.
        """
        if self.boundaries is None:
            return mix(*tensors)
        assert self.split is not None, "a packed row without kernels was not split"
        return self.split.apply(mix, tensors)

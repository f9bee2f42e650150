"""The contract between a rollout worker and the engine that it runs.

A *sequence* is one sample of a prompt; a *group* is all samples of it. Every token carries its log-probability under the
distribution that it was sampled from, and the version of the weights that computed it; weights may change between any two
tokens, and a sequence may go on in another engine with the tokens that it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

type SequenceId = tuple[int, int]
"""(group, index of the sample within it), as the coordinator names it."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. Temperature 0 takes the likeliest token."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all tokens."""


@dataclass(frozen=True)
class Tokens:
    """T generated tokens."""

    ids: NDArray[np.int32]
    """(T,), the end token included when the model produced it."""
    log_probs: NDArray[np.float32]
    """(T,) log-probability of each token under its sampling distribution."""
    versions: NDArray[np.int32]
    """(T,) version of the weights that produced each token."""

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, part: slice) -> Tokens:
        return Tokens(self.ids[part], self.log_probs[part], self.versions[part])

    @classmethod
    def join(cls, parts: Iterable[Tokens]) -> Tokens:
        """One after the other."""
        all_parts = [NO_TOKENS, *parts]
        return cls(
            np.concatenate([part.ids for part in all_parts]),
            np.concatenate([part.log_probs for part in all_parts]),
            np.concatenate([part.versions for part in all_parts]),
        )


NO_TOKENS = Tokens(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32))


@dataclass(frozen=True)
class SequenceRequest:
    """Generate one sequence. Sequences of one group that are submitted together may share the work on their prompt."""

    sequence: SequenceId
    prompt: tuple[int, ...]
    max_tokens: int
    """Response tokens, kept ones included."""
    sampling: Sampling = field(default_factory=Sampling)
    kept: Tokens = NO_TOKENS
    """Response tokens that it has already: it goes on after them."""


@dataclass(frozen=True)
class Completed:
    """One finished sequence."""

    sequence: SequenceId
    tokens: Tokens
    truncated: bool
    """The sequence was cut at its token limit."""


@dataclass(frozen=True)
class StepOutput:
    """What one call of `step` brought."""

    finished: tuple[Completed, ...] = ()
    started: Mapping[SequenceId, int] = field(default_factory=dict)
    """Sequences whose first token was computed in this step, with the weight version that computed it."""
    tokens: int = 0


class RolloutEngine(Protocol):
    """An engine is driven by one thread: everything else happens between two steps."""

    @property
    def version(self) -> int:
        """Version of the weights that the next token comes from."""
        ...

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do."""
        ...

    def submit(self, requests: Sequence[SequenceRequest]) -> None: ...

    def take(self, sequences: Sequence[SequenceId]) -> dict[SequenceId, Tokens]:
        """Drop sequences, running or waiting, and give their tokens; unknown ones are left out (they may have just
        finished).
        """
        ...

    def progress(self) -> dict[SequenceId, Tokens]:
        """What each running sequence has got since the last call."""
        ...

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Replace all weights; adapters (`weights/adapters.py`) compute beside the model's own, in place of those before.

        Running sequences go on with the state that they have. The engine may keep the tensors: the caller never changes them.
        """
        ...

    def step(self) -> StepOutput:
        """Advance every running sequence by one token."""
        ...

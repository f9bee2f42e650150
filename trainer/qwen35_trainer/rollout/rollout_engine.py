"""The interface between a rollout worker and its engine.

A *sequence* is one sample of a prompt; a *group* is all samples of a prompt. Every token carries its log-probability
under the distribution that it was sampled from, and the version of the weights that computed it. Weights may change
between any two tokens, and a sequence may continue in another engine with the tokens that it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from qwen35_trainer.data.candidates import Candidates
from qwen35_trainer.pipeline.events import SequenceId

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """Parameters for drawing the next token. Temperature 0 takes the most likely token."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all tokens."""
    min_p: float = 0.0
    """Drop tokens that are less likely than this share of the most likely token's probability; 0 keeps all."""

    @property
    def truncates(self) -> bool:
        """Whether tokens are drawn from a part of the vocabulary. The most likely token is taken from all of it."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


@dataclass(frozen=True)
class GeneratedTokens:
    """T generated tokens of one sequence."""

    ids: NDArray[np.int32]
    """(T,), the end token included when the model produced it."""
    log_probs: NDArray[np.float32]
    """(T,) log-probability of each token under its sampling distribution."""
    versions: NDArray[np.int32]
    """(T,) version of the weights that produced each token."""
    candidates: Candidates | None = None
    """The tokens that could have been drawn in place of each; None: the whole vocabulary (`Sampling.truncates`)."""

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, part: slice) -> GeneratedTokens:
        candidates = None if self.candidates is None else self.candidates[part]
        return GeneratedTokens(self.ids[part], self.log_probs[part], self.versions[part], candidates)

    @classmethod
    def join(cls, parts: Iterable[GeneratedTokens]) -> GeneratedTokens:
        """Concatenate tokens in order."""
        all_parts = [NO_TOKENS, *parts]
        return cls(
            np.concatenate([part.ids for part in all_parts]),
            np.concatenate([part.log_probs for part in all_parts]),
            np.concatenate([part.versions for part in all_parts]),
            Candidates.join((part.candidates for part in all_parts), map(len, all_parts)),
        )


NO_TOKENS = GeneratedTokens(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32))


@dataclass(frozen=True)
class SequenceRequest:
    """A request to generate one sequence. Sequences of a group that are submitted together may share the prefill of their prompt."""

    sequence: SequenceId
    prompt: NDArray[np.int32]
    """(P,)"""
    max_tokens: int
    """Maximum number of response tokens, including `kept`."""
    sampling: Sampling = field(default_factory=Sampling)
    kept: GeneratedTokens = NO_TOKENS
    """Response tokens that exist already. Generation continues after them."""


def check_lengths(requests: Sequence[SequenceRequest], max_length: int) -> None:
    """Raise ValueError if a prompt and its response do not fit into `max_length` tokens together."""
    for request in requests:
        if len(request.prompt) + request.max_tokens > max_length:
            raise ValueError(
                f"group {request.sequence[0]}: prompt {len(request.prompt)} + response {request.max_tokens} tokens "
                f"exceed the engine's {max_length}; lower data.maxPromptTokens or data.maxResponseTokens"
            )


@dataclass(frozen=True)
class Completed:
    """A finished sequence with its tokens."""

    sequence: SequenceId
    tokens: GeneratedTokens
    truncated: bool
    """Whether the sequence was cut at its token limit."""


@dataclass(frozen=True)
class StepOutput:
    """The result of one call of `step`."""

    finished: tuple[Completed, ...] = ()
    started: Mapping[SequenceId, int] = field(default_factory=dict)
    """Sequences whose first token was computed in this step, with the weight version that computed it."""
    tokens: int = 0


class RolloutEngine(Protocol):
    """An engine that generates sequences. One thread calls `step` repeatedly, and other methods between two steps."""

    @property
    def version(self) -> int:
        """Version of the weights that will compute the next token."""
        ...

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do."""
        ...

    def submit(self, requests: Sequence[SequenceRequest]) -> None: ...

    def take(self, sequences: Sequence[SequenceId]) -> dict[SequenceId, GeneratedTokens]:
        """Drop running and waiting sequences, and return their tokens. Unknown sequences, which may have just finished, are left out."""
        ...

    def progress(self) -> dict[SequenceId, GeneratedTokens]:
        """Return the new tokens of each running sequence since the previous call."""
        ...

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Load a version: all weights of the model, or adapters (`weights/adapters.py`) in place of earlier adapters.

        Running sequences keep their state. The engine may keep the tensors, because the caller never changes them.
        """
        ...

    def step(self) -> StepOutput:
        """Advance every running sequence by one token."""
        ...

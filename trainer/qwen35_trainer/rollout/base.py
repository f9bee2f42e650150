"""The contract between a rollout worker and the engine that it runs.

A *group* is the samples of one prompt. Every token of every sequence carries its log-probability under the distribution
that it was sampled from, and the version of the weights that computed it; weights may change between any two tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. Temperature 0 takes the likeliest token."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all tokens."""


@dataclass(frozen=True)
class GroupRequest:
    """Generate `samples` sequences for one prompt."""

    group: int
    prompt: tuple[int, ...]
    samples: int
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)


@dataclass(frozen=True)
class Completed:
    """One finished sequence of T generated tokens."""

    tokens: NDArray[np.int32]
    """(T,) ids, the end token included when the model produced it."""
    log_probs: NDArray[np.float32]
    """(T,) log-probability of each token under its sampling distribution."""
    versions: NDArray[np.int32]
    """(T,) version of the weights that produced each token."""
    truncated: bool
    """The sequence was cut at its token limit."""


@dataclass(frozen=True)
class GroupResult:
    """All sequences of one request."""

    group: int
    sequences: tuple[Completed, ...]


@dataclass(frozen=True)
class StepOutput:
    """What one call of `step` brought."""

    finished: tuple[GroupResult, ...] = ()
    born: Mapping[int, int] = field(default_factory=dict)
    """Groups whose first token was computed in this step, with the weight version that computed it."""
    tokens: int = 0


class RolloutEngine(Protocol):
    """An engine is driven by one thread: submit, cancel and load happen between two steps."""

    @property
    def version(self) -> int:
        """Version of the weights that the next token comes from."""
        ...

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do."""
        ...

    def submit(self, requests: Sequence[GroupRequest]) -> None: ...

    def cancel(self, groups: Sequence[int]) -> None:
        """Drop groups, running or waiting; unknown ones are ignored (they may just have finished)."""
        ...

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Replace all weights. Running sequences go on with the state that they have."""
        ...

    def step(self) -> StepOutput:
        """Advance every running sequence by one token."""
        ...

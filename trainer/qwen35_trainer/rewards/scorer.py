"""All rewards of a run as one: the weighted sum, and what happens when a part of it fails.

completion ─► every reward, at the same time ─► Score each ─► combine ─► Scored
                                                   │             │
                             the first of a kind is logged       onError: Zero → 0, Skip → no value, Fail → raise

A run ends when every reward fails for all of its first responses (`trial`): it would train on nothing.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from qwen35_trainer.rewards.base import Completion, Reward, RewardError, RewardFailed, RewardTimeoutError, Score
from qwen35_trainer.spec.rewards import OnError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scored:
    """A completion's reward.

    value: the weighted sum, or None when the sample is to be left out. parts: each reward's own score, unweighted; one
    that failed is 0 with `onError: Zero` and absent with Skip. errors: why, by the reward's name. timeouts: those names
    in errors whose call timed out.
    """

    value: float | None
    parts: Mapping[str, float]
    errors: Mapping[str, str]
    timeouts: frozenset[str] = frozenset()

    def first_error(self, prompt: str) -> str:
        """Reward, prompt and reason of the first error; there is at least one."""
        name, error = next(iter(self.errors.items()))
        return f"reward {name}, prompt {prompt}: {error}"


@dataclass(frozen=True)
class Part:
    """A reward and what its failure means."""

    reward: Reward
    on_error: OnError


@dataclass
class Scorer:
    """Scores completions; any number at once. Belongs to the process that built it: worker processes hang on it.

    Close it, or use it as a context manager.
    """

    parts: Sequence[Part]
    trial: int = 0
    """Number of first completions of which at least one must get a score from at least one reward. 0: no check."""
    _kinds: Counter[tuple[str, str]] = field(init=False, default_factory=Counter)
    _untried: int = field(init=False)
    """Completions that the trial still takes; 0 once it is over."""
    _first_error: str = field(init=False, default="")

    def __post_init__(self) -> None:
        self._untried = self.trial

    async def score(self, completion: Completion, *, in_trial: bool = True) -> Scored:
        """The completion's reward. in_trial: whether it counts in the trial.

        Raises RewardFailed when a reward with `onError: Fail` cannot score, or when none could score any completion of the trial.
        """
        scores = await asyncio.gather(*(self._score(part.reward, completion) for part in self.parts))
        scored = combine(completion, self.parts, scores)
        if in_trial and self._untried:
            self._try(completion, scored)
        return scored

    def close(self) -> None:
        """End the worker processes."""
        for part in self.parts:
            part.reward.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _try(self, completion: Completion, scored: Scored) -> None:
        if len(scored.errors) < len(self.parts):
            self._untried = 0
            return
        self._first_error = self._first_error or scored.first_error(completion.prompt.id)
        self._untried -= 1
        if not self._untried:
            raise RewardFailed(
                f"every reward of the first {self.trial} responses failed, so that there is nothing to learn from. "
                f"The first one: {self._first_error}"
            )

    async def _score(self, reward: Reward, completion: Completion) -> Score:
        started = time.monotonic()
        try:
            value = await reward.score(completion)
        except RewardError as error:
            self._log(reward.name, completion.prompt.id, error)
            timed_out = isinstance(error, RewardTimeoutError)
            return Score(None, f"{error.kind}: {error}", time.monotonic() - started, timed_out)
        return Score(value, None, time.monotonic() - started)

    def _log(self, name: str, prompt: str, error: RewardError) -> None:
        # A broken scorer fails for every sample: one traceback per kind is enough, the records count the rest.
        self._kinds[name, error.kind] += 1
        if self._kinds[name, error.kind] == 1:
            logger.warning(
                "reward %s failed on prompt %s: %s: %s (later ones of this kind are only counted)\n%s",
                name,
                prompt,
                error.kind,
                error,
                error.details,
            )


def combine(completion: Completion, parts: Sequence[Part], scores: Sequence[Score]) -> Scored:
    """The weighted sum of the scores, in the order of the parts. Raises RewardFailed for a failed part with `Fail`."""
    values: dict[str, float] = {}
    errors: dict[str, str] = {}
    total: float | None = 0.0
    for part, score in zip(parts, scores, strict=True):
        name, value = part.reward.name, score.value
        if score.error is not None:
            errors[name] = score.error
            if part.on_error == "Fail":
                raise RewardFailed(f"reward {name}, onError Fail, prompt {completion.prompt.id}: {score.error}")
            value = 0.0 if part.on_error == "Zero" else None
        if value is None:
            total = None
            continue
        values[name] = value
        if total is not None:
            total += part.reward.weight * value
    timeouts = frozenset(part.reward.name for part, score in zip(parts, scores, strict=True) if score.timed_out)
    return Scored(total, values, errors, timeouts)

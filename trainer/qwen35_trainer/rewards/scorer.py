"""The combination of all rewards of a run: their weighted sum, and the effect of a reward that fails.

response ─► every reward, at the same time ─► Score each ─► combine ─► CombinedScore
                                                   │             │
                             the first of a kind is logged       onError: Zero → 0, Skip → no value, Fail → raise

A run ends when every reward fails for all of its first responses (`trial`), because there would be nothing to learn from.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from qwen35_trainer.manifest.rewards import OnError
from qwen35_trainer.rewards.reward import Response, Reward, RewardError, RewardFailed, RewardTimeoutError, Score

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CombinedScore:
    """The reward of a response.

    value: the weighted sum, or None if the sample does not train. parts: the unweighted score of each reward. A reward
    that failed has 0 with `onError: Zero`, and is absent with Skip. errors: the errors by reward. timeouts: the rewards
    in `errors` whose call timed out.
    """

    value: float | None
    parts: Mapping[str, float]
    errors: Mapping[str, str]
    timeouts: frozenset[str] = frozenset()

    def first_error(self, prompt: str) -> str:
        """Name the first reward that failed, the prompt, and the reason. There must be an error."""
        name, error = next(iter(self.errors.items()))
        return f"reward {name}, prompt {prompt}: {error}"


@dataclass(frozen=True)
class ConfiguredReward:
    """A reward, and the consequence of its failures."""

    reward: Reward
    on_error: OnError


@dataclass
class Scorer:
    """Scores responses with all rewards, any number of responses at the same time.

    The worker processes belong to the process that built the scorer. Close the scorer, or use it as a context manager.
    """

    parts: Sequence[ConfiguredReward]
    trial: int = 0
    """Number of first responses of which at least one must get a score from at least one reward. 0: no check."""
    _kinds: Counter[tuple[str, str]] = field(init=False, default_factory=Counter)
    _untried: int = field(init=False)
    """Number of responses that remain in the trial; 0 after it."""
    _first_error: str = field(init=False, default="")

    def __post_init__(self) -> None:
        self._untried = self.trial

    async def score(self, response: Response, *, in_trial: bool = True) -> CombinedScore:
        """Score a response with all rewards.

        in_trial: whether the response counts among the run's first responses (`trial`). Raises RewardFailed when a
        reward with `onError: Fail` cannot score, or when no reward could score any response of the trial.
        """
        scores = await asyncio.gather(*(self._score(part.reward, response) for part in self.parts))
        scored = combine(response, self.parts, scores)
        if in_trial and self._untried:
            self._try(response, scored)
        return scored

    def close(self) -> None:
        """End the worker processes."""
        for part in self.parts:
            part.reward.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _try(self, response: Response, scored: CombinedScore) -> None:
        if len(scored.errors) < len(self.parts):
            self._untried = 0
            return
        self._first_error = self._first_error or scored.first_error(response.prompt.id)
        self._untried -= 1
        if not self._untried:
            raise RewardFailed(
                f"every reward of the first {self.trial} responses failed, so that there is nothing to learn from. "
                f"The first one: {self._first_error}"
            )

    async def _score(self, reward: Reward, response: Response) -> Score:
        started = time.monotonic()
        try:
            value = await reward.score(response)
        except RewardError as error:
            self._log(reward.name, response.prompt.id, error)
            timed_out = isinstance(error, RewardTimeoutError)
            return Score(None, f"{error.kind}: {error}", time.monotonic() - started, timed_out)
        return Score(value, None, time.monotonic() - started)

    def _log(self, name: str, prompt: str, error: RewardError) -> None:
        # A broken scorer fails for every sample. One traceback per kind is enough, because the records count the others.
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


def combine(response: Response, parts: Sequence[ConfiguredReward], scores: Sequence[Score]) -> CombinedScore:
    """Combine the scores of all rewards for one response into the weighted sum. `scores` has the order of `parts`.

    Raises RewardFailed for a failed reward with `onError: Fail`.
    """
    values: dict[str, float] = {}
    errors: dict[str, str] = {}
    total: float | None = 0.0
    for part, score in zip(parts, scores, strict=True):
        name, value = part.reward.name, score.value
        if score.error is not None:
            errors[name] = score.error
            if part.on_error == "Fail":
                raise RewardFailed(f"reward {name}, onError Fail, prompt {response.prompt.id}: {score.error}")
            value = 0.0 if part.on_error == "Zero" else None
        if value is None:
            total = None
            continue
        values[name] = value
        if total is not None:
            total += part.reward.weight * value
    timeouts = frozenset(part.reward.name for part, score in zip(parts, scores, strict=True) if score.timed_out)
    return CombinedScore(total, values, errors, timeouts)

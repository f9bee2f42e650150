"""Combine the scores of a response into its reward: the weighted sum of all scores, unless a reward failed.

    Score of each reward ─► combine ─► CombinedScore

onError of a failed reward    effect
Zero                          the reward counts as 0
Skip                          the response gets no reward, so the sample does not train
Fail                          RewardFailed ends the run

The first error of each kind is logged. The first responses of a run are its trial: if every reward fails for all of
them, the run ends, because it has nothing to learn from. `Failures` counts the failed calls for the records.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from qwen35_trainer.rewards.reward import GENERATION, CombinedScore, RewardFailed, Score
from qwen35_trainer.rewards.reward_settings import RewardTerm

logger = logging.getLogger(__name__)

_MAX_LOGGED_KINDS: Final = 100
"""Maximum number of kinds of errors that are logged in one run. Errors of further kinds are not logged.

More kinds occur only if a function creates new types of exceptions while it runs."""
_MAX_FIRST_CHARACTERS: Final = 500


@dataclass
class Combiner:
    """Combines the scores of each response into its reward, and logs the first error of each kind.

    A run has one Combiner.

    terms: the weight and the `onError` policy of each reward.
    """

    terms: Sequence[RewardTerm]
    trial: int = 0
    """Number of responses at the start of the run that form the trial. 0: no trial.

    If every reward fails for every response of the trial, the run ends."""
    _logged: set[tuple[str, str]] = field(init=False, default_factory=set)
    _untried: int = field(init=False)
    """Number of responses of the trial that are still to be scored; 0 once any reward has succeeded,
    or without a trial."""
    _first_error: str = field(init=False, default="")
    _penalties: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self._untried = self.trial
        self._penalties = _penalties(self.terms)

    def combined(self, prompt: str, scores: Sequence[Score], *, in_trial: bool = True) -> CombinedScore:
        """Combine the scores of one response into its reward.

        prompt: id of the prompt.
        scores: one score per reward, in the order of `terms`.
        in_trial: whether the response counts towards the trial. The first responses of the run are the trial, which
          detects rewards that always fail.

        Raises RewardFailed if a reward with `onError: Fail` failed. Also raises it after the last response of the trial
        if every reward failed for every response of the trial.
        """
        for term, score in zip(self.terms, scores, strict=True):
            if score.error is not None:
                self._log(term.name, prompt, score)
        scored = _combined(prompt, self.terms, scores, self._penalties)
        if in_trial and self._untried:
            self._try(prompt, scored)
        return scored

    def combined_group(
        self, prompt: str, scores: Sequence[Sequence[Score]], *, in_trial: bool = True
    ) -> tuple[CombinedScore, ...]:
        """Combine the scores of each response of a group, as `combined` does.

        Most rewards have few values. Responses with the same scores, and without an error, therefore share one object.
        """
        group, shared = list[CombinedScore](), dict[tuple[float | None, ...], CombinedScore]()
        for each in scores:
            values = tuple([score.value for score in each])
            if (scored := shared.get(values)) is None:
                scored = self.combined(prompt, each, in_trial=in_trial)
                if not scored.errors:
                    shared[values] = scored
            group.append(scored)
        return tuple(group)

    def _try(self, prompt: str, scored: CombinedScore) -> None:
        if len(scored.errors) < len(self.terms):
            self._untried = 0
            return
        self._first_error = self._first_error or scored.first_error(prompt)
        self._untried -= 1
        if not self._untried:
            raise RewardFailed(
                f"every reward of the first {self.trial} responses failed, so that there is nothing to learn from. "
                f"The first one: {self._first_error}"
            )

    def _log(self, name: str, prompt: str, score: Score) -> None:
        # A broken reward fails for every sample. One traceback per kind is enough: the records count the others.
        kind = (name, score.kind)
        if kind in self._logged or len(self._logged) == _MAX_LOGGED_KINDS:
            return
        self._logged.add(kind)
        logger.warning(
            "reward %s failed on prompt %s: %s (later ones of this kind are only counted)\n%s",
            name,
            prompt,
            score.error,
            score.details,
        )


def combine(prompt: str, terms: Sequence[RewardTerm], scores: Sequence[Score]) -> CombinedScore:
    """Return the combined score of one response: the weighted sum of its scores, the single scores, and the errors.

    The sum is None if a reward with `onError: Skip` has failed. prompt: id of the prompt. terms, scores: one per reward,
    in the same order. Raises RewardFailed if a reward with `onError: Fail` has failed.
    """
    return _combined(prompt, terms, scores, _penalties(terms))


def _penalties(terms: Sequence[RewardTerm]) -> frozenset[str]:
    return frozenset(term.name for term in terms if term.weight <= 0)


def _combined(
    prompt: str, terms: Sequence[RewardTerm], scores: Sequence[Score], penalties: frozenset[str]
) -> CombinedScore:
    values: dict[str, float] = {}
    errors: dict[str, str] = {}
    timeouts: frozenset[str] = frozenset()
    total: float | None = 0.0
    for term, score in zip(terms, scores, strict=True):
        value = score.value
        if score.error is not None:
            errors[term.name] = score.error
            if score.timed_out:
                timeouts |= {term.name}
            if term.on_error == "Fail":
                raise RewardFailed(f"reward {term.name}, onError Fail, prompt {prompt}: {score.error}")
            value = 0.0 if term.on_error == "Zero" else None
        if value is None:
            total = None
            continue
        values[term.name] = value
        if total is not None:
            total += term.weight * value
    return CombinedScore(total, values, errors, timeouts, penalties)


@dataclass
class Failures:
    """Counts the calls of each reward, and those that failed: time-outs, and all other errors."""

    errors: Counter[str] = field(default_factory=Counter)
    timeouts: Counter[str] = field(default_factory=Counter)
    first: str = ""
    """Reward, prompt and reason of the first failure, cut to _MAX_FIRST_CHARACTERS."""
    calls: Counter[str] = field(default_factory=Counter)
    """Name of a reward → number of its calls, failed ones included."""

    def add(self, prompt: str, scored: CombinedScore) -> None:
        """Count the calls for one response. prompt: id of the prompt. scored: combined score of the response."""
        for name in scored.parts.keys() | scored.errors.keys() if scored.errors else scored.parts:
            if name != GENERATION:  # no reward was called then
                self.calls[name] += 1
        for name in scored.errors:
            counts = self.timeouts if name in scored.timeouts else self.errors
            counts[name] += 1
        if scored.errors and not self.first:
            self.first = scored.first_error(prompt)[:_MAX_FIRST_CHARACTERS]

    def total(self) -> int:
        return self.errors.total() + self.timeouts.total()

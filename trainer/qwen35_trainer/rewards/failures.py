"""Counts the calls of rewards that failed."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from qwen35_trainer.rewards.reward import CombinedScore

_MAX_FIRST_CHARACTERS: Final = 500


@dataclass
class Failures:
    """Counts failed calls by reward: time-outs, and errors of any other kind."""

    errors: Counter[str] = field(default_factory=Counter)
    timeouts: Counter[str] = field(default_factory=Counter)
    first: str = ""
    """Reward, prompt and reason of the first failure, cut to the length of a log line."""

    def add(self, prompt: str, scored: CombinedScore) -> None:
        """Count the failures of one response. prompt: id of its prompt."""
        for name in scored.errors:
            counts = self.timeouts if name in scored.timeouts else self.errors
            counts[name] += 1
        if scored.errors and not self.first:
            self.first = scored.first_error(prompt)[:_MAX_FIRST_CHARACTERS]

    def total(self) -> int:
        return self.errors.total() + self.timeouts.total()

"""Calls of rewards that failed, counted."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from qwen35_trainer.rewards.scorer import Scored

_FIRST_CHARACTERS: Final = 500


@dataclass
class Failures:
    """How many calls failed, by reward: time-outs, and errors of any other kind."""

    errors: Counter[str] = field(default_factory=Counter)
    timeouts: Counter[str] = field(default_factory=Counter)
    first: str = ""
    """Reward, prompt and reason of the first one, cut to a length that a line of a log can have."""

    def add(self, prompt: str, scored: Scored) -> None:
        """Count the failures of one response to the prompt of that id."""
        for name in scored.errors:
            counts = self.timeouts if name in scored.timeouts else self.errors
            counts[name] += 1
        if scored.errors and not self.first:
            self.first = scored.first_error(prompt)[:_FIRST_CHARACTERS]

    def total(self) -> int:
        return self.errors.total() + self.timeouts.total()

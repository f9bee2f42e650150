"""Names the prompts that may end the replicas on which they run.

    a replica is lost ─► each unfinished group with a sequence on it: one loss more ─► those with most losses: a warning

A prompt that ends every replica never finishes, so its number of losses grows with each one. Other groups that run next to it
gather losses too, and finish when they run elsewhere. No group is dropped for its losses, because long responses gather some
by chance.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from qwen35_trainer.pipeline.events import SequenceId

logger = logging.getLogger(__name__)

MIN_LOSSES: Final = 3
"""Losses of replicas with a group after which it is suspected."""
_MAX_NAMED_PROMPTS: Final = 3


class LossCounts:
    """The number of replicas that were lost while they generated a group, for each group that has not left."""

    def __init__(self, prompt_of: Callable[[int], str]) -> None:
        """prompt_of: returns the id of a group's prompt."""
        self._prompt_of = prompt_of
        self._losses: Counter[int] = Counter()

    def lost(self, replica: str, sequences: Iterable[SequenceId]) -> None:
        """Count the loss of a replica that generated these sequences. Logs a warning that names the suspected prompts."""
        groups = {group for group, _ in sequences}
        self._losses.update(groups)
        most = max((self._losses[group] for group in groups), default=0)
        if most < MIN_LOSSES:
            return
        prompts = [self._prompt_of(group) for group in sorted(groups) if self._losses[group] == most]
        others = len(prompts) - _MAX_NAMED_PROMPTS
        logger.warning(
            "%s is loss number %d of a replica that generated prompt %s%s. If there are more, the prompt may be their cause",
            replica,
            most,
            ", ".join(prompts[:_MAX_NAMED_PROMPTS]),
            f" and {others} others" if others > 0 else "",
        )

    def forget(self, group: int) -> None:
        """Drop a group that left the pipeline."""
        self._losses.pop(group, None)

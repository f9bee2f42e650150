"""Names the prompts that may be the reason why replicas are lost.

    a replica is lost ─► each unfinished group with a sequence on it: one loss more ─► those with most losses: a warning

A prompt that ends every replica on which it runs never finishes, so its group gets one more loss each time. Other
groups on the same replicas get losses too, but finish when they run elsewhere. No group is dropped because of its
losses, because long responses get some by chance.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from qwen35_trainer.pipeline.events import SequenceId

logger = logging.getLogger(__name__)

MIN_LOSSES: Final = 3
"""A prompt is suspected when at least this many replicas were lost while they generated its group."""
_MAX_NAMED_PROMPTS: Final = 3


class LossCounts:
    """Counts, for each group that has not left, the replicas that were lost while they generated the group."""

    def __init__(self, prompt_of: Callable[[int], str]) -> None:
        """Begin without losses. prompt_of: returns the id of the prompt of a group, for messages."""
        self._prompt_of = prompt_of
        self._losses: Counter[int] = Counter()

    def lost(self, replica: str, sequences: Iterable[SequenceId]) -> None:
        """Count the loss of a replica that generated `sequences`.

        replica: name of the replica. If prompts are suspected, a warning with their ids is logged.
        """
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
        """Remove a group that has left the pipeline."""
        self._losses.pop(group, None)

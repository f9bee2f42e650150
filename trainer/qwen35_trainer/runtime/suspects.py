"""Finds prompts that are the cause of lost replicas, and gives them up.

    a replica is lost ─► one more loss for each unfinished group with a sequence on it ─┬─ MIN_LOSSES or more: a warning
                                                                                        └─ MAX_LOSSES or more, and the
                                                                                           group has most: it is given up

If a prompt ends every replica that generates it, its group never finishes, and gets one more loss each time. Without a limit it would
end the run and each of its restarts. Other groups on the same replicas get losses too, but finish when other replicas generate them.
Long responses get some losses by chance, and so do all groups when many replicas are lost together, again and again. A group
is therefore given up only if hardly any other one has as many losses.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from qwen35_trainer.pipeline.events import SequenceId

logger = logging.getLogger(__name__)

MIN_LOSSES: Final = 3
"""Minimum number of replicas that were lost while they generated a group, before the group's prompt is suspected."""
MAX_LOSSES: Final = 5
"""Minimum number of such losses before a group is given up."""
MAX_ALIKE: Final = 3
"""Maximum number of groups with as many losses, for them to be given up."""
_MAX_NAMED_PROMPTS: Final = 3


class LossCounts:
    """Counts, for each group in the pipeline, the replicas that were lost while they generated its sequences."""

    def __init__(self, prompt_of: Callable[[int], str]) -> None:
        """Begin without losses. prompt_of: returns the id of the prompt of a group, given the group's number."""
        self._prompt_of = prompt_of
        self._losses: Counter[int] = Counter()

    def lost(self, replica: str, sequences: Iterable[SequenceId], pipeline: int) -> frozenset[int]:
        """Count the loss of a replica that generated `sequences`, and return the groups to give up.

        replica: name of the replica. pipeline: number of groups in the pipeline. If at least MIN_LOSSES replicas were lost while they generated the same group, the
        prompt of this group may be the cause. A warning is then logged, with the ids of the prompts with the largest number
        of such losses. These groups are returned if they have MAX_LOSSES or more, and at most MAX_ALIKE groups, and
        not all in the pipeline, have as many.
        """
        groups = {group for group, _ in sequences}
        self._losses.update(groups)
        most = max((self._losses[group] for group in groups), default=0)
        if most < MIN_LOSSES:
            return frozenset()
        suspected = frozenset(group for group in groups if self._losses[group] == most)
        prompts = [self._prompt_of(group) for group in sorted(suspected)]
        others = len(prompts) - _MAX_NAMED_PROMPTS
        logger.warning(
            "%s is loss number %d of a replica that generated prompt %s%s. If there are more, the prompt may be their cause",
            replica,
            most,
            ", ".join(prompts[:_MAX_NAMED_PROMPTS]),
            f" and {others} others" if others > 0 else "",
        )
        alike = sum(losses >= most for losses in self._losses.values())
        is_rare = alike <= MAX_ALIKE and alike < pipeline
        return suspected if most >= MAX_LOSSES and is_rare else frozenset()

    def forget(self, group: int) -> None:
        """Drop the number of losses that were counted for a group, because the group has left the pipeline."""
        self._losses.pop(group, None)

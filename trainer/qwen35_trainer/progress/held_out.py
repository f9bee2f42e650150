"""The measures of the held-out prompts as text: the same in the panel, at the end of a run and in its report.

Accuracy is the share of responses to which every reward gives at least 1. A graded reward may improve for a whole run without
one such response, so accuracy is shown once there is one. Where every response gets either 0 or 1, mean reward and accuracy
are the same number, and only accuracy is shown.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from qwen35_trainer.progress import formatting
from qwen35_trainer.progress.summary import Summary


class Measure(NamedTuple):
    """A number of the held-out prompts: its name, such as "accuracy", and its course, such as "12% → 75%"."""

    name: str
    course: str
    unit: str = ""


type Measured = tuple[float | None, float | None]
"""Accuracy and mean reward of one evaluation; None where it has no such number."""


def measures(evaluations: Sequence[Measured]) -> list[Measure]:
    """The measures to show.

    evaluations: those to compare, the earliest first; usually the first and the latest of a run.
    """
    accuracies = [accuracy for accuracy, _ in evaluations if accuracy is not None]
    rewards = [reward for _, reward in evaluations if reward is not None]
    found = []
    if accuracies and accuracy_is_meaningful(evaluations):
        found.append(Measure("accuracy", course([formatting.percent(accuracy) for accuracy in accuracies])))
    if reward_is_meaningful(evaluations):
        found.append(Measure("reward", course([f"{reward:.3f}" for reward in rewards])))
    return found


def of_summary(summary: Summary) -> list[Measure]:
    """The measures of a run before training and at its last evaluation; for SFT, its loss."""
    losses = [loss for loss in (summary["heldOutLossBefore"], summary["heldOutLossAfter"]) if loss is not None]
    if losses:
        return [Measure("loss", course([f"{loss:.3f}" for loss in losses]), "nats per token")]
    return measures(
        [
            (summary["accuracyBefore"], summary["heldOutRewardBefore"]),
            (summary["accuracyAfter"], summary["heldOutRewardAfter"]),
        ]
    )


def accuracy_is_meaningful(evaluations: Sequence[Measured]) -> bool:
    """Whether some response was right, or accuracy and mean reward are the same number."""
    return _equal(evaluations) or any(accuracy is not None and accuracy > 0 for accuracy, _ in evaluations)


def reward_is_meaningful(evaluations: Sequence[Measured]) -> bool:
    """Whether there is a mean reward that accuracy does not show too."""
    return not _equal(evaluations)


def course(values: Sequence[str]) -> str:
    """From the first to the last: "12% → 75%"."""
    return " → ".join(values)


def _equal(evaluations: Sequence[Measured]) -> bool:
    """Whether accuracy and mean reward are the same number everywhere; weights such as 0.7, 0.2 and 0.1 may not add up to 1."""
    return all(
        reward is None or (accuracy is not None and math.isclose(accuracy, reward, abs_tol=1e-9))
        for accuracy, reward in evaluations
    )

"""The measures of the held-out prompts as text, for the panel, the end of a run and the report.

Accuracy is the share of responses to which every reward gives at least 1. With a graded reward, accuracy can stay 0
while the mean reward improves, so accuracy is shown only once it is above 0. If every response gets either 0 or 1, mean
reward and accuracy are equal, and only accuracy is shown.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from qwen35_trainer import formatting
from qwen35_trainer.progress.summary import Summary


class HeldOutMeasure(NamedTuple):
    """A measure of the held-out prompts: a name, such as "accuracy", and values as text, such as "12% → 75%"."""

    name: str
    values: str
    unit: str = ""


type HeldOutResult = tuple[float | None, float | None]
"""Accuracy and mean reward of one evaluation. Each is None if the evaluation does not have it, as in SFT."""


def measures(evaluations: Sequence[HeldOutResult]) -> list[HeldOutMeasure]:
    """Return the measures to show for the held-out prompts, each with its values in all evaluations.

    evaluations: accuracy and mean reward of each evaluation, in order. Usually these are the first and the latest
    evaluation of a run.
    """
    accuracies = [accuracy for accuracy, _ in evaluations if accuracy is not None]
    rewards = [reward for _, reward in evaluations if reward is not None]
    shown = []
    if accuracies and accuracy_is_meaningful(evaluations):
        shown.append(HeldOutMeasure("accuracy", arrows([formatting.percent(accuracy) for accuracy in accuracies])))
    if reward_is_meaningful(evaluations):
        shown.append(HeldOutMeasure("reward", arrows([f"{reward:.3f}" for reward in rewards])))
    return shown


def summary_measures(summary: Summary) -> list[HeldOutMeasure]:
    """Return the held-out measures of a run, each with its values before training and at the last evaluation.

    In SFT, the only measure is the loss.
    """
    losses = [loss for loss in (summary["heldOutLossBefore"], summary["heldOutLossAfter"]) if loss is not None]
    if losses:
        return [HeldOutMeasure("loss", arrows([f"{loss:.3f}" for loss in losses]), "nats per token")]
    return measures(
        [
            (summary["accuracyBefore"], summary["heldOutRewardBefore"]),
            (summary["accuracyAfter"], summary["heldOutRewardAfter"]),
        ]
    )


def accuracy_is_meaningful(evaluations: Sequence[HeldOutResult]) -> bool:
    """Return whether to show accuracy.

    Accuracy is shown if it is above 0 in some evaluation, or equals the mean reward in all evaluations. Otherwise rewards
    have other values than 0 and 1, and an accuracy that is always 0 gives no information.
    """
    return _equal(evaluations) or any(accuracy is not None and accuracy > 0 for accuracy, _ in evaluations)


def reward_is_meaningful(evaluations: Sequence[HeldOutResult]) -> bool:
    """Return whether to show the mean reward. It is shown if it differs from the accuracy in some evaluation."""
    return not _equal(evaluations)


def arrows(values: Sequence[str]) -> str:
    """Join values with arrows, from the first to the last: "12% → 75%"."""
    return " → ".join(values)


def _equal(evaluations: Sequence[HeldOutResult]) -> bool:
    """Return whether accuracy and mean reward are equal in every evaluation.

    The comparison has a tolerance, because in floating point, weights such as 0.7, 0.2 and 0.1 may not add up to 1.
    """
    return all(
        reward is None or (accuracy is not None and math.isclose(accuracy, reward, abs_tol=1e-9))
        for accuracy, reward in evaluations
    )

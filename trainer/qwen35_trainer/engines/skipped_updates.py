"""The rule for gradients that are not finite: the step is skipped, and after several skipped steps in a row the run ends."""

from __future__ import annotations

import logging
import math

from qwen35_trainer.failure_reasons import FailureReason

logger = logging.getLogger(__name__)

MAX_SKIPPED_UPDATES = 5
"""Number of consecutive updates with an infinite or NaN gradient after which the run ends, because it would never learn
again."""


class NotFinite(RuntimeError):
    """Gradients were infinite or NaN for `MAX_SKIPPED_UPDATES` consecutive updates."""

    failure = FailureReason.NOT_FINITE


class NotFiniteInSFT(NotFinite):
    """Gradients of SFT were infinite or NaN for `MAX_SKIPPED_UPDATES` consecutive updates.

    The run is not restarted after this error, because another attempt would train on the same examples.
    """

    failure = FailureReason.NOT_FINITE_IN_SFT


class SkippedUpdates:
    """Counts consecutive skipped updates. All ranks have the same norms, so they decide alike.

    sft: whether the run is SFT, which decides the exception.
    """

    def __init__(self, *, sft: bool) -> None:
        self._sft, self._count = sft, 0

    def add(self, norm: float) -> None:
        """Count an update by the norm of its gradient.

        Raises NotFinite or NotFiniteInSFT if this is the last of `MAX_SKIPPED_UPDATES` consecutive updates whose norm is infinite
        or NaN.
        """
        if math.isfinite(norm):
            self._count = 0
            return
        self._count += 1
        logger.warning("update skipped: the gradient's norm is %s (%d in a row)", norm, self._count)
        if self._count == MAX_SKIPPED_UPDATES:
            raise (NotFiniteInSFT if self._sft else NotFinite)(
                f"the gradient's norm is {norm} for the {MAX_SKIPPED_UPDATES}th step in a row, and all of them were skipped: lower "
                "spec.train.optimizer.learningRate, or compute in more precision (spec.model.precision FP32)"
            )
